"""gpt-oss: messages on channels, whatever the cuts; reasoning, content and calls beside each other; what is broken."""

import json
import random
import re
import time
from typing import Any

import msgspec
import pytest
from support.fake_engine_client import FakeClient, ask
from support.scripted_answers import TOOLS, ScriptedClient, cut, info

from overlap_spec.entrypoints.openai.tools import AnswerFormat, AnswerParser
from overlap_spec.entrypoints.parsers.formats import call_format, reasoning_format
from overlap_spec.entrypoints.parsers.harmony import (
    BRIDGE,
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    HEADER,
    MARKERS,
    MESSAGE,
    OPENING,
    RETURN,
    START,
)
from overlap_spec.entrypoints.parsers.pieces import ToolNames
from overlap_spec.messages import ChatPrompt, FinishKind, Reasoning

ROME = '{"city": "R\u00f4me \\"x\\"\\n"}'
CALLED = f"{CHANNEL}commentary to=functions.weather {CONSTRAIN}json{MESSAGE}"
PREAMBLE = f"{BRIDGE}{CHANNEL}commentary{MESSAGE}I look.{END}"
ANSWER = f"{OPENING} Let me\n see. {END}{PREAMBLE}{BRIDGE}{CALLED}{ROME}"
Read = tuple[str, str, list[tuple[str, str]], int]
# text, reasoning, content, calls
GOOD: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (ANSWER, "Let me\n see.", "I look.", [("weather", ROME)]),
    (f"{ANSWER}{CALL}", "Let me\n see.", "I look.", [("weather", ROME)]),
    (f"{OPENING}why{END}{BRIDGE}{HEADER} because\n{RETURN}", "why", " because\n", []),
    (f"{OPENING}a{END}{BRIDGE}{OPENING}b{END}{BRIDGE}{HEADER}c", "a\nb", "c", []),
    (f"{HEADER}a{END}{BRIDGE}{HEADER}b", "", "a\nb", []),
    (f"{OPENING}a{BRIDGE}{HEADER}b", "a", "b", []),
    (f"{OPENING}a{CHANNEL}final{MESSAGE}b", "a", "b", []),
    (f"{OPENING}it never ends", "it never ends", "", []),
    (f"{OPENING}a{END}{START}assis", "a", "", []),
    (f"{OPENING}a{END}\n", "a", "", []),
    (f" to=functions.weather{CHANNEL}commentary json{MESSAGE}{ROME}", "", "", [("weather", ROME)]),
    (f"{OPENING}a{END}{BRIDGE} to=functions.f{CHANNEL}analysis{MESSAGE}{{}}", "a", "", [("f", "{}")]),
    ("plain text", "", "plain text", []),
    ("to", "", "to", []),
    ("  1 < 2", "", "  1 < 2", []),
    (f"{OPENING}a{END}{BRIDGE}{CALLED}{{oops}}{CALL}", "a", f"{BRIDGE}{CALLED}{{oops}}{CALL}", []),
    (f"{CHANNEL}commentary to=python{MESSAGE}1+1{CALL}", "", f"{CHANNEL}commentary to=python{MESSAGE}1+1{CALL}", []),
    (f"{OPENING}a{END}{CHANNEL}{'x' * 600}", "a", f"{CHANNEL}{'x' * 600}", []),
]


def form(streams_reasoning: bool = True) -> AnswerFormat:
    known = call_format("gpt-oss", ""), reasoning_format("gpt-oss", "")
    return AnswerFormat(known[0], ToolNames(("weather",)), None, known[1], streams_reasoning)


