"""What the worker measures before it is ready: how long prompts and steps take, and what the device could do.

That takes seconds, so they are kept for the next start with the same model, settings and machine. On a GPU, where the
clock may differ from start to start, the next start times two steps again; if they differ, all of it.
"""

import hashlib
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import msgspec
import overlap_spec_kernels
import torch

from overlap_spec.config import Settings
from overlap_spec.messages import StepCosts
from overlap_spec.metrics.step_floor import Ceiling
from overlap_spec.runtime.measured import once
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.prefill_graphs import FINER_ROWS, ROWS, captured_rows
from overlap_spec.worker.sizing.costs import ceiling_of
from overlap_spec.worker.sizing.geometry import Geometry
from overlap_spec.worker.sizing.step_times import (
    ChunkSize,
    measure_chunk,
    measure_prefill,
    measure_steps,
    measured_again,
)

NO_COSTS = StepCosts()
KEPT = "start-costs"  # another name wherever `StartCosts` tells more than before
AGREEING = 1.15  # times that a step may take of what is kept, or the reverse


@dataclass(frozen=True)
class StartCosts:
    """What the scheduler is told about the time that steps take."""

    chunk: ChunkSize
    steps: StepCosts
    ceiling: Ceiling


def start_costs(settings: Settings, executor: Executor, geometry: Geometry) -> StartCosts:
    """Read the costs that an earlier start has kept, or measure them. Call it after `warm_up`, nothing in flight."""
    of, on_cpu = what_they_depend_on(settings), settings.model.device == "cpu"

    def holds(kept: StartCosts) -> bool:
        return on_cpu or not kept.steps.seconds or measured_again(executor, geometry, kept.steps) < AGREEING

    return once(KEPT, of, StartCosts, lambda: _measure(settings, executor, geometry), holds, on_cpu)


def what_they_depend_on(settings: Settings) -> object:
    """Every setting that the time of a step may depend on; some others are among them."""
    model, spec = settings.model, msgspec.structs.replace(settings.spec, draft_path=None)
    sizes = (model.dtype, model.max_len, settings.cache.page_size, settings.num_threads)
    of = model.files.config, sizes, spec, settings.scheduler, settings.attention, _kernels()
    captured = settings.graph_batch_sizes, ROWS, FINER_ROWS
    return of if model.device == "cpu" else (*of, captured, _device_and_compilers())


def _kernels() -> str:
    """A digest of their sources."""
    package = Path(overlap_spec_kernels.__file__).parent
    sources = (path for kind in ("py", "cu", "cuh", "cpp", "h") for path in sorted(package.rglob(f"*.{kind}")))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _device_and_compilers() -> tuple[str, ...]:
    """The GPU, and what makes kernels for it."""
    return torch.cuda.get_device_name(), *(version(name) for name in ("torch", "triton") if find_spec(name))


def _measure(settings: Settings, executor: Executor, geometry: Geometry) -> StartCosts:
    on_cpu, scheduler = settings.model.device == "cpu", settings.scheduler
    chunk = ChunkSize(geometry.max_chunk, 0)
    if not on_cpu and scheduler.max_gap_s is not None:
        most_rows = min(geometry.max_len, geometry.max_chunk)
        rows = captured_rows(most_rows, geometry.batch_rows) if settings.graph_batch_sizes else ()
        chunk = ChunkSize(chunk.tokens, 0, measure_prefill(executor, geometry, rows))
    elif on_cpu and scheduler.chunk_tokens is None:
        chunk = measure_chunk(executor, geometry)
    elif on_cpu and (scheduler.chunk_tokens != -1 or scheduler.max_gap_s is not None):
        chunk = replace(chunk, costs=measure_chunk(executor, geometry).costs)
    ruled = bool(scheduler.width_rules) or scheduler.keeps_width  # in both cases the costs are not used
    steps = NO_COSTS if ruled else measure_steps(executor, geometry, settings.graph_batch_sizes)
    return StartCosts(chunk, steps, ceiling_of(torch.device(settings.model.device), geometry.dtype))
