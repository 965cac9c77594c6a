"""Forced tool calls: what the grammars of every format admit, and that its parser reads all of it."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from support.small_tokenizers import EOS, SMOLLM2, smollm2

from overlap_spec.entrypoints.openai.tools import AnswerFormat, AnswerParser
from overlap_spec.entrypoints.parsers import harmony
from overlap_spec.entrypoints.parsers.call_rules import CallableTool
from overlap_spec.entrypoints.parsers.formats import CALL_FORMATS, CallFormat, call_format
from overlap_spec.entrypoints.parsers.gemma4 import QUOTE, gemma4_rules
from overlap_spec.entrypoints.parsers.pieces import ToolNames
from overlap_spec.entrypoints.parsers.sections import DEEPSEEK, KIMI
from overlap_spec.entrypoints.parsers.tagged import VALUE_END, tagged_rules
from overlap_spec.entrypoints.parsers.xml_calls import xml_rules
from overlap_spec.errors import RequestError
from overlap_spec.features.grammar.compiler import GrammarCompiler
from overlap_spec.features.grammar.reasoned import ReasonedMatcher
from overlap_spec.features.grammar.vocabulary import GrammarVocabulary
from overlap_spec.messages import Grammar, GrammarKind, Reasoning, Thinking

VOCAB_SIZE = 49152
WEATHER = CallableTool(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "unit": {"$ref": "#/$defs/unit"},
            "dry": {"type": "boolean"},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {"unit": {"enum": ["C", "F", None]}},
    },
)
CLOCK = CallableTool("clock", {})
CALLS_BEGIN, CALL_BEGIN, SEP, CALL_END, CALLS_END = DEEPSEEK.all
every_format = pytest.mark.parametrize("known", CALL_FORMATS, ids=lambda known: known.name)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(GrammarVocabulary(str(SMOLLM2), VOCAB_SIZE, (EOS,)))


def random_answer(compiler: GrammarCompiler, grammar: Grammar, rng: random.Random, most: int = 400) -> list[int]:
    """Tokens that the grammar allows, drawn at random; it ends as soon as it may."""
    matcher, tokens = compiler.compile(grammar), []
    while len(tokens) < most:
        allowed = [token for token in _allowed(matcher.compute_bitmask())]
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return tokens
        tokens.append(rng.choice([token for token in allowed if token != EOS]))
        assert matcher.consume_token(tokens[-1])
    raise AssertionError(f"no end: {smollm2().decode(tokens, False)[:200]}")


def _allowed(mask: bytes) -> Iterator[int]:
    for index, byte in enumerate(mask):
        if byte:
            yield from (8 * index + bit for bit in range(8) if byte >> bit & 1)


def calls_in(known: CallFormat, text: str) -> list[tuple[str, Any]]:
    """Whole answers are calls, and every call is complete."""
    parser = AnswerParser(
        AnswerFormat(known, ToolNames.of({tool.name: tool.schema for tool in (WEATHER, CLOCK)})), streams=False
    )
    found = parser.push(text).then(parser.end(is_cut=False))
    calls: dict[int, list[str]] = {}
    for piece in found.tool_calls:
        call = calls.setdefault(piece.index, [piece.name, ""])
        call[1] += piece.arguments
    assert found.content == "" and len(calls) == parser.num_calls, text
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(16)
@every_format
def test_all_that_is_allowed_is_read_as_calls(known: CallFormat, compiler: GrammarCompiler) -> None:
    rng = random.Random(known.name)
    named = known.rules([WEATHER], False)
    for _ in range(6):
        text = smollm2().decode(random_answer(compiler, named, rng), False)
        ((name, arguments),) = calls_in(known, text)
        assert name == "weather" and {"city", "unit"} <= arguments.keys() <= {"city", "days", "unit", "dry"}
        assert isinstance(arguments["city"], str) and len(arguments["city"]) <= 12
        assert arguments["unit"] in ("C", "F", None) and arguments.get("days", 0) in range(10)


def fenced(name: str) -> str:
    """A call of DeepSeek-V3, with arguments if it is one of the weather."""
    arguments = "%s" if name == "weather" else "{}"
    return f"{CALL_BEGIN}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"


def plain(name: str, arguments: str) -> str:
    """A call of DeepSeek-V3.1."""
    return f"{CALL_BEGIN}{name}{SEP}{arguments}{CALL_END}"


def numbered(name: str, arguments: str) -> str:
    """A call of Kimi K2."""
    return f"{KIMI.call}functions.{name}{KIMI.separator}{arguments}{KIMI.call_end}"


@every_format
def test_several_tools_and_calls(known: CallFormat, compiler: GrammarCompiler) -> None:
    arguments = {"city": "R\u00f4me", "unit": None}
    text = {
        "hermes": '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        "llama3_json": '{"name": "weather", "parameters": %s}; {"name": "clock", "parameters": {}}',
        "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": %s}, {"name": "clock", "arguments": {}}]',
        "deepseekv3": f"{CALLS_BEGIN}{fenced('weather')}\n{fenced('clock')}{CALLS_END}",
        "deepseekv31": f"{CALLS_BEGIN}{plain('weather', '%s')}{plain('clock', '{}')}{CALLS_END}",
        "kimi_k2": f"{KIMI.begin}{numbered('weather:0', '%s')}{numbered('clock:1', '{}')}{KIMI.end}",
        "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>R\u00f4me</arg_value>\n"
        "<arg_key>unit</arg_key><arg_value>null</arg_value>\n</tool_call>\n<tool_call>clock</tool_call>%.0s",
        "gpt-oss": f"{harmony.CHANNEL}commentary to=functions.weather {harmony.CONSTRAIN}json{harmony.MESSAGE}%s",
        "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nR\u00f4me\n</parameter>\n<parameter=unit>\n"
        "null\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>%.0s",
        "gemma4": '<|tool_call>call:weather{city:<|"|>R\u00f4me<|"|>,unit:null}<tool_call|>'
        "<|tool_call>call:clock{}<tool_call|>%.0s",
        "pythonic": '[weather(city="R\u00f4me", unit=null), clock()]%.0s',
    }[known.name] % json.dumps(arguments, ensure_ascii=False)
    has_one = known.name == "gpt-oss"  # after a call its answers end
    assert calls_in(known, text) == [("weather", arguments), ("clock", {})][: 1 if has_one else 2]
    for many, ends in ((True, True), (False, has_one)):
        matcher = compiler.compile(known.rules([WEATHER, CLOCK], many))
        tokens = smollm2().encode(text, False)
        whole = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert whole == ends


TEXT_SCHEMAS = [  # of a string; text that fits, text that does not
    ({}, ["", "Rome <b> \n</arg", '"x"', "</tool_call>"], []),
    ({"minLength": 2, "maxLength": 4}, ["ab", "a</b"], ["a", "abcde"]),
    ({"enum": ["red", "a+b</x> \n\u00e9"]}, ["red", "a+b</x> \n\u00e9"], ["re", "redder", '"red"']),
    ({"const": "x/y"}, ["x/y"], ["x"]),
    ({"pattern": "^[a-c]+/d$"}, ["ab/d"], ["ab/", "xab/d", "ab/d "]),
    ({"pattern": "b\\/c"}, ["b/c", "ab/c\n"], ["bc"]),
    ({"pattern": "^(a|bc)$", "maxLength": 1}, ["a"], ["bc", "ab"]),
    ({"pattern": "^a|b$"}, ["x"], []),  # left open, like what looks around
    ({"pattern": "^(?!a).*$"}, ["a"], []),
    ({"format": "date"}, ["x"], []),
]


@pytest.mark.parametrize("is_special", [False, True], ids=["spelled", "special"])
@pytest.mark.parametrize(("schema", "fits", "others"), TEXT_SCHEMAS)
def test_text_between_tags(
    schema: dict[str, Any], fits: list[str], others: list[str], is_special: bool, compiler: GrammarCompiler
) -> None:
    """The tag that ends it may be a special token; it ends with the first."""
    tool = CallableTool("f", {"properties": {"k": {"type": "string", **schema}}, "required": ["k"]})
    rules = tagged_rules([tool], False)
    end = "<|im_start|>" if is_special else VALUE_END
    matcher = compiler.compile(replace(rules, markers=(*rules.markers[:-1], end)))
    begin = "<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>"
    cases = {text: text in fits for text in [*fits, *others]} | {f"a{VALUE_END}{VALUE_END}": False}
    for text, is_allowed in cases.items():
        tokens = smollm2().encode(f"{begin}{text}{end}\n</tool_call>", False)
        matcher.reset()
        whole = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert whole == is_allowed, text
        if is_allowed:
            form = AnswerFormat(call_format("glm45", ""), ToolNames.of({"f": tool.schema}))
            found = AnswerParser(form, streams=False).push(f"{begin}{text}{VALUE_END}\n</tool_call>")
            assert json.loads(found.tool_calls[1].arguments) == {"k": text}


@pytest.mark.parametrize(("schema", "fits", "others"), TEXT_SCHEMAS)
def test_text_of_elements(
    schema: dict[str, Any], fits: list[str], others: list[str], compiler: GrammarCompiler
) -> None:
    """It ends with the first closing tag, and a line feed before that is not of it."""
    tool = CallableTool("f", {"properties": {"k": {"type": "string", **schema}}, "required": ["k"]})
    matcher = compiler.compile(xml_rules([tool], False))
    begin, end = "<tool_call>\n<function=f>\n<parameter=k>\n", "\n</parameter>\n</function>\n</tool_call>"
    cases = {text: text in fits for text in [*fits, *others]} | {"a</parameter>b": False, "a\n</parameter>\n": False}
    for text, is_allowed in cases.items():
        tokens = smollm2().encode(f"{begin}{text}{end}", False)
        matcher.reset()
        whole = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert whole == is_allowed, text
        if is_allowed:
            form = AnswerFormat(call_format("qwen3_coder", ""), ToolNames.of({"f": tool.schema}))
            found = AnswerParser(form, streams=False).push(f"{begin}{text}{end}")
            assert json.loads(found.tool_calls[1].arguments) == {"k": text}


NESTED: dict[str, Any] = {
    "properties": {
        "tree": {"$ref": "#/$defs/tree"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
        "kind": {"enum": ["a b", 2, None, [1, {"x": "y"}]]},
        "size": {"anyOf": [{"type": "integer", "minimum": 0}, {"const": "big"}]},
        "more": {},
    },
    "required": ["tags", "extra"],
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/tree"}, "label": {"type": ["string", "null"]}},
            "required": ["label"],
        }
    },
}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{tags:["a"],extra:1}', True),
        ('{tree:{label:"x"},tags:["a","b"],extra:{}}', True),
        ('{tree:{left:{left:{label:null},label:""},label:null},tags:["ab"],extra:[{},"x",{a:null}]}', True),
        ('{tags:["a"],kind:"a b",size:0,more:"t",extra:true}', True),
        ('{tags:["a"],kind:[1,{x:"y"}],size:"big",more:{k:[-1.5]},extra:""}', True),
        ("{}", False),
        ('{tags:["a"]}', False),
        ("{tags:[],extra:1}", False),
        ('{tags:["a","b","c"],extra:1}', False),
        ('{tags:["abcd"],extra:1}', False),
        ('{extra:1,tags:["a"]}', False),
        ('{tree:{},tags:["a"],extra:1}', False),
        ('{tags:["a"],kind:"a",extra:1}', False),
        ('{tags:["a"],size:-1,extra:1}', False),
        ('{tags:["a"],extra:word}', False),
        ('{tags:["a"],extra:1,}', False),
    ],
)
def test_values_of_gemma(text: str, fits: bool, compiler: GrammarCompiler) -> None:
    """Objects in objects, references to themselves, lists, choices, what is open. Strings are written as JSON here."""
    tool = CallableTool("f", NESTED)
    matcher = compiler.compile(gemma4_rules([tool], False))
    answer = f"<|tool_call>call:f{text}<tool_call|>".replace('"', QUOTE)
    tokens = smollm2().encode(answer, False)
    assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == fits
    if fits:
        found = AnswerParser(AnswerFormat(call_format("gemma4", ""), ToolNames.of({"f": NESTED})), False).push(answer)
        want = re.sub(r"(?<=[{,])(\w+):(?=[^ ])", r'"\1":', text)
        assert json.loads(found.tool_calls[1].arguments) == json.loads(want)


@pytest.mark.parametrize(("schema", "fits", "others"), TEXT_SCHEMAS)
@pytest.mark.parametrize("is_special", [False, True], ids=["spelled", "special"])
def test_text_of_gemma(
    schema: dict[str, Any], fits: list[str], others: list[str], is_special: bool, compiler: GrammarCompiler
) -> None:
    """The token that ends it may be special; it ends with the first."""
    tool = CallableTool("f", {"properties": {"k": {"type": "string", **schema}}, "required": ["k"]})
    rules, quote = gemma4_rules([tool], False), "<|im_start|>" if is_special else QUOTE
    matcher = compiler.compile(replace(rules, markers=(*rules.markers[:-1], quote)))
    for text, is_allowed in ({text: text in fits for text in [*fits, *others]} | {f"a{QUOTE}": False}).items():
        tokens = smollm2().encode(f"<|tool_call>call:f{{k:{quote}{text}{quote}}}<tool_call|>", False)
        matcher.reset()
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == is_allowed, text


def test_what_calls_of_gemma_cannot_follow_is_refused() -> None:
    for name in ("a:b", "a b", "{", '"', "", "x" * 300):
        with pytest.raises(RequestError, match="no argument of its calls can have the name"):
            gemma4_rules([CallableTool("f", {"properties": {name: {}}})], False)
    for schema, key in (
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"allOf": [{}]}, "allOf"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "string", "format": "date"}, "format"),
    ):
        for is_strict in (False, True):
            tools = [CallableTool("f", {"properties": {"k": schema}}, is_strict)]
            if is_strict:
                with pytest.raises(RequestError, match=f"cannot be made to follow {key}"):
                    gemma4_rules(tools, False)
            else:
                assert "k:" in gemma4_rules(tools, False).text


@pytest.mark.parametrize("name", ["a>b", "a\nb", "<", "", "x" * 300])
def test_an_argument_that_no_element_can_name_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="no argument of its calls can have the name"):
        xml_rules([CallableTool("f", {"properties": {name: {}}})], False)


def test_text_that_a_strict_tool_cannot_have_is_refused() -> None:
    for schema, key in (({"format": "date"}, "format"), ({"pattern": "(?=a)"}, "pattern")):
        tool = CallableTool("f", {"properties": {"k": {"type": "string", **schema}}}, is_strict=True)
        with pytest.raises(RequestError, match=f"tool f: text in its calls cannot be made to follow {key}"):
            tagged_rules([tool], False)


def test_arguments_between_tags_come_in_order_and_required_ones_always(compiler: GrammarCompiler) -> None:
    schema = {"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["b", "c"]}
    matcher = compiler.compile(tagged_rules([CallableTool("f", schema)], False))
    for names, fits in (("abc", True), ("bc", True), ("ab", False), ("bac", False), ("", False)):
        pairs = "".join(f"<arg_key>{name}</arg_key><arg_value>1</arg_value>" for name in names)
        tokens = smollm2().encode(f"<tool_call>f{pairs}</tool_call>", False)
        matcher.reset()
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == fits, names


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("<|im_start|>a<repo_name>hm<|endoftext|><|im_start|>b<|im_start|>c<repo_name>yes", True),
        ("<|im_start|>c<repo_name>yes", True),
        ("<|im_start|>a<repo_name>hm<|endoftext|><|im_start|>b<|im_start|>c<repo_name>no", False),
        ("<|im_start|>a<repo_name>hm<|endoftext|><|im_start|>c<repo_name>yes", None),
        ("<|im_start|>a<repo_name>hm<|endoftext|>yes", False),
        ("<|im_start|>c<|im_start|>yes", False),
        ("yes", False),
    ],
)
def test_what_a_model_writes_between_reasoning_and_answer(
    compiler: GrammarCompiler, text: str, fits: bool | None, budget: int | None
) -> None:
    """Markers are special tokens and text in turn. With a budget the answer's rules do not know of the reasoning."""
    marks = "<|im_start|>a<repo_name>", "<|endoftext|>"
    reasoning = Reasoning(*marks, bridge="<|im_start|>b", header="<|im_start|>c<repo_name>")
    thinking = None
    if budget is not None:
        opening, closing = (tuple(smollm2().encode(mark, False)) for mark in marks)
        thinking = Thinking(budget, False, opening, closing)
    matcher: Any = compiler.compile(Grammar(GrammarKind.REGEX, "yes", (), reasoning, False, thinking))
    if thinking is not None:
        matcher = ReasonedMatcher(matcher, thinking, (EOS,), VOCAB_SIZE)
    tokens = smollm2().encode(text, False)
    want = budget is not None if fits is None else fits
    assert (matcher.try_consume_tokens(tokens) == len(tokens)) == want


