"""The parsers of calls and reasoning: every format, however its text is cut; what is broken; what is cut off."""

import json
import random
import time
from typing import Any

import pytest
from support.call_texts import (
    BROKEN,
    CALL_BEGIN,
    CALL_HEAD,
    CALLS_BEGIN,
    GOOD,
    KIMI_BEGIN,
    KIMI_CALL,
    KIMI_END,
    ROME,
    SCHEMAS,
    SEP,
    Calls,
    bare,
    numbered,
    tagged,
)
from support.scripted_answers import cut

from overlap_spec.config import EngineConfig
from overlap_spec.config.fields import config_fields
from overlap_spec.entrypoints.openai.tools import AnswerFormat, AnswerParser
from overlap_spec.entrypoints.parsers.formats import CALL_FORMATS, REASONING_FORMATS, call_format, reasoning_format
from overlap_spec.entrypoints.parsers.harmony import CHANNEL, MESSAGE, START
from overlap_spec.entrypoints.parsers.json_call import JsonObject, Status
from overlap_spec.entrypoints.parsers.pieces import ToolNames
from overlap_spec.entrypoints.parsers.pythonic import MOST_CODE
from overlap_spec.entrypoints.parsers.sections import BAR


def read(
    form: AnswerFormat, pieces: list[str], streams: bool = True, is_cut: bool = False
) -> tuple[str, str, Calls, int]:
    """Reasoning, content, calls, and how many of them are complete."""
    parser = AnswerParser(form, streams)
    content, reasoning = "", ""
    calls: dict[int, tuple[str, str]] = {}
    for found in [*(parser.push(piece) for piece in pieces), parser.end(is_cut)]:
        content += found.content
        reasoning += found.reasoning
        for piece in found.tool_calls:
            assert (piece.index in calls) != bool(piece.name and piece.id), "the name comes first, and once"
            name, arguments = calls.get(piece.index, (piece.name, ""))
            calls[piece.index] = name, arguments + piece.arguments
    assert list(calls) == list(range(len(calls)))
    return reasoning, content, list(calls.values()), parser.num_calls


def form_of(name: str, most_calls: int | None = None) -> AnswerFormat:
    return AnswerFormat(call_format(name, ""), ToolNames.of(SCHEMAS), most_calls)


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOOD)
def test_calls_and_content_whatever_the_cuts(name: str, text: str, content: str | None, calls: Calls) -> None:
    rng = random.Random(text)
    want = ("", text if content is None else content, calls, len(calls))
    for pieces in ([text], list(text), *(cut(text, rng) for _ in range(5))):
        assert read(form_of(name), pieces) == want
        assert read(form_of(name), pieces, streams=False) == want


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    rng = random.Random(text)
    for pieces in ([text], *(cut(text, rng) for _ in range(5))):
        assert read(form_of(name), pieces, streams=False) == ("", text, [], 0)
        _, content, _, complete = read(form_of(name), pieces)
        assert (content, complete) == (text, 0)


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(26)
@pytest.mark.parametrize(("name", "text", "content", "calls"), GOOD)
def test_an_answer_cut_anywhere_has_no_call_that_is_not_complete(
    name: str, text: str, content: str, calls: Calls
) -> None:
    for end in range(len(text)):
        whole = read(form_of(name), [text[:end]], streams=False, is_cut=True)
        assert whole == read(form_of(name), list(text[:end]), is_cut=True)
        _, _, found, complete = whole
        assert [json.loads(arguments) for _, arguments in found[:complete]] == [
            json.loads(arguments) for _, arguments in calls[:complete]
        ]
        assert all(calls[index][1].startswith(found[index][1]) for index in range(complete, len(found)))


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("seed", range(40))
def test_texts_of_markers_and_fragments_lose_nothing(seed: int) -> None:
    """Any text, however odd: the cuts change nothing, and what is no call is content."""
    rng = random.Random(seed)
    parts = [
        *(part for known in CALL_FORMATS for part in known.markers),
        "weather",
        "clock",
        '{"name": "',
        '"}',
        "(a=1)",
    ]
    parts += [
        '"arguments": ',
        "{}",
        "}",
        "[",
        "]",
        " ",
        "\n",
        "é",
        ",",
        ";",
        ROME,
        "<",
        "<tool",
        f'{{"name": "f", "arguments": {ROME}}}',
    ]
    text = "".join(rng.choices(parts, k=30))
    for known in CALL_FORMATS:
        form = form_of(known.name)
        want = read(form, [text])
        whole = read(form, [text], streams=False)
        assert read(form, cut(text, rng)) == want and read(form, cut(text, rng), streams=False) == whole
        assert whole[1] == want[1] and whole[3] == want[3] == len(whole[2])
        for _, arguments in whole[2]:
            assert isinstance(json.loads(arguments), dict)
        if not whole[2] and known.name != "pythonic":
            shown = text
            for marker in known.markers if known.name not in ("hermes", "glm45", "qwen3_coder") else ():
                shown = shown.replace(marker, "")
            kept = whole[1]
            for marker in known.markers if known.name not in ("hermes", "glm45", "qwen3_coder") else ():
                kept = kept.replace(marker, "")
            assert kept == shown


