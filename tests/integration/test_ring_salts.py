"""Requests of different salts find nothing of each other's in the prefix cache; those of one salt find all of it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from support.ring import CLIENT, TIMEOUT_S, Answer, Ring, RingConfig, running, tiny_loaded
from support.small_tokenizers import smollm2

from overlap_spec.messages import Generate, SamplingParams, Terms, TokenPrompt

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, seed=0, ignore_eos=True)
PROMPT = [(7 * i) % 100 + 10 for i in range(40)]


def start(ring: Ring, salt: str, prompt: list[int], sampling: SamplingParams = GREEDY) -> Answer:
    request_id = f"r{len(ring.clients.answers)}"
    answer = ring.clients.answers[request_id] = Answer()
    ids = b"".join(token.to_bytes(4, "little") for token in prompt)
    ring.clients.said.put_nowait((CLIENT, Generate(request_id, TokenPrompt(ids), sampling, Terms(cache_salt=salt))))
    return answer


async def ask(ring: Ring, salt: str, prompt: list[int]) -> Answer:
    answer = start(ring, salt, prompt)
    await asyncio.wait_for(answer.done.wait(), TIMEOUT_S)
    return answer


def cached(answer: Answer) -> int:
    assert answer.usage is not None
    return answer.usage.cached_tokens


def with_ring(config: RingConfig, use: Callable[[Ring], Awaitable[None]]) -> None:
    async def main() -> None:
        async with running(tiny_loaded(7, config.num_steps), config, smollm2()) as ring:
            await use(ring)

    asyncio.run(main())


@pytest.mark.parametrize("num_steps", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_two_salts_share_nothing(num_steps: int) -> None:
    """Neither a prompt nor what was said after it, whichever salt comes first; tokens are the same."""

    async def use(ring: Ring) -> None:
        first = await ask(ring, "a", PROMPT)
        longer = [*PROMPT, *first.token_ids, 5]
        for salt in ("b", "", "a\u00e9"):
            other = await ask(ring, salt, PROMPT)
            assert cached(other) == 0 and other.token_ids == first.token_ids
        assert cached(await ask(ring, "c", longer)) == 0
        assert cached(await ask(ring, "a", PROMPT)) >= 32
        assert cached(await ask(ring, "a", longer)) >= 48
        assert cached(await ask(ring, "", PROMPT)) >= 32

    with_ring(RingConfig(num_steps=num_steps, page_size=4, num_pages=200, max_len=160), use)


def test_two_salts_that_run_together_share_nothing() -> None:
    """A prompt that is computed may be found while its request still runs: by those of its salt."""

    async def use(ring: Ring) -> None:
        long = SamplingParams(max_new_tokens=60, temperature=0.0, seed=0, ignore_eos=True)
        first = start(ring, "a", PROMPT, long)
        await asyncio.wait_for(first.grew.wait(), TIMEOUT_S)
        same, other = start(ring, "a", PROMPT), start(ring, "b", PROMPT)
        await asyncio.wait_for(asyncio.gather(same.done.wait(), other.done.wait(), first.done.wait()), TIMEOUT_S)
        assert cached(same) >= 32 and cached(other) == 0
        assert same.token_ids == other.token_ids == first.token_ids[:12]

    with_ring(RingConfig(num_steps=3, page_size=4, num_pages=200, max_len=160, num_slots=3), use)


@pytest.mark.slow
def test_a_preempted_request_comes_back_to_its_own_salt() -> None:
    """What it finds again is its own, and what it leaves behind is found by none of another salt."""

    async def use(ring: Ring) -> None:
        long = SamplingParams(max_new_tokens=60, temperature=0.0, seed=0, ignore_eos=True)
        ring.scheduler.planner._admission.ratio.value = 0.0  # whoever fits now is let in
        older = start(ring, "a", PROMPT, long)
        await asyncio.wait_for(older.grew.wait(), TIMEOUT_S)
        ring.scheduler.planner._admission.ratio.value = 0.0
        newcomer = start(ring, "b", PROMPT, long)
        await asyncio.wait_for(asyncio.gather(older.done.wait(), newcomer.done.wait()), TIMEOUT_S)
        assert ring.scheduler.planner.counters.preempted > 0
        assert cached(newcomer) == 0 and newcomer.token_ids == older.token_ids
        assert cached(await ask(ring, "c", PROMPT)) == 0

    with_ring(RingConfig(num_steps=3, page_size=4, num_pages=1 + 160 // 4, max_len=160, num_slots=2), use)