def read(pieces: list[str], streams: bool = True, is_cut: bool = False, asked: AnswerFormat | None = None) -> Read:
    """Reasoning, content, calls, and how many of them are complete."""
    parser = AnswerParser(asked or form(), streams)
    found = parser.push("")
    for piece in pieces:
        found = found.then(parser.push(piece))
    found = found.then(parser.end(is_cut))
    calls: dict[int, tuple[str, str]] = {}
    for piece in found.tool_calls:
        name, arguments = calls.get(piece.index, (piece.name, ""))
        calls[piece.index] = name, arguments + piece.arguments
    return found.reasoning, found.content, list(calls.values()), parser.num_calls


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), GOOD)
def test_messages_whatever_the_cuts(text: str, reasoning: str, content: str, calls: list[tuple[str, str]]) -> None:
    rng = random.Random(text)
    want = reasoning, content, calls, len(calls)
    for pieces in ([text], list(text), *(cut(text, rng) for _ in range(30))):
        assert read(pieces, streams=False) == want
        if "oops" not in text:  # a stream has begun that call
            assert read(pieces) == want


def test_a_call_that_another_message_follows() -> None:
    """Its end is left out."""
    text = f"{CALLED}{ROME}{BRIDGE}{HEADER}, so"
    for pieces in ([text], list(text)):
        assert read(pieces) == ("", ", so", [("weather", ROME)], 1)
    known = form()
    apart = AnswerParser(AnswerFormat(reasoning=known.reasoning), streams=True)
    assert apart.push(text).then(apart.end(is_cut=False)).content == f"{CALLED}{ROME}{END}, so"


def test_an_answer_may_be_cut_after_any_token() -> None:
    inside = {at for found in re.finditer(r"<\|\w+\|>", ANSWER) for at in range(found.start() + 1, found.end())}
    for end in sorted({*range(len(ANSWER))} - inside):  # a marker is one token
        reasoning, content, calls, complete = read([ANSWER[:end]], streams=False, is_cut=True)
        assert (reasoning, content, calls, complete) == read(list(ANSWER[:end]), is_cut=True)
        assert "Let me\n see.".startswith(reasoning) and "I look.".startswith(content.split(BRIDGE)[0])
        assert complete == 0 and all(ROME.startswith(arguments) for _, arguments in calls)


def test_reasoning_is_streamed_or_comes_at_once() -> None:
    for streams, want in ((True, ["a", " b", "", ""]), (False, ["", "", "a b", ""])):
        parser = AnswerParser(form(streams), True)
        pieces = (f"{OPENING}a", " b", f"{END}{BRIDGE}", f"{HEADER}c")
        assert [parser.push(piece).reasoning for piece in pieces] == want


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("seed", range(20))
def test_texts_of_markers_and_fragments(seed: int) -> None:
    """The cuts change nothing, and what is broken does not hide what follows."""
    rng = random.Random(seed)
    parts = [
        *MARKERS,
        OPENING,
        HEADER,
        CALLED,
        BRIDGE,
        END + BRIDGE,
        "to=",
        "final",
        " ",
        "word",
        "{}",
        '{"a": 1}',
        "\n",
        "<",
    ]
    text = "".join(rng.choices(parts, k=40)) + f"{BRIDGE}{HEADER}the end"
    want, whole = read([text]), read([text], streams=False)
    for _ in range(10):
        assert read(cut(text, rng)) == want and read(cut(text, rng), streams=False) == whole
    for _, arguments in whole[2]:
        assert isinstance(json.loads(arguments), dict)
    assert whole[1].endswith("the end")


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [CHANNEL * 4000, START + "x" * 40_000, OPENING + " " * 40_000, (OPENING + END) * 1500, (CHANNEL + "x" * 500) * 80],
)
def test_an_answer_is_read_in_time_that_is_linear_in_it(text: str) -> None:
    parser, began = AnswerParser(form(), True), time.thread_time()
    for char in text:
        parser.push(char)
    parser.end(is_cut=True)
    assert time.thread_time() - began < 3.0


MESSAGES: Any = [{"role": "user", "content": "The weather in Rome?"}]


