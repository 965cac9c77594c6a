"""Grammars of every kind compile; a bad one is refused with the library's reason, in bounded time and space."""

import json
import time
from pathlib import Path

import pytest
from support.small_tokenizers import SMOLLM2, byte_fallback_tokenizer
from support.tiny.grammars import BAD_GRAMMARS, OBJECT, tag
from support.tiny.tokenizer import write_tokenizer

from overlap_spec.errors import RequestError
from overlap_spec.features.grammar import compiler
from overlap_spec.features.grammar.compiler import GrammarCompiler
from overlap_spec.features.grammar.vocabulary import GrammarVocabulary
from overlap_spec.messages import Grammar, GrammarKind

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


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize(("kind", "text", "output"), GOOD)
def test_a_grammar_takes_its_texts(grammars: GrammarCompiler, kind: GrammarKind, text: str, output: str) -> None:
    matcher = grammars.compile(Grammar(kind, text))
    tokens = grammars.vocabulary.tokenizer().tokenize_str(output)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()


@pytest.mark.parametrize(("kind", "text", "reason"), BAD_GRAMMARS, ids=lambda value: str(value)[:40])
def test_a_bad_one_is_refused_with_the_reason(
    grammars: GrammarCompiler, kind: GrammarKind, text: str, reason: str
) -> None:
    with pytest.raises(RequestError, match="^grammar: not a valid ") as refused:
        grammars.compile(Grammar(kind, text))
    assert reason in str(refused.value) and len(str(refused.value)) < 700
    assert refused.value.field == "grammar"


@pytest.mark.parametrize(("kind", "text"), BOMBS, ids=lambda value: str(value)[:40])
def test_what_is_huge_or_explodes_is_bounded(grammars: GrammarCompiler, kind: GrammarKind, text: str) -> None:
    begun = time.process_time()
    try:
        matcher = grammars.compile(Grammar(kind, text))
        matcher.compute_bitmask()
    except RequestError:
        pass
    assert time.process_time() - begun < 10.0


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (GrammarKind.REGEX, "(a{900}){80}b", "every answer begins with the same 72001 bytes, of at most 65536"),
        (GrammarKind.REGEX, "a{70}b|a{70}c", ""),
        (GrammarKind.JSON_SCHEMA, json.dumps({"allOf": [{"pattern": f".*a{i}.*"} for i in range(40)]}), "may cost 2^"),
        (GrammarKind.LARK, 'start: A\nA: "x" | ' + " & ".join(f"/(.|\\n)*a{i}.*/" for i in range(9)), "may cost 2^"),
    ],
    ids=["forced", "", "patterns", "terminals"],
)
def test_a_check_refuses_what_may_explode_later(
    grammars: GrammarCompiler, kind: GrammarKind, text: str, reason: str
) -> None:
    if not reason:
        assert grammars.check(Grammar(kind, text)) == ""
        return
    with pytest.raises(RequestError) as refused:
        grammars.check(Grammar(kind, text))
    assert reason in str(refused.value)


@pytest.mark.parametrize("text", ["[xy]((a{1000}){1000}){1000}", "[xy](a{990}){1000}b"])
def test_what_explodes_along_a_text_ends_in_an_error_soon(grammars: GrammarCompiler, text: str) -> None:
    matcher = grammars.compile(Grammar(GrammarKind.REGEX, text))
    begun = time.process_time()
    for token in grammars.vocabulary.tokenizer().tokenize_str("xaa"):
        matcher.try_consume_tokens([token])
        matcher.compute_ff_tokens()
        matcher.compute_bitmask()
    assert matcher.is_error() and "too many expressions" in matcher.get_error()
    assert time.process_time() - begun < 1.0


def test_what_is_forgotten_is_compiled_again(grammars: GrammarCompiler) -> None:
    grammar, few = Grammar(GrammarKind.REGEX, "ab"), GrammarCompiler(grammars.vocabulary)
    few.give_back(grammar, few.compile(grammar))
    few.forget()
    assert few.take(grammar) is None and not few._compiled


def test_white_space_is_as_the_schema_asks(grammars: GrammarCompiler) -> None:
    tokenizer = grammars.vocabulary.tokenizer()
    for options, spaced, compact in (
        ({}, 8, 7),
        ({"whitespace_flexible": False}, 5, 7),
        ({"whitespace_pattern": "_"}, 5, 7),
    ):
        text = json.dumps({**({"x-guidance": options} if options else {}), **OBJECT})
        for output, taken in (('{"a": 5}', spaced), ('{"a":5}', compact)):
            matcher = grammars.compile(Grammar(GrammarKind.JSON_SCHEMA, text))
            tokens = [token for character in output for token in tokenizer.tokenize_str(character)]
            assert matcher.try_consume_tokens(tokens) == taken, (options, output)
    bounded = grammars.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(OBJECT)))
    assert bounded.try_consume_tokens([tokenizer.tokenize_str(each)[0] for each in "{" + " " * 40]) == 21


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


def test_a_matcher_that_is_given_back_begins_again(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_FREE", 1)
    grammar, few = Grammar(GrammarKind.REGEX, "ab"), GrammarCompiler(grammars.vocabulary)
    first, second, broken = (few.compile(grammar) for _ in range(3))
    beginning = second.compute_bitmask()
    a, b = (grammars.vocabulary.tokenizer().tokenize_str(text)[0] for text in "ab")
    assert first.try_consume_tokens([a]) == 1 and not broken.consume_token(b) and broken.is_error()
    for matcher in (broken, first, second):
        few.give_back(grammar, matcher)
    assert few.compile(grammar) is first and first.compute_bitmask() == beginning
    other = few.compile(grammar)
    assert other is not second and other is not broken and other.compute_bitmask() == beginning
    few.give_back(Grammar(GrammarKind.REGEX, "c"), first)  # forgotten meanwhile


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
