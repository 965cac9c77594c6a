"""What the worker measures before it is ready: how long prompts and steps take, and what the device could do.

On a CPU they take seconds, so they are kept for the next start with the same model, settings and machine.
"""

from dataclasses import dataclass, replace

import msgspec
import torch

from overlap_spec.config import Settings
from overlap_spec.messages import StepCosts
from overlap_spec.metrics.step_floor import Ceiling
from overlap_spec.runtime.measured import once
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.prefill_graphs import captured_rows
from overlap_spec.worker.sizing.costs import ceiling_of
from overlap_spec.worker.sizing.geometry import Geometry
from overlap_spec.worker.sizing.warmup import ChunkSize, measure_chunk, measure_prefill, measure_steps

NO_COSTS = StepCosts()
KEPT = "start"


@dataclass(frozen=True)
class StartCosts:
    """What the scheduler is told about the time that steps take."""

    chunk: ChunkSize
    steps: StepCosts
    ceiling: Ceiling


def start_costs(settings: Settings, executor: Executor, geometry: Geometry) -> StartCosts:
    """Read the costs that an earlier start has kept, or measure them. Call it after `warm_up`, nothing in flight."""
    if settings.model.device != "cpu":
        return _measure(settings, executor, geometry)
    of = what_they_depend_on(settings)
    return once(KEPT, of, StartCosts, lambda: _measure(settings, executor, geometry))


def what_they_depend_on(settings: Settings) -> object:
    """Every setting that the time of a step may depend on; some others are among them."""
    model, spec = settings.model, msgspec.structs.replace(settings.spec, draft_path=None)
    sizes = (model.dtype, model.max_len, settings.cache.page_size, settings.num_threads, settings.spin_count)
    return model.files.config, sizes, spec, settings.scheduler, settings.attention


def _measure(settings: Settings, executor: Executor, geometry: Geometry) -> StartCosts:
    on_cpu, scheduler = settings.model.device == "cpu", settings.scheduler
    chunk = ChunkSize(geometry.max_chunk, 0)
    if not on_cpu and scheduler.max_gap_s is not None:
        rows = captured_rows(min(geometry.max_len, geometry.max_chunk)) if settings.graph_batch_sizes else ()
        chunk = ChunkSize(chunk.tokens, 0, measure_prefill(executor, geometry, rows))
    elif on_cpu and scheduler.chunk_tokens is None:
        chunk = measure_chunk(executor, geometry)
    elif on_cpu and scheduler.max_gap_s is not None:
        chunk = replace(chunk, costs=measure_chunk(executor, geometry).costs)
    ruled = bool(scheduler.width_rules) or scheduler.keeps_width  # in both cases the costs are not used
    steps = NO_COSTS if ruled else measure_steps(executor, geometry, settings.graph_batch_sizes)
    return StartCosts(chunk, steps, ceiling_of(torch.device(settings.model.device), geometry.dtype))
