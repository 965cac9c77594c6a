"""Chats with tools and reasoning: what the openai client gets, whole and streamed, and which requests are refused."""

import asyncio
import json
import random
from typing import Any

import msgspec
import pytest
from support.fake_engine_client import FakeClient, ask
from support.fake_facts import fake_facts
from support.fake_settings import fake_settings
from support.scripted_answers import TOOLS, ScriptedClient, Serving, cut, info

from overlap_spec.config import EngineConfig
from overlap_spec.entrypoints.http.engine_client import ServerInfo, server_info
from overlap_spec.entrypoints.parsers import harmony
from overlap_spec.entrypoints.parsers.call_rules import CallableTool
from overlap_spec.entrypoints.parsers.formats import call_format, reasoning_format
from overlap_spec.entrypoints.parsers.sections import DEEPSEEK, KIMI
from overlap_spec.messages import ChatPrompt, FinishKind, FrontendFacts, Reasoning

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "The weather in Rome, and the time?"}]
ROME, OSLO = '{"city": "Rome"}', '{"city": "Oslo"}'
BEGIN, CALL, SEP, CALL_END, END = DEEPSEEK.all
ANSWERS = {
    "hermes": f'Wait.\n<tool_call>{{"name": "weather", "arguments": {ROME}}}</tool_call>\n'
    f'<tool_call>{{"name": "clock", "arguments": {OSLO}}}</tool_call>',
    "llama3_json": f'Wait.<|python_tag|>{{"name": "weather", "parameters": {ROME}}};'
    f'{{"name": "clock", "parameters": {OSLO}}}',
    "mistral": f"Wait.[TOOL_CALLS]weather[ARGS]{ROME}[TOOL_CALLS]clock[ARGS]{OSLO}",
    "deepseekv3": f"Wait.{BEGIN}{CALL}function{SEP}weather\n```json\n{ROME}\n```{CALL_END}\n"
    f"{CALL}function{SEP}clock\n```json\n{OSLO}\n```{CALL_END}{END}",
    "deepseekv31": f"Wait.{BEGIN}{CALL}weather{SEP}{ROME}{CALL_END}{CALL}clock{SEP}{OSLO}{CALL_END}{END}",
    "kimi_k2": f"Wait.{KIMI.begin}{KIMI.call}functions.weather:0{KIMI.separator}{ROME}{KIMI.call_end}"
    f"{KIMI.call}functions.clock:1{KIMI.separator}{OSLO}{KIMI.call_end}{KIMI.end}",
    "glm45": "Wait.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>\n"
    "<tool_call>clock\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
    "gpt-oss": f"Wait.{harmony.BRIDGE}{harmony.CHANNEL}commentary to=functions.weather {harmony.CONSTRAIN}json"
    f"{harmony.MESSAGE}{ROME}{harmony.CALL}{harmony.BRIDGE} to=functions.clock{harmony.CHANNEL}commentary json"
    f"{harmony.MESSAGE}{OSLO}",
    "qwen3_coder": "Wait.\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=clock>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
    "gemma4": 'Wait.<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|>'
    '<|tool_call>call:clock{city:<|"|>Oslo<|"|>}<tool_call|>',
    "pythonic": 'Wait. [weather(city="Rome"), clock(city="Oslo")]',
}
every_format = pytest.mark.parametrize("name", ANSWERS)


async def whole_and_streamed(client: ScriptedClient, what: ServerInfo, **request: Any) -> tuple[Any, Any, list[Any]]:
    """The choice of a whole answer, the one that the client's stream helper puts together, and all deltas."""
    request = {"model": "tiny", "messages": MESSAGES, **request}
    async with Serving(client, what) as api:
        whole = (await api.chat.completions.create(**request)).choices[0]
        chunks = [chunk async for chunk in await api.chat.completions.create(**request, stream=True)]
        async with api.chat.completions.stream(**request) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
    return whole, streamed, [chunk.choices[0].delta for chunk in chunks]


def answers(text: str, seed: int = 0) -> ScriptedClient:
    return ScriptedClient(pieces=[*cut(text, random.Random(seed)), ""])


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


@pytest.mark.slow_but_every(4)
@every_format
def test_calls_as_the_openai_client_reads_them(name: str) -> None:
    client = answers(ANSWERS[name])
    whole, streamed, deltas = asyncio.run(whole_and_streamed(client, info(name), tools=TOOLS))
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Wait."
        assert [(n, json.loads(a)) for n, a in calls_of(choice.message)] == [
            ("weather", json.loads(ROME)),
            ("clock", json.loads(OSLO)),
        ]
        assert all(call.type == "function" for call in choice.message.tool_calls)
    assert calls_of(whole.message) == calls_of(streamed.message)
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    named = [piece for piece in pieces if piece.function.name]
    assert [piece.index for piece in named] == [0, 1] and len({piece.id for piece in named}) == 2
    assert all(piece.id is None and piece.type is None for piece in pieces if not piece.function.name)
    if name != "pythonic":
        assert sum(piece.index == 0 for piece in pieces) > 2, "arguments come in pieces"
    ids = [call.id for call in whole.message.tool_calls]
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids) == (name == "mistral")
    assert name != "kimi_k2" or ids == ["functions.weather:0", "functions.clock:1"]
    ((_, prompt, sampling), *_) = client.asked
    assert isinstance(prompt, ChatPrompt) and prompt.tools == TOOLS
    markers = call_format(name, "")
    assert markers is not None and sampling.shown_tokens == markers.markers