def test_a_marker_that_is_a_special_token(compiler: GrammarCompiler) -> None:
    rules = Grammar(GrammarKind.LARK, 'start: marker_0 "a" marker_1', ("<|im_start|>", "</end>"))
    matcher = compiler.compile(rules)
    tokens = smollm2().encode("<|im_start|>a</end>", False)
    assert tokens[0] == 1 and matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("markers", [("<think>", "</think>"), ("<|im_start|>", "<|endoftext|>")])
@pytest.mark.parametrize(
    ("is_reasoning", "is_implicit", "text", "fits"),
    [
        (False, False, "{1}hm </x{2}\n\nyes", True),
        (False, False, "yes", True),
        (False, False, "hm{2}yes", False),
        (False, True, "hm{2}yes", True),
        (True, False, "hm{2} yes", True),
        (True, False, "hm{2} no", False),
        (True, False, "yes", False),
    ],
)
def test_a_grammar_of_what_follows_the_reasoning(
    compiler: GrammarCompiler, markers: tuple[str, str], is_reasoning: bool, is_implicit: bool, text: str, fits: bool
) -> None:
    reasoning = Reasoning(*markers, is_implicit)
    text = text.replace("{1}", markers[0]).replace("{2}", markers[1])
    for kind, rules in (
        (GrammarKind.REGEX, "yes"),
        (GrammarKind.CHOICE, '["yes"]'),
        (GrammarKind.LARK, 'start: "yes"'),
    ):
        matcher = compiler.compile(Grammar(kind, rules, (), reasoning, is_reasoning))
        tokens = smollm2().encode(text, False)
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == fits, kind