def test_calls_have_the_numbers_that_the_model_gives_them_but_none_twice() -> None:
    names = ["functions.f:3", "functions.g:3", "functions.f:3", "f:0", "functions.f:4"]
    text = KIMI_BEGIN + "".join(numbered(name, "{}") for name in names) + KIMI_END
    parser = AnswerParser(form_of("kimi_k2"), streams=True)
    found = parser.push(text).then(parser.end(is_cut=False))
    ids = [piece.id for piece in found.tool_calls if piece.name]
    assert ids == ["functions.f:3", "functions.g:3", "functions.f:4", "functions.f:0", "functions.f:5"]


def test_what_comes_before_arguments_is_held_back_for_a_while() -> None:
    for name, marker in (("deepseekv3", CALL_BEGIN), ("kimi_k2", KIMI_CALL)):
        parser = AnswerParser(form_of(name), streams=True)
        assert parser.push(marker + "x" * 200).content == ""
        assert parser.push("y" * 100).content == marker + "x" * 200 + "y" * 100
    parser = AnswerParser(form_of("qwen3_coder"), streams=True)
    assert parser.push(f"<function=f><parameter={'x' * 256}").content == ""
    assert parser.push("x").content == f"<function=f><parameter={'x' * 257}"


def test_at_most_one_call() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    assert read(form_of("hermes", most_calls=1), list(text))[2] == [("f", "{}")]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nwhy\n\nso\n</think>\n\nbecause\n", "why\n\nso", "because\n"),
        ("\n<think></think>\n\nhi", "", "hi"),
        ("hi <think>x</think>", "", "hi <think>x</think>"),
        ("<think>it never ends </thin", "it never ends </thin", ""),
        ("<thi", "", "<thi"),
        ("  hi", "", "  hi"),
    ],
)
def test_reasoning_whatever_the_cuts(text: str, reasoning: str, content: str) -> None:
    rng = random.Random(text)
    for streams in (True, False):
        form = AnswerFormat(reasoning=reasoning_format("qwen3", ""), streams_reasoning=streams)
        for pieces in ([text], list(text), *(cut(text, rng) for _ in range(20))):
            assert read(form, pieces) == (reasoning, content, [], 0)


def test_reasoning_without_its_opening_marker() -> None:
    implicit = AnswerFormat(reasoning=reasoning_format("deepseek_r1", ""))
    assert read(implicit, ["so </th", "ink>\nyes"]) == ("so", "yes", [], 0)
    assert read(implicit, ["<think></think>yes"]) == ("", "yes", [], 0)