def test_content_is_null_beside_calls_alone() -> None:
    text = f'<tool_call>{{"name": "clock", "arguments": {ROME}}}</tool_call>'
    whole, streamed, _ = asyncio.run(whole_and_streamed(answers(text), info("hermes"), tools=TOOLS))
    assert whole.message.content is None and streamed.message.content is None


def test_a_call_cut_by_the_limit_is_not_done() -> None:
    client = ScriptedClient(
        pieces=['<tool_call>{"name": "clock", "argu', 'ments": {"city": "Ro'], kind=FinishKind.LENGTH
    )

    async def inner() -> None:
        async with Serving(client, info("hermes")) as api:
            whole = await api.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS)
            assert whole.choices[0].finish_reason == "length"
            assert calls_of(whole.choices[0].message) == [("clock", '{"city": "Ro')]

    asyncio.run(inner())


@pytest.mark.parametrize(
    ("kind", "reason"), [(FinishKind.LENGTH, "length"), (FinishKind.ABORT, "abort"), (FinishKind.STOP, "tool_calls")]
)
def test_an_answer_that_is_cut_after_a_whole_call_says_so(kind: FinishKind, reason: str) -> None:
    client = ScriptedClient(pieces=[f'<tool_call>{{"name": "clock", "arguments": {ROME}}}</tool_call>'], kind=kind)
    body = {"messages": MESSAGES, "tools": TOOLS}
    (choice,) = ask(client, "POST", CHAT, info("hermes"), json=body).json()["choices"]
    assert choice["finish_reason"] == reason
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["clock"]


def test_a_broken_call_is_content_and_no_call() -> None:
    text = '<tool_call>{"name": "clock", "arguments": {"city": Rome}}</tool_call>'
    body = {"messages": MESSAGES, "tools": TOOLS}
    (choice,) = ask(answers(text), "POST", CHAT, info("hermes"), json=body).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] == "stop"


def test_without_tools_or_with_none_nothing_is_parsed() -> None:
    for body in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        client = answers(ANSWERS["hermes"])
        (choice,) = ask(client, "POST", CHAT, info("hermes"), json={"messages": MESSAGES, **body}).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": ANSWERS["hermes"]}
        ((_, prompt, sampling),) = client.asked
        assert isinstance(prompt, ChatPrompt) and prompt.tools is None
        assert (sampling.shown_tokens, sampling.reasoning) == ((), None)


def test_without_a_parser_the_text_is_content() -> None:
    body = {"messages": MESSAGES, "tools": TOOLS}
    (choice,) = ask(answers(ANSWERS["hermes"]), "POST", CHAT, info(), json=body).json()["choices"]
    assert choice["message"]["content"] == ANSWERS["hermes"]


def test_one_call_at_most() -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}
    (choice,) = ask(answers(ANSWERS["hermes"]), "POST", CHAT, info("hermes"), json=body).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": ROME}


def test_reasoning_apart_from_content_and_calls() -> None:
    text = "<think>\nHm, Rome.\n</think>\n\n" + ANSWERS["hermes"]
    what = info("hermes", "qwen3")
    whole, _, deltas = asyncio.run(whole_and_streamed(answers(text), what, tools=TOOLS))
    assert whole.message.reasoning_content == "Hm, Rome." and whole.message.content == "Wait."
    thought = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
    assert "".join(thought) == "Hm, Rome." and len(thought) > 1


@pytest.mark.parametrize(
    ("change", "message", "num_pieces"),
    [
        ({}, {"role": "assistant", "content": "It rains.", "reasoning_content": "Hm, Rome."}, 5),
        (
            {"stream_reasoning": False},
            {"role": "assistant", "content": "It rains.", "reasoning_content": "Hm, Rome."},
            1,
        ),
        ({"separate_reasoning": False}, {"role": "assistant", "content": "<think>Hm, Rome.</think>It rains."}, 0),
    ],
)
def test_how_reasoning_is_shown(change: dict[str, Any], message: dict[str, str], num_pieces: int) -> None:
    client = ScriptedClient(pieces=["<think>", "Hm", ",", " Ro", "m", "e.", "</think>", "It rains."])
    body = {"messages": MESSAGES, **change}
    (choice,) = ask(client, "POST", CHAT, info("none", "qwen3"), json=body).json()["choices"]
    assert choice["message"] == message
    events = ask(client, "POST", CHAT, info("none", "qwen3"), json={**body, "stream": True}).text
    assert events.count("reasoning_content") == num_pieces
    asked = client.asked[0][2]
    assert asked.reasoning == Reasoning("<think>", "</think>", is_separate="separate_reasoning" not in change)


