"""The live audit on a GPU, with graphs of its own, in float32: margins of wrong tokens are far beyond rounding."""

import asyncio

import pytest
import torch
from support.random_schedules import run_seeds
from support.ring import RingConfig, running, tiny_loaded
from support.tiny.grammars import TINY_GRAMMARS

from overlap_spec.config import AuditSettings
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import AuditReport, SamplingParams

PLACE = torch.device("cuda", 0)


@pytest.mark.parametrize("graphs", [(1, 2, 4, 6), ()], ids=["graphs", "eager"])
def test_audits_of_random_schedules_find_nothing(codec: TextCodec, graphs: tuple[int, ...]) -> None:
    engine = {"place": PLACE, "dtype": torch.float32, "graph_batch_sizes": graphs, "audit": AuditSettings(1.0)}
    assert run_seeds(range(8), codec, engine)["audited_tokens"] > 100


@pytest.mark.parametrize("method", ["EAGLE3", "NGRAM"])
def test_requests_with_grammars_are_audited(codec: TextCodec, method: str) -> None:
    """Their masks are computed again, beside the steps of others."""
    report = asyncio.run(constrained(codec, method))
    assert report.figures.requests == 2 * len(TINY_GRAMMARS) and report.figures.tokens > 20 * len(TINY_GRAMMARS)
    assert not report.figures.faults and not report.skipped_because and not report.dropped_because


async def constrained(codec: TextCodec, method: str) -> AuditReport:
    """Serve a request of each grammar, greedy and drawn, with every one audited."""
    config = RingConfig(
        method=method, grammars=True, max_len=200, audit=AuditSettings(1.0), place=PLACE, dtype=torch.float32,
        graph_batch_sizes=(1, 2, 4, 6), num_slots=6, warm=True,
    )  # fmt: skip
    models = tiny_loaded(0, config.num_steps, config.dtype, PLACE, method)
    async with running(models, config, codec) as ring:
        requests = [
            SamplingParams(max_new_tokens=48, temperature=temperature, seed=7, grammar=grammar)
            for grammar in TINY_GRAMMARS.values()
            for temperature in (0.0, 1.0)
        ]
        await asyncio.gather(*(ring.ask([11, 40, 71, 9], each) for each in requests))
        await ring.idle()
        return ring.auditor.report()
