"""A thinking budget beside a grammar, through the ring: the budget ends the reasoning, the grammar begins after it.

Expected tokens are those of plain constrained decoding (support/grammar_oracle.py), where the answer's beginning is
found by the definition. The request may name its markers as text (`reasoning`) or as tokens (`thinking`).
"""

import asyncio
import re
from dataclasses import replace

import msgspec
import pytest
from support.grammar_oracle import GrammarOracle
from support.reasoned_answers import answer_begins
from support.ring import RingConfig, running, tiny_loaded
from support.ring_links import Answer
from support.sampling_oracle import must_draw
from support.tiny.grammars import END

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import JSON_WHITE_SPACE, Grammar, GrammarKind, Reasoning, SamplingParams, Thinking

PROMPT = [11, 40, 71, 9, 80, 33]
ANSWER = r"[0-9]{3}-[a-f]{2,20}!"
CONFIG = RingConfig(grammars=True, max_len=200, num_slots=8, num_pages=400)
SHAPES = {
    "chain": CONFIG,
    "tree": replace(CONFIG, num_steps=3, topk=3),
    "n-grams, one step in flight": replace(CONFIG, method="NGRAM", depth=1),
    "captured": replace(CONFIG, graph_batch_sizes=(1, 2, 4, 8)),
}


class ReasonedOracle(GrammarOracle):
    """Knows `thinking`."""

    _tokens: list[int] | None = None

    def _chosen(self, logits: list[float], sampling: SamplingParams, position: int) -> int:
        if sampling.thinking is None or self._tokens is None:
            return super()._chosen(logits, sampling, position)
        each = sampling.thinking
        due = must_draw(self._tokens, 0, each.budget, each.is_open, each.opening, each.closing)
        return due if due >= 0 else super()._chosen(logits, sampling, position)

    def forbidden(self, grammar: Grammar, tokens: list[int]) -> set[int]:
        self._tokens = tokens
        if (thinking := grammar.thinking) is None:
            return super().forbidden(grammar, tokens)
        begin = answer_begins(tokens, thinking)
        plain = Grammar(GrammarKind.REGEX, JSON_WHITE_SPACE + grammar.text)
        if begin is not None:
            return super().forbidden(plain, tokens[begin:])
        if not thinking.is_open and len(tokens) < len(thinking.opening):
            return super().forbidden(plain, tokens) - {thinking.opening[len(tokens)]}
        return {END}


def asked(codec: TextCodec, temperature: float, is_text: bool) -> list[tuple[SamplingParams, SamplingParams]]:
    """Requests, which name their markers as text and as tokens in turn, and the same as the worker gets them."""
    base = SamplingParams(max_new_tokens=48, temperature=temperature, seed=7)
    found = []
    for opening, closing, budget, is_implicit in (
        ("ab", "yz", 5, True),
        ("ab", "e", 20, True),
        ("1", "!", 4, False),
        ("ab", "yz", 0, True),
    ):
        ids = tuple(codec.encode(opening, False)), tuple(codec.encode(closing, False))
        thinking = Thinking(budget, is_implicit, *ids)
        grammar = Grammar(GrammarKind.REGEX, ANSWER)
        reasoning = Reasoning(opening, closing, is_implicit, is_separate=False, budget=budget)
        by_text = msgspec.structs.replace(base, grammar=grammar, reasoning=reasoning)
        by_tokens = msgspec.structs.replace(base, grammar=grammar, thinking=thinking)
        settled = msgspec.structs.replace(grammar, thinking=thinking)
        known = msgspec.structs.replace(base, grammar=settled, thinking=thinking)
        found.append((by_text if is_text else by_tokens, known))
        is_text = not is_text
    return found


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_grammar_begins_where_the_budget_ends_the_reasoning(codec: TextCodec, shape: str) -> None:
    config = SHAPES[shape]
    oracle = ReasonedOracle(0, codec)
    requests = [pair for temperature in (0.0, 1.0) for pair in asked(codec, temperature, temperature > 0)]

    async def ask_all() -> list[Answer]:
        models = tiny_loaded(0, config.num_steps, method=config.method, topk=config.topk)
        async with running(models, config, codec) as ring:
            return await asyncio.gather(*(ring.ask(PROMPT, request) for request, _ in requests))

    for (request, known), answer in zip(requests, asyncio.run(ask_all()), strict=True):
        assert answer.rejected is None, (request, answer.rejected)
        oracle.check(PROMPT, known, answer, f"{shape} {request}")
        thinking = known.thinking
        assert thinking is not None
        begin = answer_begins(answer.token_ids, thinking)
        if answer.token_ids[-1] == END:
            assert begin is not None
            text = codec.decode(answer.token_ids[begin:-1], False)
            assert re.fullmatch(ANSWER, text.strip()), text
    oracle.close()
