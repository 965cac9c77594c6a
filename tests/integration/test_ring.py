"""Properties of the whole ring that random schedules would show only by luck: cache hits, seeds, order of plans."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable

import pytest
from support.random_schedules import load
from support.ranked_models import ranked_models
from support.ring import Answer, Ring, RingConfig, running, tiny_loaded

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import ChunkWork, ResetSlot, SamplingParams, StepPlan, StepResult

PROMPT = [(7 * i) % 100 + 10 for i in range(45)]
GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0, seed=0, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=20, temperature=0.9, top_p=0.95, seed=1234, ignore_eos=True)


def with_ring(codec: TextCodec, config: RingConfig, use: Callable[[Ring], Awaitable[object]]) -> object:
    async def main() -> object:
        async with running(tiny_loaded(7, config.num_steps), config, codec) as ring:
            return await use(ring)

    return asyncio.run(main())


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_repeated_prompt_comes_from_the_cache(codec: TextCodec, num_steps: int, page_size: int) -> None:
    async def twice(ring: Ring) -> tuple[Answer, Answer]:
        return await ring.ask(PROMPT, GREEDY), await ring.ask(PROMPT, GREEDY)

    first, second = with_ring(codec, RingConfig(num_steps=num_steps, page_size=page_size), twice)
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens >= len(PROMPT) - page_size - 1
    assert second.token_ids == first.token_ids


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_a_request_gives_the_same_tokens_in_any_company(codec: TextCodec, sampling: SamplingParams) -> None:
    """Method, number of steps, depth, page size, batch and cache state."""

    async def alone(ring: Ring) -> Answer:
        return await ring.ask(PROMPT, sampling)

    async def crowded(ring: Ring) -> Answer:
        others = [ring.start(f"o{i}", PROMPT[: 10 + i], SAMPLED) for i in range(3)]
        answer = await ring.ask(PROMPT, sampling)
        await asyncio.gather(*(other.done.wait() for other in others))
        return answer

    expected = with_ring(codec, RingConfig(num_steps=0, depth=1), alone).token_ids
    for num_steps in (0, 1, 3, 5):
        for depth, page_size, use in ((1, 4, crowded), (2, 1, alone), (2, 16, crowded)):
            config = RingConfig(num_steps=num_steps, depth=depth, page_size=page_size)
            assert with_ring(codec, config, use).token_ids == expected, config


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize(("depth", "ahead"), [(1, 0), (2, 1)])
def test_the_next_plan_leaves_before_the_last_result_is_dispatched(codec: TextCodec, depth: int, ahead: int) -> None:
    sent_at_dispatch: list[tuple[int, int]] = []

    async def watched(ring: Ring) -> None:
        dispatch = ring.scheduler.dispatch

        def noting(message) -> None:
            if isinstance(message, StepResult):
                sent_at_dispatch.append((message.step_id, ring.plans.sent[-1]))
            dispatch(message)

        ring.scheduler.dispatch = noting
        await ring.ask(PROMPT, GREEDY)

    with_ring(codec, RingConfig(depth=depth, chunk_tokens=64), watched)
    steady = sent_at_dispatch[1:-2]  # the last steps are known to finish the request: nothing follows them
    assert steady and all(last - step == ahead for step, last in steady), sent_at_dispatch


@pytest.mark.slow
def test_a_rank_leaves_a_step_that_another_one_has_abandoned(codec: TextCodec) -> None:
    """As at the end of a ring whose ranks are told to stop while a step is on its way to them."""
    config = RingConfig(ranks=2, num_steps=0)
    chunk = ChunkWork(0, 0, array("i", PROMPT[:5]).tobytes())
    plan = StepPlan(1 << 20, 1, [], {0: [1, 2]}, [chunk], {0: ResetSlot(GREEDY, 5, (), 5)})

    async def main() -> None:
        async with running(ranked_models(2, lambda rank: load(7, config, rank)), config, codec) as ring:
            ring.to_worker.queues[0].send(plan)
            await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(main(), 20.0))
