"""A request whose time is up, in a whole engine: everything that it had is free again, and the others' tokens stay."""

import asyncio

import pytest
from support.ring import CLIENT, TIMEOUT_S, Answer, Ring, RingConfig, running, tiny_loaded
from support.small_tokenizers import smollm2

from overlap_spec.messages import (
    ErrorCode,
    Generate,
    Grammar,
    GrammarKind,
    SamplingParams,
    Terms,
    TokenPrompt,
)

LONG = SamplingParams(max_new_tokens=100, temperature=1.0, seed=5, ignore_eos=True)
FORCED = SamplingParams(max_new_tokens=110, temperature=1.0, seed=6, grammar=Grammar(GrammarKind.REGEX, "[a-z]{150}"))


def start(ring: Ring, request_id: str, prompt: list[int], sampling: SamplingParams, terms: Terms) -> Answer:
    answer = ring.clients.answers[request_id] = Answer()
    ids = b"".join(token.to_bytes(4, "little") for token in prompt)
    ring.clients.said.put_nowait((CLIENT, Generate(request_id, TokenPrompt(ids), sampling, terms)))
    return answer


@pytest.mark.slow
def test_a_request_that_is_ended_by_its_limit_leaves_nothing() -> None:
    async def use(ring: Ring) -> None:
        alone = await ring.ask([1, 2, 3], LONG)
        await ring.idle()
        before = ring.scheduler.queues.memory.num_used
        ended = [
            start(ring, f"e{number}", [4 + number] * 40, sampling, Terms(timeout_s=0.02 * (1 + number)))
            for number, sampling in enumerate((LONG, FORCED, LONG, FORCED, LONG, LONG))
        ]
        kept = start(ring, "kept", [1, 2, 3], LONG, Terms(timeout_s=60.0))
        for answer in [*ended, kept]:
            await asyncio.wait_for(answer.done.wait(), TIMEOUT_S)
        codes = [answer.rejected.code for answer in ended if answer.rejected is not None]
        assert len(codes) >= 3 and set(codes) == {ErrorCode.TIMEOUT}, "they run for longer than that"
        assert kept.token_ids == alone.token_ids and len(kept.token_ids) == 100
        await ring.idle()
        queues = ring.scheduler.queues
        assert not queues.open and not queues.held and len(queues.free_slots) == ring.scheduler.limits.num_slots
        assert queues.memory.num_used == before
        assert (await ring.ask([1, 2, 3], LONG)).token_ids == alone.token_ids

    async def main() -> None:
        config = RingConfig(num_steps=2, num_slots=3, max_len=160, num_pages=120, grammars=True)
        async with running(tiny_loaded(7, 2), config, smollm2()) as ring:
            await use(ring)

    asyncio.run(main())
