"""Grammars of what follows reasoning with a budget: where they begin, and what may be drawn before."""

import functools
import random
import re

import numpy as np
import pytest
from support.reasoned_answers import answer_begins
from support.small_tokenizers import EOS, SMOLLM2, smollm2
from support.tiny.grammars import END, tiny_grammar_vocabulary

from overlap_spec.features.grammar.compiler import GrammarCompiler
from overlap_spec.features.grammar.reasoned import ReasonedMatcher
from overlap_spec.features.grammar.vocabulary import GrammarVocabulary
from overlap_spec.messages import Grammar, GrammarKind, Reasoning, Thinking

VOCAB_SIZE = 128
ANSWER = "a{2,4}b"
MARKERS = ((71,), (71, 72), (72, 72, 71), (72, 72))  # of "a" and "b", which the answer has too
compiler = GrammarCompiler(tiny_grammar_vocabulary(VOCAB_SIZE))


def allowed(matcher: ReasonedMatcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    mask = np.full(-(-vocab_size // 32), 7, dtype=np.uint32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def may_follow(tokens: list[int], thinking: Thinking) -> set[int]:
    """By the definition; the answer's language is written out."""
    begin = answer_begins(tokens, thinking)
    letters = {71: "a", 72: "b", END: "$", 6: " "}
    tail = tokens if begin is None else tokens[begin:]
    text = "".join(letters.get(token, "?") for token in tail)
    beginnings = re.compile(r" {0,20}(a{0,4}|a{2,4}b\$?)$")
    of_answer = {token for token, letter in letters.items() if re.match(beginnings, text + letter)}
    if begin is not None:
        return of_answer
    if not thinking.is_open and tuple(tokens) == thinking.opening[: len(tokens)] != thinking.opening:
        return of_answer | {thinking.opening[len(tokens)]}
    return set(range(VOCAB_SIZE)) - {END}


def test_white_space_before_the_answer_has_an_end() -> None:
    thinking = Thinking(0, True, (), (72,))
    matcher = ReasonedMatcher(
        compiler.compile(Grammar(GrammarKind.REGEX, ANSWER, thinking=thinking)), thinking, (END,), VOCAB_SIZE
    )
    assert matcher.try_consume_tokens([72, *[6] * 25]) == 1 + 20
    assert allowed(matcher) == {71}


@pytest.mark.parametrize("seed", range(30))
def test_what_may_follow_is_what_the_definition_says(seed: int) -> None:
    """Also after guesses were consumed and forgotten."""
    rng = random.Random(seed)
    thinking = Thinking(rng.randint(0, 6), rng.random() < 0.5, rng.choice(((), *MARKERS)), rng.choice(MARKERS))
    grammar = Grammar(GrammarKind.REGEX, ANSWER, thinking=thinking)
    matcher = ReasonedMatcher(compiler.compile(grammar), thinking, (END,), VOCAB_SIZE)
    tokens: list[int] = []
    for _ in range(60):
        may = may_follow(tokens, thinking)
        # White space between a marker and the answer: a tab or a newline is no character of the definition's.
        assert allowed(matcher) - {5} == may - {5}, (thinking, tokens)
        token = rng.choice((71, 72, 71, 72, 6, 90))
        due = may == set(range(VOCAB_SIZE)) - {END} and matcher._forced()
        if due:
            assert token == due or not matcher.try_consume_tokens([token])
            token = due
        if token in may and matcher.try_consume_tokens([token]):
            tokens.append(token)
        if tokens and rng.random() < 0.4:
            num = rng.randint(1, min(3, len(tokens)))
            matcher.rollback(num)
            del tokens[-num:]
        if rng.random() < 0.02:
            matcher.reset()
            tokens.clear()


def test_an_answer_that_is_refused_within_the_opening_marker_leaves_nothing_behind() -> None:
    """The answer begins with the same two tokens, and a third that neither of them has was refused."""
    thinking = Thinking(4, False, (71, 71, 72), (72,))
    matcher = ReasonedMatcher(compiler.compile(Grammar(GrammarKind.REGEX, ANSWER)), thinking, (END,), VOCAB_SIZE)
    assert matcher.try_consume_tokens([71, 71, 90]) == 2
    assert matcher.try_consume_tokens([71, 72]) == 2, "aaab"
    assert allowed(matcher) == {END}


@functools.cache
def compiler_of_smollm2() -> GrammarCompiler:
    return GrammarCompiler(GrammarVocabulary(str(SMOLLM2), 49152, (EOS,)))


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("text", ["🦤", "a</thi", "<", "\n"])
def test_reasoning_may_end_inside_a_character_or_a_word(text: str) -> None:
    """As it does where the budget ends."""
    compiler = compiler_of_smollm2()
    closing = tuple(smollm2().encode("</think>", False))
    for tokens in (ids[:count] for ids in [smollm2().encode(text, False)] for count in range(len(ids) + 1)):
        thinking = Thinking(len(tokens), True, (), closing)
        reasoning = Reasoning("<think>", "</think>", budget=len(tokens))
        grammar = Grammar(GrammarKind.REGEX, "[0-9]{2}", (), reasoning, True, thinking)
        matcher = ReasonedMatcher(compiler.compile(grammar), thinking, (EOS,), 49152)
        output = [*tokens, *closing]
        assert matcher.try_consume_tokens(output) == len(output)
        digits = {smollm2().encode(digit, False)[0] for digit in "0123456789"}
        assert digits <= allowed(matcher, 49152) and EOS not in allowed(matcher, 49152)
        assert smollm2().encode("a", False)[0] not in allowed(matcher, 49152)
