"""The worker process: loads, warms up, reports its facts, then runs its loop.

The start-up table and reports show how long the phases of its start take, one after another.
"""

import logging
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import zmq
from msgspec.structs import replace

from overlap_spec import features
from overlap_spec.config import LOSSY, Settings, SpecSettings, synthetic_acceptance, waiting_fact
from overlap_spec.config.ranks import rank_of
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.messages import (
    CpuFacts,
    CudaFacts,
    RankFacts,
    Roofline,
    StepCosts,
    ToScheduler,
    ToWorker,
    WorkerFacts,
    WorkerReady,
)
from overlap_spec.models.recurrent_state import CHUNK
from overlap_spec.runtime.actor import ActorContext
from overlap_spec.runtime.machine import num_cores, processor_name
from overlap_spec.runtime.step_link import SpinPolicy
from overlap_spec.runtime.transport import Outlet
from overlap_spec.worker.build import build
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.loop import PlanInbox, Worker
from overlap_spec.worker.ranks import Ranks, Silent, follow, leading, taking_part
from overlap_spec.worker.startup.geometry import (
    MAX_DEPTH,
    Geometry,
    LoadedModels,
    bytes_per_token,
    demand_of,
    memory_facts,
    weight_formats,
)
from overlap_spec.worker.startup.start_costs import NO_COSTS, roofline, start_costs
from overlap_spec.worker.startup.step_times import ChunkSize
from overlap_spec.worker.startup.warmup import (
    KERNELS,
    Captures,
    NotFinite,
    first_not_finite,
    prepare,
)

_OWN_STATE = Path("/proc/self/stat")
_STARTED = 19  # the field with the process's start, counted from the one behind its name: ticks since the boot


class StartTimes:
    """Seconds by phase. The first phase begins with the process itself, so that interpreter and imports count."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun = time.monotonic() - process_age()

    @property
    def total(self) -> float:
        """Seconds of all phases that have ended."""
        return sum(self.seconds.values())

    def end(self, phase: str, compiling: float = 0.0) -> None:
        """Say what the time since the last call, or since the process began, was spent on.

        `compiling`: seconds of it that went by in waiting for kernels, which count as those of `KERNELS`.
        """
        now = time.monotonic()
        for name, seconds in ((phase, now - self._begun - compiling), (KERNELS, compiling)):
            if name == phase or seconds:
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._begun = now


def process_age() -> float:
    """Seconds since this process was started; 0 where the kernel does not say."""
    try:
        started = int(_OWN_STATE.read_text().rpartition(")")[2].split()[_STARTED])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return max(age, 0.0)


NO_CEILING = Roofline()

log = logging.getLogger(__name__)


def worker_ready(
    geometry: Geometry,
    models: LoadedModels,
    executor: Executor,
    chunk: ChunkSize,
    ceiling: Roofline = NO_CEILING,
    costs: StepCosts = NO_COSTS,
) -> WorkerReady:
    """What the scheduler needs to know."""
    return WorkerReady(
        num_slots=geometry.num_slots,
        num_pages=geometry.num_pages,
        page_size=geometry.page_size,
        max_len=geometry.max_len,
        width=geometry.width,
        max_depth=MAX_DEPTH,
        key_lookahead=models.method.key_lookahead,
        vocab_size=models.target.vocab_size,
        chunk_tokens=chunk.tokens,
        chunk_pairs=chunk.pairs,
        prefill_costs=chunk.costs,
        step_costs=costs,
        max_deferred=0 if executor.is_self_drafting else geometry.max_deferred,
        roofline=ceiling,
        is_self_drafting=executor.is_self_drafting,
        method=models.method.name,
        num_steps=_num_steps(geometry, executor),
        step_widths=geometry.step_widths,
        two_parts=geometry.two_parts,
        state_chunk=CHUNK if models.target.kv_shape.state.num_layers else 0,
        num_snapshots=geometry.num_snapshots,
        snapshot_bytes=models.target.kv_shape.state.bytes_per_state(geometry.dtype),
        extensions=tuple(each for ready in executor.hooks.ready for each in ready()),
    )


def _num_steps(geometry: Geometry, executor: Executor) -> int:
    """Guesses in a row that a window has; of a tree, its levels."""
    tree = executor.decode_step.method.tree
    return geometry.width - 1 if tree is None else min(tree.num_levels, geometry.width - 1)


def device_name(device: str) -> str:
    """The device's name for reports."""
    return torch.cuda.get_device_name() if device == "cuda" else device


@dataclass(frozen=True)
class StartFigures:
    """What the start has captured and measured. `graph_bytes`: of a GPU's memory; `seconds`: what its parts took."""

    captures: Captures
    graph_bytes: int
    chunk: ChunkSize
    ceiling: Roofline
    seconds: dict[str, float]


