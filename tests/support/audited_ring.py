"""Serves random requests in a ring with audits, until a fault is found or enough tokens are served.

Requests are numbered as they are asked, so their content and which of them are audited depend on the seed alone.
"""

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from overlap_spec.config import AuditSettings
from overlap_spec.features.audit.scheduler import share_of
from overlap_spec.frontend.codec import Codec
from overlap_spec.messages import AuditReport, SamplingParams
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.geometry import LoadedModels
from support.ring import Ring, RingConfig, running, tiny_loaded

BATCH = 8  # requests that run are audited at their end: fewer of them, and fewer tokens until a fault is known
CONTEXT = 1.0  # what came before matters more than in other rings: a wrong row then makes a wrong token more often
Plant = Callable[[Executor], None]


@dataclass(frozen=True)
class Served:
    """What was served until the end, and what the audit found."""

    tokens: int
    committed_tokens: int
    report: AuditReport


def audited_config(rate: float, **engine: object) -> RingConfig:
    """Most steps have a full batch, and audits have the share of an engine's."""
    config = RingConfig(num_slots=BATCH, num_pages=200, page_size=16, max_len=200, chunk_tokens=1024, num_steps=1)
    audits = {"audit": AuditSettings(rate), "audit_slots": BATCH, "audit_share": share_of(rate)}
    return replace(config, **audits, **engine)


def serve_audited(
    config: RingConfig,
    codec: Codec,
    seed: int,
    most_tokens: int,
    plant: Plant = lambda executor: None,
    family: str = "llama",
) -> Served:
    """`most_tokens`: served tokens after which it ends without a fault."""
    sizes = {"context": CONTEXT} if family == "llama" else {}
    models = tiny_loaded(
        seed, config.num_steps, config.dtype, method=config.method, topk=config.topk, family=family, **sizes
    )
    return asyncio.run(_serve(config, codec, seed, most_tokens, plant, models))


async def _serve(
    config: RingConfig, codec: Codec, seed: int, most_tokens: int, plant: Plant, models: LoadedModels
) -> Served:
    async with running(models, config, codec) as ring:
        ring.inbox.scheduler = None  # invariants are for random schedules: they take longer than the steps
        plant(ring.executor)
        tokens, numbers = 0, itertools.count()

        async def client() -> None:
            nonlocal tokens
            while tokens < most_tokens and not ring.auditor.report().figures.faults:
                answered = await _ask(ring, next(numbers), seed)
                tokens += answered  # read after the wait: others have added to it

        await asyncio.gather(*(client() for _ in range(config.num_slots)))
        while ring.auditor.report().figures.backlog and not ring.auditor.report().figures.faults:
            await asyncio.sleep(0.01)
        stats = ring.scheduler.reporter.snapshot()
        return Served(tokens, stats.committed_tokens_total, ring.auditor.report())


async def _ask(ring: Ring, number: int, seed: int) -> int:
    rng = random.Random(f"{seed} {number}")
    prompt = [rng.randrange(6, 128) for _ in range(rng.randint(1, 24))]
    filters = rng.choice([{}, {}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02}])
    sampling = SamplingParams(
        max_new_tokens=rng.randint(10, 40),
        temperature=rng.choice([0.0, 0.7, 1.0]),
        seed=rng.randrange(1 << 40),
        ignore_eos=True,
        **filters,
    )
    answer = ring.start(str(number), prompt, sampling)
    await asyncio.wait_for(answer.done.wait(), 60)
    return len(answer.token_ids)
