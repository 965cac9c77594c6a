"""A mixture that is served reports how many of its experts the layers of a step read; a dense target reports none."""

import asyncio

import pytest
from support.ring import RingConfig, running, tiny_loaded

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams, Stats

GREEDY = SamplingParams(max_new_tokens=60, temperature=0.0, seed=0, ignore_eos=True)


def served(codec: TextCodec, family: str, num_requests: int) -> Stats:
    """The report after some requests have ended."""
    config = RingConfig(family=family, num_steps=1)

    async def main() -> Stats:
        models = tiny_loaded(3, config.num_steps, family=family)
        async with running(models, config, codec) as ring:
            assert ("expert_reads" in ring.scheduler.hooks.by_name) == (family != "llama"), "it attaches to mixtures"
            await asyncio.gather(*(ring.ask([40 + uid, 7, 9 * uid], GREEDY) for uid in range(1, num_requests + 1)))
            await ring.idle()
            return ring.scheduler.reporter.snapshot()

    return asyncio.run(main())


@pytest.mark.slow
@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("family", ["qwen3 moe", "mixtral"])
def test_the_report_has_the_experts_of_a_step(codec: TextCodec, family: str) -> None:
    alone, several = served(codec, family, 1), served(codec, family, 4)
    assert alone.experts_read is not None and several.experts_read is not None
    assert 1 < alone.experts_read < several.experts_read <= several.num_experts


def test_a_dense_target_has_none(codec: TextCodec) -> None:
    stats = served(codec, "llama", 1)
    assert (stats.experts_read, stats.num_experts) == (None, 0)