def _facts(settings: Settings, geometry: Geometry, models: LoadedModels, started: StartFigures) -> WorkerFacts:
    """What the start table and `/server_info` show."""
    profile, formats = models.proposer.profile, weight_formats(settings, models)
    return WorkerFacts(
        device=device_name(settings.model.device),
        num_pages=geometry.num_pages - 1,
        page_size=geometry.page_size,
        num_slots=geometry.num_slots,
        chunk_tokens=started.chunk.tokens,
        platform=_platform_facts(settings, models, started.graph_bytes),
        graph_batch_sizes=settings.graph_batch_sizes,
        graph_counts=dict(started.captures.counts),
        graph_s=dict(started.captures.seconds),
        step_widths=geometry.step_widths,
        start_s=started.seconds,
        bytes_per_s=started.ceiling.bytes_per_s,
        flop_per_s=started.ceiling.flop_per_s,
        verification=_verification_fact(settings.spec, models),
        acceptance=synthetic_acceptance(means) if (means := settings.spec.simulated_accept_lens) else "real",
        logit_processor=settings.logit_processor or "none",
        weight_format=formats[0],
        draft_weight_format=formats[1],
        weight_bytes=models.target.num_bytes + profile.num_bytes,
        draft_weight_bytes=profile.num_bytes,
        kv_bytes_per_token=bytes_per_token(models, geometry.cache_dtype),
        draft_kv_bytes_per_token=profile.kv_shape.bytes_per_token(geometry.cache_dtype),
        state_bytes_per_request=models.target.kv_shape.bytes_per_slot(geometry.width, geometry.dtype),
        num_snapshots=geometry.num_snapshots,
        snapshot_bytes=models.target.kv_shape.state.bytes_per_state(geometry.dtype),
    )


def _platform_facts(settings: Settings, models: LoadedModels, graph_bytes: int) -> CpuFacts | CudaFacts:
    if settings.model.device == "cuda":
        return memory_facts(demand_of(settings, models), graph_bytes)
    return CpuFacts(processor_name(), num_cores(), torch.get_num_threads(), waiting_fact(), models.linears)


def _verification_fact(spec: SpecSettings, models: LoadedModels) -> str:
    """How guesses are judged; the log states it where that changes the answers."""
    if spec.width == 1:
        return "none"
    said = models.method.verification(spec.accept).describe(spec.accept)
    if said.endswith(LOSSY):
        log.warning("verification: %s", said)
    return said


async def main(context: ActorContext, compilers: ProcessPoolExecutor | None = None) -> None:
    """Load, warm up, report, and work until Shutdown. Blocks its event loop, which has nothing else to do.

    `compilers`: processes for `precompile`, if they were started ahead.
    """
    times = StartTimes()
    times.end("imports")
    inbox = bound_inbox(context)
    with taking_part(context) as ranks:
        executor = _start(context, ranks, inbox, times, compilers)
        results: Outlet[ToScheduler] = context.step_outlet("scheduler") if ranks.is_first else Silent()
        worker = Worker(executor, inbox, results, SpinPolicy(context.settings.spin_s), context.trace)
        worker.report_alive = context.report_alive
        worker.run()
        executor.close()


def bound_inbox(context: ActorContext) -> PlanInbox:
    """Where this rank reads. Raises: ConfigError naming a socket that is taken."""
    try:
        inbox: PlanInbox = context.step_inbox(features.link(ToWorker, context.settings.features))
    except (OSError, zmq.ZMQError) as error:
        path = context.endpoints.steps(context.role) if isinstance(error, OSError) else "of ZeroMQ"
        raise ConfigError("tp_size", f"rank {rank_of(context.role)} cannot bind its socket {path}: {error}") from None
    return inbox


def _start(
    context: ActorContext,
    ranks: Ranks,
    inbox: PlanInbox,
    times: StartTimes,
    compilers: ProcessPoolExecutor | None,
) -> Executor:
    """Load, warm up and report. Returns what runs steps."""
    settings = context.settings
    loading = partial(context.progress, "loading weights")
    executor, geometry, models = build(settings, loading, measured=True, ranks=ranks)
    times.end("weights and caches")
    try:
        captures, graph_bytes = prepare(
            settings, executor, geometry, context.progress, times.end, compilers, ranks.agreement
        )
    except NotFinite:
        raise CheckpointError(_not_finite(settings, models, geometry)) from None
    own = _rank_facts(settings, geometry, models, ranks)
    if not ranks.is_first:
        follow(executor, inbox)
        executor.decode_step.forget()
        ranks.agreement.gathered("ready", own, RankFacts)
        context.ready(own)
        return executor
    with leading(executor, context):
        measured = start_costs(settings, executor, geometry)
    ceiling = roofline(
        models, geometry.dtype, torch.device(settings.model.device), measured.ceiling, geometry.cache_dtype
    )
    executor.decode_step.forget()  # the tokens of the warm-up
    times.end("step times")
    all_ranks = tuple(ranks.agreement.gathered("ready", own, RankFacts))
    ready = worker_ready(geometry, models, executor, measured.chunk, ceiling, measured.steps)
    context.outlet("scheduler").send(ready)
    started = StartFigures(captures, graph_bytes, measured.chunk, ceiling, times.seconds)
    context.ready(replace(_facts(settings, geometry, models, started), ranks=all_ranks))
    return executor


def _rank_facts(settings: Settings, geometry: Geometry, models: LoadedModels, ranks: Ranks) -> RankFacts:
    """What this rank holds."""
    kv_bytes = geometry.num_pages * geometry.page_size * bytes_per_token(models, geometry.cache_dtype)
    weight_bytes = models.target.num_bytes + models.proposer.profile.num_bytes
    return RankFacts(ranks.rank.rank, device_name(settings.model.device), weight_bytes, kv_bytes)


def _not_finite(settings: Settings, models: LoadedModels, geometry: Geometry) -> str:
    part = first_not_finite(models.target, geometry.page_size)
    return (
        f"{settings.model.files.weights}: the logits of a prompt at the start are NaN or infinite; hidden states are so"
        f" from {part} on, in {settings.model.dtype}: weights or values of config.json are not this model's, or exceed"
        " that type's range"
    )
