"""What the worker measures before it is ready: how long prompts and steps take, and what the device could do.

That takes seconds, so they are kept for the next start with the same code, model, settings and machine. On a GPU, whose
clock may differ from start to start, the next start times three steps again; if one of them takes more than `AGREEING`
times as long as before, or the reverse, everything is measured anew.

What the device could do (`messages.Roofline`) tells the scheduler how far a step is from that. A device that the table
lacks is measured once, at start: a copy for bytes, a matrix product for operations.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import overlap_spec_kernels
import torch

import overlap_spec
from overlap_spec import features
from overlap_spec.config import Settings
from overlap_spec.messages import ForwardShape, Guessing, Roofline, StepCosts
from overlap_spec.metrics.step_floor import Ceiling, known_ceiling
from overlap_spec.models.kv_cache import KVShape
from overlap_spec.models.work import ForwardWork
from overlap_spec.runtime.measured import once
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.geometry import Geometry, LoadedModels
from overlap_spec.worker.startup.step_times import ChunkSize, again, measure_chunk, measure_prefill, measure_steps
from overlap_spec.worker.step import FINER_ROWS, ROWS, captured_rows

COPY_BYTES = 128 << 20  # more than caches hold
PRODUCT_SIZE = {"cpu": 512, "cuda": 4096}
REPEATS = 4


def roofline(
    models: LoadedModels,
    dtype: torch.dtype,
    place: torch.device,
    ceiling: Ceiling | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Roofline:
    """What forwards of the models need of this device. Without `ceiling`, the device's is looked up or measured.

    `kv_dtype`: of KV pages, if not that of the models.
    """
    ceiling, kv_dtype = ceiling or ceiling_of(place, dtype), kv_dtype or dtype
    target, draft = models.target, models.proposer.profile
    tree, block = draft.tree, draft.block
    of_target = _shape(target.work, target.kv_shape, kv_dtype)
    return Roofline(
        ceiling.bytes_per_s,
        ceiling.flop_per_s,
        target=msgspec.structs.replace(of_target, state_bytes=target.kv_shape.state.bytes_per_state(dtype)),
        extend=_shape(draft.extend_work, draft.kv_shape, kv_dtype),
        draft=_shape(draft.work, draft.kv_shape, kv_dtype),
        longest=0 if tree is None else tree.num_levels + 1,
        draft_rows=draft.step_rows,
        most_guesses=0 if tree is None else tree.drafted_levels,
        guessing=Guessing.BLOCK if block else Guessing.MASKS if draft.has_masks else Guessing.STEPS,
    )


def ceiling_of(place: torch.device, dtype: torch.dtype) -> Ceiling:
    """The ceiling of a device that the table has; else it is measured."""
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else place.type
    return known_ceiling(name, str(dtype).removeprefix("torch.")) or measure_ceiling(place, dtype)


def measure_ceiling(place: torch.device, dtype: torch.dtype) -> Ceiling:
    """The best of a few copies and matrix products. Sync: waits for the device; call it before it serves."""
    source = torch.ones(COPY_BYTES // dtype.itemsize, dtype=dtype, device=place)
    copy = torch.empty_like(source)
    copy_s = _best(lambda: copy.copy_(source), place)
    size = PRODUCT_SIZE[place.type]
    matrix = torch.ones(size, size, dtype=dtype, device=place)
    product_s = _best(lambda: matrix @ matrix, place)
    return Ceiling(2 * source.nbytes / copy_s, 2 * size**3 / product_s)


def _best(work: Callable[[], object], place: torch.device) -> float:
    seconds = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        work()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])  # the first one takes memory


def _shape(work: ForwardWork, kv_shape: KVShape, dtype: torch.dtype) -> ForwardShape:
    return ForwardShape(
        work.weight_bytes, kv_shape.bytes_per_token(dtype), work.row_flop, work.head_flop, work.pair_flop
    )


NO_COSTS = StepCosts()
KEPT = "start-costs"  # another name wherever `StartCosts` tells more than before
AGREEING = 1.15  # times that a step may take of what is kept, or the reverse
CODE = ("models", "sampling", "speculative", "worker")  # of the package: what launches a step, and with what
ELSEWHERE = ("frontend.py", "scheduler.py")  # of a feature that the worker has a part of: what other processes run
SOURCES = (".py", ".cu", ".cuh", ".cpp", ".h")
COMPILERS = ("torch", "triton", "cuda-bindings")  # each brings libraries of its own version along
DRIVER = Path("/proc/driver/nvidia/version")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartCosts:
    """What the scheduler is told about the time that steps take."""

    chunk: ChunkSize
    steps: StepCosts
    ceiling: Ceiling


def start_costs(settings: Settings, executor: Executor, geometry: Geometry) -> StartCosts:
    """Read the costs that an earlier start has kept, or measure them. Call it after `warm_up`, nothing in flight."""
    of, on_cpu = what_they_depend_on(settings, geometry), settings.model.device == "cpu"

    def holds(kept: StartCosts) -> bool:
        steps = kept.steps
        if not _fits(steps, () if _ruled(settings) or not geometry.narrower else geometry.step_widths):
            log.warning("step times that were kept do not fit these widths: they are measured anew")
            return False
        return on_cpu or not steps.seconds or _is_as_before(executor, geometry, steps)

    return once(KEPT, of, StartCosts, lambda: _measure(settings, executor, geometry), holds, on_cpu)


def _fits(steps: StepCosts, widths: tuple[int, ...]) -> bool:
    """Whether every step of these widths has a time: a file that someone has changed may hold anything."""
    count, rows = len(steps.batch_sizes), [row for row in (*steps.seconds, steps.undrafted) if row]
    whole = len(steps.seconds) == count and len(steps.undrafted) in (0, count) and bool(count) == bool(widths)
    right = steps.widths == widths and all(len(row) == len(widths) for row in steps.seconds)
    return whole and right and all(min(row) > 0 for row in rows)


def _is_as_before(executor: Executor, geometry: Geometry, kept: StepCosts) -> bool:
    for size, width, ratio in again(executor, geometry, kept):
        if not 1 / AGREEING < ratio < AGREEING:
            text = "a step of %d requests and width %d takes %.2f times what was kept: all are measured anew"
            log.warning(text, size, width, ratio)
            return False
    return True


def what_they_depend_on(settings: Settings, geometry: Geometry) -> object:
    """All that the time of a step may depend on, and some settings beside. Paths are not in it: contents are."""
    model, files, cache = settings.model, settings.model.files, settings.cache
    table = (1.0,) * len(settings.spec.simulated_accept_lens)  # its size counts, not its numbers
    spec = msgspec.structs.replace(settings.spec, draft_path=None, token_map=None, simulated_accept_lens=table)
    of_files = files.config, _content(settings.spec.draft_path, "config.json"), _content(settings.spec.token_map)
    formats = model.dtype, model.keeps_integers, cache.kv_dtype, files.quantization, files.load_format
    sizes = model.max_len, cache.page_size, settings.num_threads, settings.ranks
    own = settings.logit_processor, settings.features, model.deterministic
    placed = geometry.placed_slots, geometry.placed_batches
    added = own, settings.compile_max_batch, settings.skip_tokenizer_init, placed
    of = *of_files, formats, sizes, spec, settings.scheduler, settings.attention, added, _code(settings.features)
    captured = settings.graph_batch_sizes, ROWS, FINER_ROWS
    return of if model.device == "cpu" else (*of, captured, _device_and_compilers())


def _content(path: str | None, name: str = "") -> str:
    """A digest of a file, or of one in a folder; empty without it."""
    with suppress(OSError):
        return hashlib.sha256(Path(path, name).read_bytes()).hexdigest() if path else ""
    return ""


def _code(own_features: Sequence[str]) -> str:
    """A digest of all sources that a step runs."""
    digest = hashlib.sha256()
    for source in _sources(own_features):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _sources(own_features: Sequence[str] = ()) -> Iterator[Path]:
    package = Path(overlap_spec.__file__).parent
    for folder in (Path(overlap_spec_kernels.__file__).parent, *(package / name for name in CODE)):
        yield from sorted(path for path in folder.rglob("*") if path.suffix in SOURCES)
    for module in features.modules(features.WORKER, own_features):
        of_feature = Path(str(module.__file__)).parent.glob("*.py")
        yield from sorted(path for path in of_feature if path.name not in ELSEWHERE)


def _device_and_compilers() -> tuple[str, ...]:
    """The GPU, its driver, and what makes kernels for it."""
    versions = []
    for name in COMPILERS:
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    with suppress(OSError):
        versions.append(DRIVER.read_text())
    return torch.cuda.get_device_name(), *versions


def _ruled(settings: Settings) -> bool:
    """Whether widths follow rules, or are explicit: the costs of steps are not used then."""
    return bool(settings.scheduler.width_rules) or settings.scheduler.keeps_width


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
    steps = NO_COSTS if _ruled(settings) else measure_steps(executor, geometry, settings.graph_batch_sizes)
    return StartCosts(chunk, steps, ceiling_of(torch.device(settings.model.device), geometry.dtype))
