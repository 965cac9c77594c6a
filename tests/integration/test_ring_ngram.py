"""N-grams in a whole ring: as many steps as support/reference/ngram.py takes, and a log flushed with the cache."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct
from support.reference.ngram import Limits, runs
from support.ring import CLIENT, Answer, Ring, RingConfig, running, tiny_loaded

from overlap_spec.features.adaptive_width.scheduler import MeasuredWidth
from overlap_spec.features.ngram.scheduler import MatchedTokens
from overlap_spec.features.ngram.worker import NgramProposer
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import Flush, FlushCache, SamplingParams, StepCosts

GREEDY = SamplingParams(max_new_tokens=60, temperature=0.0, seed=0, ignore_eos=True)
LIMITS = {"NGRAM": Limits(max_match=4), "NGRAM of chains": Limits(min_match=2, max_breadth=1, by_frequency=True)}
BASE = RingConfig(num_steps=7, chunk_tokens=16, num_slots=2)


def prompt_of(seed: int, length: int) -> list[int]:
    """Some tokens again and again: their order is random."""
    rng = random.Random(seed)
    return [rng.choice(range(40, 60)) for _ in range(length)]


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("method", LIMITS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 16])
def test_steps_are_the_references(codec: TextCodec, page_size: int, depth: int, method: str) -> None:
    """A prompt in chunks, then one that begins alike, whose beginning is cached: it knows that, and no more."""
    config = replace(BASE, method=method, depth=depth, page_size=page_size)
    prompts = [prompt_of(1, 50), prompt_of(1, 50)[:33] + prompt_of(2, 15)]

    async def main() -> list[Answer]:
        models = tiny_loaded(3, config.num_steps, method=config.method)
        async with running(models, config, codec) as ring:
            answers = []
            for prompt in prompts:
                answers.append(await ring.ask(prompt, GREEDY))
                await ring.idle()
                ring.to_worker.send(FlushCache())  # to the log alone
            assert ring.plans.chunk_splits > 0
            return answers

    answers = asyncio.run(main())
    assert answers[1].usage.cached_tokens >= 32
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = runs(prompt, answer.token_ids, LIMITS[method], config.width)
        assert answer.usage.spec_verify_ct == len(expected) < 50, "some guess was right"


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", LIMITS)
def test_steps_are_as_wide_as_what_is_found(codec: TextCodec, method: str, depth: int) -> None:
    """Nothing is guessed at first: plain steps. Then the answer goes round, and so do the guesses: wide ones."""
    config = replace(BASE, method=method, depth=depth)
    costs = StepCosts((1,), (1, 2, 4, 8), ((1.0, 1.1, 1.2, 1.3),))
    prompt = [40 + i for i in range(20)]

    async def main(policy: MeasuredWidth | None) -> tuple[Answer, Counter[int]]:
        models = tiny_loaded(3, config.num_steps, method=config.method)
        async with running(models, config, codec) as ring:
            if policy is not None:
                policy.timed = lambda *step: None  # type: ignore[method-assign]  # times are the costs' own
                ring.scheduler.planner.widths.policy = policy
            answer = await ring.ask(prompt, GREEDY)
            return answer, ring.plans.widths

    answer, widths = asyncio.run(main(MeasuredWidth(costs, MatchedTokens(costs.widths))))
    fixed, all_wide = asyncio.run(main(None))
    assert answer.token_ids == fixed.token_ids and set(all_wide) == {8}
    assert widths[1] >= 3 and widths[8] >= 3, widths
    assert answer.usage.spec_verify_ct < 50


@pytest.mark.slow
@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize(("method", "depth"), list(zip(LIMITS, [2, 1], strict=True)))
def test_steps_rest_until_something_is_found(codec: TextCodec, method: str, depth: int) -> None:
    """Nothing is found at first, and lookups are dear: they cease. Then the answer goes round, and they go on."""
    config = replace(BASE, method=method, depth=depth, max_len=200)
    costs = StepCosts((1,), (1, 2, 4, 8), ((1.0, 1.02, 1.05, 1.1),), (0.75,))
    sampling = replace_struct(GREEDY, max_new_tokens=120)

    async def main(policy: MeasuredWidth | None) -> tuple[Answer, list[bool], Counter[int]]:
        async with running(tiny_loaded(3, config.num_steps, method=config.method), config, codec) as ring:
            if policy is not None:
                policy.timed = lambda *step: None  # type: ignore[method-assign]  # times are the costs' own
                ring.scheduler.planner.widths.policy = policy
            answer = await ring.ask([40 + i for i in range(20)], sampling)
            return answer, ring.plans.rests, ring.plans.widths

    answer, rests, widths = asyncio.run(main(MeasuredWidth(costs, MatchedTokens(costs.widths))))
    fixed, never, _ = asyncio.run(main(None))
    assert answer.token_ids == fixed.token_ids and not any(never)
    assert not rests[0] and sum(rests) >= 10 and not any(rests[-4:]), rests
    assert widths[8] >= 3, widths


@pytest.mark.slow
def test_a_flush_reaches_the_log(codec: TextCodec) -> None:
    config = replace(BASE, method="NGRAM")

    async def heard(ring: Ring) -> int:
        await ring.idle()
        proposer = ring.executor.decode_step.method.proposer
        assert isinstance(proposer, NgramProposer)
        return int(proposer.memory.log.places.count_nonzero())

    async def main() -> None:
        async with running(tiny_loaded(3, config.num_steps, method="NGRAM"), config, codec) as ring:
            await ring.ask(prompt_of(1, 30), GREEDY)
            assert await heard(ring) > 100
            ring.clients.said.put_nowait((CLIENT, Flush("flush")))
            async with asyncio.timeout(30):
                while await heard(ring):
                    await asyncio.sleep(0.01)
            again = await ring.ask(prompt_of(1, 30), GREEDY)
            assert again.usage.cached_tokens == 0 and await heard(ring) > 100

    asyncio.run(main())