def test_a_chat_has_reasoning_content_and_a_call() -> None:
    what = info("gpt-oss", "gpt-oss")
    body = {"messages": MESSAGES, "tools": TOOLS}
    client = ScriptedClient(pieces=[*cut(ANSWER, random.Random(0)), ""])
    (choice,) = ask(client, "POST", "/v1/chat/completions", what, json=body).json()["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "I look.")
    assert message["reasoning_content"] == "Let me\n see."
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "weather", "arguments": ROME}]
    ((_, _, sampling),) = client.asked
    assert sampling.shown_tokens == MARKERS
    assert sampling.reasoning == Reasoning(OPENING, END, bridge=BRIDGE, header=HEADER)
    client = ScriptedClient(pieces=[ANSWER[:-5]], kind=FinishKind.LENGTH)
    (choice,) = ask(client, "POST", "/v1/chat/completions", what, json=body).json()["choices"]
    assert choice["finish_reason"] == "length"


def test_messages_and_responses_have_them_too() -> None:
    what = info("gpt-oss", "gpt-oss")
    schema = TOOLS[0]["function"]["parameters"]
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 99, "messages": MESSAGES}
    body["tools"] = [{"name": "weather", "input_schema": schema}]
    reply = ask(ScriptedClient(pieces=[ANSWER]), "POST", "/v1/messages", what, json=body).json()
    assert [block["type"] for block in reply["content"]] == ["thinking", "text", "tool_use"]
    assert reply["content"][2]["input"] == json.loads(ROME)
    body = {"model": "tiny", "input": "Rome?", "tools": [{"type": "function", "name": "weather", "parameters": schema}]}
    reply = ask(ScriptedClient(pieces=[ANSWER]), "POST", "/v1/responses", what, json=body).json()
    assert [item["type"] for item in reply["output"]] == ["reasoning", "message", "function_call"]
    assert reply["output"][2]["arguments"] == ROME


@pytest.mark.parametrize(
    ("change", "header"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, ""),
        ({"response_format": {"type": "json_object"}}, HEADER),
        ({"tools": TOOLS}, HEADER),
    ],
)
def test_a_grammar_knows_what_precedes_it(change: dict[str, Any], header: str) -> None:
    client = ScriptedClient(pieces=[f"{HEADER}hi"])
    what = info("gpt-oss", "gpt-oss")
    assert ask(client, "POST", "/v1/chat/completions", what, json={"messages": MESSAGES, **change}).status_code == 200
    reasoning = client.asked[0][2].reasoning
    assert reasoning is not None and (reasoning.bridge, reasoning.header) == (BRIDGE, header)


@pytest.mark.parametrize(
    ("message", "thinking"),
    [
        ({"content": "a", "reasoning_content": "b"}, "b"),
        ({"content": "", "reasoning_content": "b", "tool_calls": [{"function": {"name": "f"}}]}, "b"),
        ({"content": "a", "reasoning_content": "b", "tool_calls": [{"function": {"name": "f"}}]}, None),
        ({"content": "a", "reasoning_content": "b", "thinking": "c"}, "c"),
        ({"content": "a"}, None),
    ],
)
def test_earlier_reasoning_is_where_the_template_looks_for_it(message: dict[str, Any], thinking: str | None) -> None:
    for reasoning in ("gpt-oss", "qwen3"):
        client = FakeClient()
        messages = [*MESSAGES, {"role": "assistant", **message}, *MESSAGES]
        reply = ask(client, "POST", "/v1/chat/completions", info("none", reasoning), json={"messages": messages})
        assert reply.status_code == 200, reply.text
        ((_, prompt, _),) = client.asked
        assert isinstance(prompt, ChatPrompt)
        want = thinking if reasoning == "gpt-oss" else message.get("thinking")
        assert prompt.messages[1].get("thinking") == want


def test_a_thinking_budget_ends_the_reasoning_alone() -> None:
    known = msgspec.structs.replace(info("none", "gpt-oss"))
    client = ScriptedClient(pieces=[f"{HEADER}hi"])
    body = {"messages": MESSAGES, "thinking_budget": 7}
    assert ask(client, "POST", "/v1/chat/completions", known, json=body).status_code == 200
    assert client.asked[0][2].reasoning == Reasoning(OPENING, END, budget=7, bridge=BRIDGE, header=HEADER)