def test_reasoning_comes_at_once_if_it_is_not_to_be_streamed() -> None:
    parser = AnswerParser(AnswerFormat(reasoning=reasoning_format("qwen3", ""), streams_reasoning=False), True)
    assert [parser.push(piece).reasoning for piece in ("<think>a", " b", " c</think>", "d")] == ["", "", "a b c", ""]


def test_calls_inside_reasoning_are_none() -> None:
    form = AnswerFormat(call_format("hermes", ""), ToolNames(), None, reasoning_format("qwen3", ""))
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert read(form, list(f"<think>{call}</think>{call}")) == (call, "", [("f", "{}")], 1)


def test_calls_of_kimi_end_its_reasoning() -> None:
    form = AnswerFormat(call_format("kimi_k2", ""), ToolNames(), None, reasoning_format("kimi_k2", ""))
    section = KIMI_BEGIN + numbered("functions.f:0", ROME) + KIMI_END
    for text in (f"<think> hm {section}", f"<think>hm</think>{section}"):
        for pieces in ([text], list(text)):
            assert read(form, pieces) == ("hm", "", [("f", ROME)], 1)
            assert read(AnswerFormat(reasoning=form.reasoning), pieces) == ("hm", section, [], 0)


def test_calls_of_glm_end_its_reasoning() -> None:
    form = AnswerFormat(call_format("glm45", ""), ToolNames(), None, reasoning_format("glm45", ""))
    call = tagged("f", {"a": "1"})
    for text in (f"<think> hm {call}", f"<think>hm</think>\n{call}"):
        for pieces in ([text], list(text)):
            assert read(form, pieces) == ("hm", "", [("f", '{"a": 1}')], 1)


def test_calls_of_gemma_end_its_reasoning() -> None:
    form = AnswerFormat(call_format("gemma4", ""), ToolNames(), None, reasoning_format("gemma4", ""))
    call, thought = bare("f", '{a:"x"}'), "<|channel>thought\nhm"
    for text in (f"{thought} {call}", f"{thought}\n<channel|>{call}", f"\n{thought}<channel|>\n{call}"):
        for pieces in ([text], list(text)):
            assert read(form, pieces) == ("hm", "", [("f", '{"a": "x"}')], 1)
            assert read(AnswerFormat(reasoning=form.reasoning), pieces) == ("hm", call, [], 0)
    assert form.reasoning is not None and form.reasoning.markers == ("<|channel>", "<channel|>")


@pytest.mark.parametrize(
    ("schema", "is_string"),
    [
        ({"type": "string"}, True),
        ({"type": ["string", "null"]}, False),
        ({"enum": ["a", "b"]}, True),
        ({"enum": ["a", 1]}, False),
        ({"enum": []}, False),
        ({"const": "a"}, True),
        ({"const": 1, "type": "string"}, False),
        ({"oneOf": [{"type": "string"}, {"const": "a"}]}, True),
        ({"anyOf": [{"type": "string"}, {}]}, False),
        ({"allOf": [{}, {"type": "string"}]}, True),
        ({"$ref": "#/$defs/a~1b"}, True),
        ({"$ref": "#/$defs/loop"}, False),
        ({"$ref": "#/nowhere/else"}, False),
        ({}, False),
        (True, False),
        ({"allOf": "x", "anyOf": []}, False),
    ],
)
def test_which_arguments_of_glm_are_text(schema: Any, is_string: bool) -> None:
    root = {"$defs": {"a/b": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}, "properties": {"k": schema}}
    form = AnswerFormat(call_format("glm45", ""), ToolNames.of({"f": root}))
    expected = '{"k": "5"}' if is_string else '{"k": 5}'
    assert read(form, [tagged("f", {"k": "5"})])[2] == [("f", expected)]


