"""Thinking budgets in the whole engine: closed exactly at the token, inside accepted runs too, whatever is guessed.

Random schedules have budgets as well (tests/support/random_schedules.py): with preemptions, chunks, prefix hits.
"""

import asyncio

import msgspec
import pytest
from support.plain_oracle import PlainOracle
from support.ring import RingConfig, running, tiny_loaded
from support.tiny.methods import EVERY_METHOD

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams, Thinking

MODELS_SEED, NUM_TOKENS, BUDGET = 10, 14, 6
PROMPTS = [[(7 * i + j) % 100 + 10 for i in range(3 + j)] for j in range(3)]
OPENING = (30, 31)


@pytest.fixture(scope="module")
def expected(codec: TextCodec) -> list[tuple[list[int], SamplingParams, list[int]]]:
    """Requests and what plain decoding answers: a few of many tokens have to be forced."""
    oracle = PlainOracle(MODELS_SEED, codec)
    try:
        asked = [(prompt, each) for seed, prompt in enumerate(PROMPTS) for each in requests(oracle, prompt, seed)]
        found = [(*request, oracle.expected(*request).token_ids) for request in asked]
        assert oracle.decided["thinking_budgets"] > 10
        return found
    finally:
        oracle.close()


def requests(oracle: PlainOracle, prompt: list[int], seed: int) -> list[SamplingParams]:
    """Reasoning that ends by itself, at the last token of its budget, that would end after it, and that would not."""
    base = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=seed % 2, seed=seed, ignore_eos=True)
    drawn = oracle.expected(prompt, base).token_ids
    thinking = (
        *(Thinking(BUDGET, True, OPENING, tuple(drawn[at : at + size])) for at, size in ((3, 1), (4, 2), (5, 2))),
        Thinking(BUDGET, False, tuple(drawn[:2]), (127, 126, 125)),
        Thinking(BUDGET, False, OPENING, (127,)),
        Thinking(0, True, OPENING, (120, 121)),
    )
    return [msgspec.structs.replace(base, thinking=each) for each in thinking]


def check_budget(tokens: list[int], thinking: Thinking) -> None:
    """Counted from the answer alone."""
    marker, opening = list(thinking.closing), list(thinking.opening)
    opens = tokens[: len(opening)] == opening
    if opens or thinking.is_open:
        thought = tokens[len(opening) :] if opens else tokens
        ends = [at for at in range(len(thought)) if thought[at : at + len(marker)] == marker]
        closed = bool(ends) and ends[0] + len(marker) <= thinking.budget
        assert closed or thought[thinking.budget : thinking.budget + len(marker)] == marker


@pytest.mark.full_but_every(23)
@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("method", "topk"), [*((name, 1) for name in EVERY_METHOD), ("EAGLE3", 3), ("EAGLE", 3)])
def test_a_budget_ends_at_its_token(
    codec: TextCodec, expected: list[tuple[list[int], SamplingParams, list[int]]], method: str, topk: int, depth: int
) -> None:
    config = RingConfig(
        method=method, num_steps=3, topk=topk, depth=depth, num_slots=7, num_pages=600, max_len=120, chunk_tokens=64
    )

    async def ask_all() -> list[list[int]]:
        models = tiny_loaded(MODELS_SEED, config.num_steps, method=method, topk=topk)
        async with running(models, config, codec) as ring:
            answers = await asyncio.gather(*(ring.ask(prompt, sampling) for prompt, sampling, _ in expected))
            return [answer.token_ids for answer in answers]

    for (prompt, sampling, tokens), found in zip(expected, asyncio.run(ask_all()), strict=True):
        assert found == tokens, (prompt, sampling)
        assert sampling.thinking is not None
        check_budget(found, sampling.thinking)
