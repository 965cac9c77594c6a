"""Grammars of every kind compile; a bad one is refused with the library's reason, in bounded time and space."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.small_tokenizers import SMOLLM2, byte_fallback_tokenizer
from support.tiny.tokenizer import write_tokenizer

from overlap_spec.errors import RequestError
from overlap_spec.grammar import GrammarCompiler, GrammarVocabulary, compiler
from overlap_spec.messages import Grammar, GrammarKind

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def tag(begin: str = "<f=a>", triggers: tuple[str, ...] = ("<f=",), schema: Any = OBJECT) -> str:
    structure = {"begin": begin, "schema": schema, "end": "</f>"}
    return json.dumps({"structures": [structure], "triggers": triggers})


GOOD = [  # a grammar and a text that satisfies it
    (GrammarKind.JSON_SCHEMA, json.dumps(OBJECT), '{"a": 5}'),
    (GrammarKind.JSON_SCHEMA, "{}", '[1, "x", null]'),
    (GrammarKind.JSON_SCHEMA, json.dumps({"x-guidance": {"whitespace_flexible": False}, **OBJECT}), '{"a":5}'),
    (GrammarKind.REGEX, "[0-9]{3}-x+", "123-xx"),
    (GrammarKind.EBNF, 'root ::= "a" | "b" root', "bba"),
    (GrammarKind.LARK, 'start: "x" /[0-9]+/', "x17"),
    (GrammarKind.CHOICE, json.dumps(["yes", "né 😀"]), "né 😀"),
    (GrammarKind.STRUCTURAL_TAG, tag(), 'well <f=a>{"a": 1}</f> done'),
    (GrammarKind.STRUCTURAL_TAG, tag("<|im_start|>x", ("<|im_start|>",)), "no call"),
]
BAD = [  # a grammar and a part of the message
    (GrammarKind.JSON_SCHEMA, '{"type": "objekt"}', "objekt"),
    (GrammarKind.JSON_SCHEMA, "{", "EOF"),
    (GrammarKind.JSON_SCHEMA, "[1]", "object"),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "no text satisfies it"),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "http://a/b"}', "http"),
    (GrammarKind.JSON_SCHEMA, '{"not": {}}', "not"),
    (GrammarKind.JSON_SCHEMA, "false", "object"),
    (GrammarKind.JSON_SCHEMA, '{"type":"array","items":' * 500 + "{}" + "}" * 500, "recursion"),
    (GrammarKind.REGEX, "(a", "unclosed group"),
    (GrammarKind.REGEX, "(?=a)b", "look-around"),
    (GrammarKind.REGEX, "(" * 5000 + ")" * 5000, "regex"),
    (GrammarKind.EBNF, "root := x", "::="),
    (GrammarKind.EBNF, "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "ebnf"),
    (GrammarKind.LARK, "start: b", "unknown name"),
    (GrammarKind.LARK, "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
    (GrammarKind.CHOICE, "[]", "at least one"),
    (GrammarKind.CHOICE, "[1]", "str"),
    (GrammarKind.STRUCTURAL_TAG, tag(triggers=()), "triggers"),
    (GrammarKind.STRUCTURAL_TAG, tag(schema={"type": "objekt"}), "objekt"),
    (GrammarKind.STRUCTURAL_TAG, '{"structures": [], "triggers": []}', "at least one"),
    (GrammarKind.STRUCTURAL_TAG, "{}", "structures"),
]
BOMBS = [
    (GrammarKind.REGEX, "((a{1,1000}){1,1000}){1,1000}"),
    (GrammarKind.REGEX, "(.*a.{200}){50}"),
    (GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "minItems": 10**5, "items": {"type": "integer"}})),
    (GrammarKind.JSON_SCHEMA, json.dumps({"enum": [str(i) * 9 for i in range(9000)]})),
    (GrammarKind.JSON_SCHEMA, json.dumps({"properties": {f"k{i}": {"pattern": f"^x{{{i}}}.*y$"} for i in range(999)}})),
    (GrammarKind.LARK, 'start: start start | "a"'),
]


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(GrammarVocabulary(str(SMOLLM2), 49152, (2,)))


@pytest.mark.parametrize(("kind", "text", "output"), GOOD)
def test_a_grammar_takes_its_texts(grammars: GrammarCompiler, kind: GrammarKind, text: str, output: str) -> None:
    matcher = grammars.compile(Grammar(kind, text))
    tokens = grammars.vocabulary.tokenizer().tokenize_str(output)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()


@pytest.mark.parametrize(("kind", "text", "reason"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_one_is_refused_with_the_reason(
    grammars: GrammarCompiler, kind: GrammarKind, text: str, reason: str
) -> None:
    with pytest.raises(RequestError, match="^grammar: not a valid ") as refused:
        grammars.compile(Grammar(kind, text))
    assert reason in str(refused.value) and len(str(refused.value)) < 700
    assert refused.value.field == "grammar"


@pytest.mark.parametrize(("kind", "text"), BOMBS, ids=lambda value: str(value)[:40])
def test_what_is_huge_or_explodes_is_bounded(grammars: GrammarCompiler, kind: GrammarKind, text: str) -> None:
    begun = time.monotonic()
    try:
        matcher = grammars.compile(Grammar(kind, text))
        matcher.compute_bitmask()
    except RequestError:
        pass
    assert time.monotonic() - begun < compiler.MAX_COMPILE_S


def test_matchers_are_independent_and_the_oldest_is_forgotten(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_COMPILED", 2)
    few = GrammarCompiler(grammars.vocabulary)
    first, second = (few.compile(Grammar(GrammarKind.REGEX, "ab")) for _ in range(2))
    (token,) = grammars.vocabulary.tokenizer().tokenize_str("a")
    assert first.try_consume_tokens([token]) == 1
    assert first.compute_bitmask() != second.compute_bitmask()
    for text in ("b", "c", "d"):
        few.compile(Grammar(GrammarKind.REGEX, text))
    assert len(few._compiled) == 2


def test_tokenizers_that_tell_no_bytes_are_read_token_by_token(tmp_path: Path) -> None:
    tiny = GrammarVocabulary(str(write_tokenizer(tmp_path / "tiny")), 128, (2,))
    (tmp_path / "bytes").mkdir()
    byte_fallback_tokenizer().save(str(tmp_path / "bytes" / "tokenizer.json"))
    for vocabulary in (tiny, GrammarVocabulary(str(tmp_path / "bytes"), 300, (2,))):
        tokenizer = vocabulary.tokenizer()
        assert tokenizer.vocab_size == vocabulary.vocab_size and tokenizer.is_special_token(2)
        matcher = GrammarCompiler(vocabulary).compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(OBJECT)))
        for character in '{"a":1}':
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            tokens = [t for t in range(vocabulary.vocab_size) if tokenizer.decode_bytes([t]) == character.encode()]
            (token,) = [t for t in tokens if allowed >> t & 1]
            assert matcher.try_consume_tokens([token]) == 1
        assert matcher.is_accepting() and int.from_bytes(matcher.compute_bitmask(), "little") == 1 << 2


def test_an_engine_without_tokenizer_or_end_token_refuses() -> None:
    for vocabulary, reason in (
        (GrammarVocabulary(None, 100, (2,)), "--skip-tokenizer-init"),
        (GrammarVocabulary(str(SMOLLM2), 49152, ()), "no end token"),
    ):
        with pytest.raises(RequestError, match=reason):
            GrammarCompiler(vocabulary).compile(Grammar(GrammarKind.REGEX, "a"))