def test_a_thinking_budget_by_every_name() -> None:
    body = {"messages": MESSAGES}
    for name in ("thinking_budget", "max_thinking_tokens", "thinking_token_budget"):
        client = answers("hi")
        assert ask(client, "POST", CHAT, info("none", "qwen3"), json={**body, name: 7}).status_code == 200
        assert client.asked[0][2].reasoning == Reasoning("<think>", "</think>", budget=7)
    for change, what, words in (
        ({"thinking_budget": 7}, info(), "start with --reasoning-parser"),
        ({"thinking_budget": -1}, info("none", "qwen3"), "from 0 on"),
        ({"thinking_budget": 7, "max_thinking_tokens": 8}, info("none", "qwen3"), "differ"),
        ({"thinking_budget": "7"}, info("none", "qwen3"), "int"),
    ):
        reply = ask(FakeClient(), "POST", CHAT, what, json={**body, **change})
        assert reply.status_code == 400 and words in reply.json()["error"]["message"]
        assert reply.json()["error"]["param"] in change
    reply = ask(
        FakeClient(), "POST", "/v1/completions", info("none", "qwen3"), json={"prompt": "a", "thinking_budget": 7}
    )
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "thinking_budget"


@every_format
def test_calls_are_forced_by_a_grammar(name: str) -> None:
    known = call_format(name, "")
    assert known is not None
    tools = [CallableTool(tool["function"]["name"], tool["function"]["parameters"]) for tool in TOOLS]
    named = {"type": "function", "function": {"name": "clock"}}
    for change, grammar in (
        ({"tool_choice": "required"}, known.rules(tools, True)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, known.rules(tools, False)),
        ({"tool_choice": named}, known.rules(tools[1:], False)),
        ({"tool_choice": "auto"}, None),
    ):
        client = answers(ANSWERS[name])
        body = {"messages": MESSAGES, "tools": TOOLS, **change}
        (choice,) = ask(client, "POST", CHAT, info(name), json=body).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert client.asked[0][2].grammar == grammar


def test_a_grammar_of_the_answer_goes_with_calls_that_are_not_forced() -> None:
    client = answers("{}")
    body = {"messages": MESSAGES, "tools": TOOLS, "response_format": {"type": "json_object"}}
    assert ask(client, "POST", CHAT, info("hermes"), json=body).status_code == 200
    assert client.asked[0][2].grammar is not None


TOOL = TOOLS[0]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0]"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools", "tools[0].function"),
    ({"tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools", "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools", "another tool has the name 'weather'"),
    ({"tools": [{**TOOL, "function": {"name": "f", "parameters": "x"}}]}, "tools", "tools[0].function.parameters"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", '"required"'),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "function"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "there are weather, clock",
    ),
    ({"tool_choice": "required"}, "tool_choice", "no tools to choose from"),
    ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "regex", "has to be tool calls"),
    ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "grammar"),
    (
        {
            "tools": [
                {
                    **TOOL,
                    "function": {"name": "f", "description": "a" * 300_000, "parameters": {"title": "b" * 300_000}},
                }
            ],
            "tool_choice": "required",
        },
        "tools",
        "bytes",
    ),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "bool"),
    ({"separate_reasoning": 1}, "separate_reasoning", "bool"),
]


@pytest.mark.parametrize(("change", "field", "words"), REFUSED)
def test_a_bad_request_is_named(change: dict[str, Any], field: str, words: str) -> None:
    reply = ask(FakeClient(), "POST", CHAT, info("hermes"), json={"messages": MESSAGES, **change})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == field and words in error["message"], error


def test_calls_cannot_be_forced_without_a_format() -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    reply = ask(FakeClient(), "POST", CHAT, info(), json=body)
    assert (
        reply.status_code == 400
        and "--tool-call-parser mistral, pythonic, deepseekv3" in reply.json()["error"]["message"]
    )


def test_the_formats_come_from_flags_and_template() -> None:
    facts = msgspec.structs.replace(fake_facts(), frontend=FrontendFacts("a codec", "", "<tool_call> <think></think>"))
    found = server_info(EngineConfig(), fake_settings(), lambda: facts)
    assert found.call_format == call_format("hermes", "") and found.reasoning_format == reasoning_format("qwen3", "")
    named = msgspec.structs.replace(fake_settings().server, tool_call_parser="mistral", reasoning_parser="none")
    found = server_info(EngineConfig(), msgspec.structs.replace(fake_settings(), server=named), lambda: facts)
    assert found.call_format == call_format("mistral", "") and found.reasoning_format is None
