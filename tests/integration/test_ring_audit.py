import asyncio
import random

from support.ring import RingConfig, running, tiny_loaded

from overlap_spec.config import AuditSettings
from overlap_spec.messages import SamplingParams


def test_first(codec):
    config = RingConfig(audit=AuditSettings(1.0), num_slots=4)
    models = tiny_loaded(1, 3)
    rng = random.Random(0)

    async def go():
        async with running(models, config, codec) as ring:
            for i in range(10):
                s = SamplingParams(
                    max_new_tokens=20,
                    temperature=rng.choice([0, 1.0]),
                    seed=i,
                    ignore_eos=True,
                    top_p=rng.choice([1, 0.8]),
                )
                await ring.ask([rng.randrange(6, 128) for _ in range(rng.randint(1, 30))], s)
            await ring.idle()
            return ring.auditor.report(), ring.plans.audits

    report, steps = asyncio.run(go())
    print(report, steps)
    assert report.figures.tokens == 200 and not report.figures.faults