def test_text_of_qwen_is_given_out_while_it_grows() -> None:
    """Up to a line feed, which may be the last."""
    parser = AnswerParser(form_of("qwen3_coder"), streams=True)
    pieces = ("<function=weather><parameter=city>", "\nR", "o\n", "\nm\n</param", "eter>")
    calls = [call for piece in pieces for call in parser.push(piece).tool_calls]
    assert [call.arguments for call in calls if call.arguments] == ['{"city": "', "R", "o", "\\n\\nm", '"']


def test_text_of_glm_is_given_out_while_it_grows() -> None:
    parser = AnswerParser(form_of("glm45"), streams=True)
    pieces = ("<tool_call>weather\n<arg_key>city</arg_key>", "<arg_value>R", "o", "m</arg")
    calls = [call for piece in pieces for call in parser.push(piece).tool_calls]
    assert [call.arguments for call in calls if call.arguments] == ['{"city": "R', "o", "m"]


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("seed", range(20))
def test_the_checker_of_json_agrees_with_the_library(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        text = json.dumps({"k": _value(rng, 3), "l": _value(rng, 2)}, indent=rng.choice((None, 1)))
        if rng.random() < 0.6:
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice('{}[]",:e-+.0 tx\\\n') + text[at + rng.randrange(2) :]
        assert _is_object(text) == _loads(text), text


def _value(rng: random.Random, depth: int) -> object:
    kind = rng.randrange(7 if depth else 5)
    if kind >= 5:
        items = [_value(rng, depth - 1) for _ in range(rng.randrange(3))]
        return items if kind == 5 else {f"k{index}\n": item for index, item in enumerate(items)}
    return (None, True, rng.randrange(-99, 99), rng.random() * 1e-9, 'a"\\\u00e9\ud83d')[kind]


def _is_object(text: str) -> bool:
    checker, status = JsonObject(), Status.OPEN
    for char in text:
        if status is not Status.OPEN:
            return False
        status = checker.push(char)
    return status is Status.DONE


def _loads(text: str) -> bool:
    try:
        pairs = json.loads(text, object_pairs_hook=lambda pairs: pairs, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return text[0] == "{" and len({key for key, _ in pairs}) == len(pairs)


TEMPLATES = [
    ("<tool_call> <arg_key> <arg_value>", "glm45", None),
    ("<think></think> <tool_call> <arg_key> <arg_value>", "glm45", "glm45"),
    ("{{ '<tool_call>' }}", "hermes", None),
    ("<tool_call> <think> </think>", "hermes", "qwen3"),
    ("<tool_call><function=f>", None, None),
    ("<tool_call><function=f><parameter=a>", "qwen3_coder", None),
    ("<think> </think> <tool_call>\n<function=f>\n<parameter=a>", "qwen3_coder", "qwen3"),
    ("<|tool_call>call: <tool_call|> <|channel>thought <channel|>", "gemma4", "gemma4"),
    ("<|turn>model <|tool_call>call:", "gemma4", None),
    ("{{ '[TOOL_CALLS] ' }}", "mistral", None),
    ('<|start_header_id|> {"name": f, "parameters": d}', "llama3_json", None),
    ("<|python_tag|>", "llama3_json", None),
    ('<|python_start|> <|start_header_id|> "parameters"', "pythonic", None),
    (f"<{BAR}Assistant{BAR}> </think>", None, "deepseek-r1"),
    (f"<{BAR}Assistant{BAR}> </think> {CALL_BEGIN}' + type + '{SEP}' + '```json", "deepseekv3", "deepseek-r1"),
    (f"if thinking <{BAR}Assistant{BAR}> </think> {CALL_BEGIN}' + name", "deepseekv31", "deepseek-v3"),
    (f"{KIMI_BEGIN} {KIMI_CALL}", "kimi_k2", None),
    (f"{START}assistant{CHANNEL}final{MESSAGE}", "gpt-oss", "gpt-oss"),
    (f"<think></think> {KIMI_BEGIN} {KIMI_CALL}", "kimi_k2", "kimi_k2"),
    ("{{ messages }}", None, None),
]


@pytest.mark.parametrize(("template", "calls", "reasoning"), TEMPLATES)
def test_formats_by_template(template: str, calls: str | None, reasoning: str | None) -> None:
    found, thought = call_format("auto", template), reasoning_format("auto", template)
    assert (found and found.name, thought and thought.name) == (calls, reasoning)
    assert call_format("none", template) is None and reasoning_format("none", template) is None


@pytest.mark.parametrize(
    ("name", "calls", "reasoning"),
    [("mimo", "qwen3_coder", "qwen3"), ("step3p5", "qwen3_coder", "deepseek-r1"), ("glm", "glm45", None)],
)
def test_names_of_families_that_write_as_others(name: str, calls: str, reasoning: str | None) -> None:
    """As SGLang maps them to its detectors."""
    found, thought = call_format(name, ""), reasoning_format(name, "")
    assert (found and found.name, thought and thought.name) == (calls, reasoning)


@pytest.mark.parametrize(
    ("flag", "formats"), [("tool_call_parser", CALL_FORMATS), ("reasoning_parser", REASONING_FORMATS)]
)
def test_the_flags_know_every_format(flag: str, formats: tuple) -> None:
    (field,) = (field for field in config_fields() if field.name == flag)
    assert set(field.choices) == {"auto", "none", *(name for each in formats for name in (each.name, *each.aliases))}
    assert getattr(EngineConfig(), flag) == "auto"


LONG = 20_000
TOOLS = ToolNames((*("weather", "clock"), *(f"weather_{number}" for number in range(1000))))


@pytest.mark.full_but_every(5)
@pytest.mark.slow_but_every(18)
@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * LONG),
        ("hermes", '<tool_call>{"name": "' + "x" * LONG + '", "arguments": {"a": "' + "x" * LONG),
        ("hermes", "<tool_call>" + " " * LONG),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}' + " " * LONG),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [' + "1" * 999 + ("," + "1" * 999) * (LONG // 1000)),
        ("hermes", "<tool_call" * (LONG // 10)),
        ("llama3_json", " " * LONG + "x"),
        ("llama3_json", '{"name": "f", "parameters": {}}' * (LONG // 31)),
        ("deepseekv3", CALLS_BEGIN + " " * LONG),
        ("deepseekv3", (CALLS_BEGIN + CALL_BEGIN) * (LONG // 30)),
        ("deepseekv3", (CALL_BEGIN + "{") * (LONG // 16)),
        ("deepseekv3", CALL_BEGIN + "function" + SEP + " " * LONG),
        ("deepseekv3", f"{CALL_BEGIN}f{SEP}{{}}" * (LONG // 25)),
        ("deepseekv31", f"{CALL_BEGIN}f{SEP}{{}}" + "``" * (LONG // 2)),
        ("kimi_k2", numbered("functions.f:0", "{}") * (LONG // 80)),
        ("kimi_k2", KIMI_CALL + "f:" * LONG),
        ("qwen3_coder", "<tool_call>" * (LONG // 11)),
        ("qwen3_coder", "<function=" * (LONG // 10)),
        ("qwen3_coder", "<function=f>" + " " * LONG),
        ("qwen3_coder", "<function=f><parameter=" + "x" * LONG),
        ("qwen3_coder", "<function=weather><parameter=city>" + "</paramete" * (LONG // 10)),
        ("qwen3_coder", "<function=weather><parameter=city>" + "\n" * LONG),
        ("qwen3_coder", '<function=f><parameter=a>["' + "</parameter>" * (LONG // 12)),
        ("qwen3_coder", "<function=f>" + "".join(f"<parameter={n}>1</parameter>" for n in range(LONG // 28))),
        ("gemma4", "<|tool_call>call:f{" + " " * LONG),
        ("gemma4", "<|tool_call>call:f{a:" + "x" * LONG),
        ("gemma4", '<|tool_call>call:f{a:<|"|>' + '<|"|' * (LONG // 4)),
        ("gemma4", "<|tool_call>call:f{a:" + "[" * LONG),
        ("gemma4", "<|tool_call>call:f{a:[" + "1," * (LONG // 2)),
        ("gpt-oss", CHANNEL * (LONG // 11)),
        ("gpt-oss", (CALL_HEAD + "{}") * (LONG // 60)),
        ("gpt-oss", CALL_HEAD + " " * LONG),
        ("gpt-oss", START + "to=" * (LONG // 3)),
        ("mistral", "[TOOL_CALLS]" + " " * LONG),
        ("mistral", "[TOOL_CALLS][" + " " * LONG),
        ("mistral", "[TOOL_CALLS][ x" * (LONG // 15)),
        ("glm45", "<tool_call>" + " " * LONG),
        ("glm45", "<tool_call>f" + " " * LONG),
        ("glm45", "<tool_call>f<arg_key>" + "x" * LONG),
        ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>" + "</arg_valu" * (LONG // 10)),
        ("glm45", '<tool_call>f<arg_key>a</arg_key><arg_value>["' + "</arg_value>" * (LONG // 12)),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>" + "[" * LONG + "</arg_value></tool_call>"),
        (
            "glm45",
            "<tool_call>f" + "".join(f"<arg_key>{i}</arg_key><arg_value>1</arg_value>" for i in range(LONG // 40)),
        ),
        ("glm45", "<tool_call>f<" * (LONG // 13)),
        ("pythonic", "[weather_" * (LONG // 9)),
        ("pythonic", "[" + " " * LONG),
        ("pythonic", "[weather(a=[" + "[]," * (LONG // 2) + "])]"),
        ("pythonic", "[weather(a=[" + "[]," * (MOST_CODE // 3 - 10) + "])" + ",weather(a=1)" * (LONG // 20)),
        ("pythonic", "[weather(a=f'" + "{1}" * LONG + "')]"),
        ("pythonic", "[weather(a='" + "x" * LONG + "')]"),
    ],
)
def test_an_answer_is_read_in_time_that_is_linear_in_it(name: str, text: str) -> None:
    parser, longest, began = (
        AnswerParser(AnswerFormat(call_format(name, ""), TOOLS), streams=True),
        0.0,
        time.thread_time(),
    )
    for char in text:
        start = time.thread_time()
        parser.push(char)
        longest = max(longest, time.thread_time() - start)
    parser.end(is_cut=True)
    assert time.thread_time() - began < 1.5  # measured 0.25 s at most, and 2.5 s or more where it was quadratic
    assert longest < 0.5  # measured 15 ms


def test_reasoning_is_read_in_linear_time() -> None:
    form = AnswerFormat(None, ToolNames(), None, reasoning_format("qwen3", ""))
    for text in (
        " " * LONG,
        "<think>" + " " * LONG,
        "<think>" + "</thin" * (LONG // 6),
        "<think>a</think>" + "\n" * LONG,
    ):
        parser, began = AnswerParser(form, streams=True), time.thread_time()
        for char in text:
            parser.push(char)
        parser.end(is_cut=True)
        assert time.thread_time() - began < 1.5


def test_calls_that_are_long_to_parse_are_content_and_others_are_calls() -> None:
    numbers = ", ".join(["1"] * 1000)
    for arguments, is_call in [
        (f"a=[{numbers}]", True),
        (f"a=[{numbers * 10}]", False),
        (f"a='{'x' * 100_000}'", True),
        ("a=f'{1}'", False),
        ("a=Rf'{1}'", False),
        ("a=r'x', shift='x', f='y', rtf='z'", True),
    ]:
        _, content, calls, _ = read(form_of("pythonic"), [f"[clock({arguments})]"], streams=False)
        assert (not calls, bool(content)) == (not is_call, not is_call), arguments[:20]
