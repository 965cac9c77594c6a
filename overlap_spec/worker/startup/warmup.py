"""Runs every kind of step once, and captures what is replayed, before the engine reports ready.

Where a start finds no kernels, those of every step are found first, without a launch, and compiled many at once. One
after another they take most of a minute. Warming up and captures do not wait for all of them: they launch the same in
the same order, so each launch waits for its own kernel at most. Where kernels lie in Triton's cache already, this would
only cost: a stamp beside them states that. It names the kernels' sources and whatever else decides which of them are
compiled, and how.

Where a target's hidden states become NaN or infinite is named in the error that ends a start. One row is run again with
the output of every layer kept, which costs nothing unless something is wrong.
"""

import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from overlap_spec_kernels import compiling_together
from torch import Tensor

from overlap_spec.config import Settings
from overlap_spec.messages import NO_TOKEN, SamplingParams, StepPlan
from overlap_spec.models.interfaces import LoadedTarget, RowBatch, StateRows
from overlap_spec.models.kv_cache import KVCache, SlotSizes
from overlap_spec.models.layers.layer_run import skipping_layers
from overlap_spec.worker.capture import CudaRecorder, GraphRecorder
from overlap_spec.worker.compilers import STAMPED, compilers
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.graphs import GraphRunner, GraphSizes, Reach
from overlap_spec.worker.inputs import Step
from overlap_spec.worker.ranks import ALONE, Agreement
from overlap_spec.worker.runner import Runner
from overlap_spec.worker.startup.geometry import Geometry
from overlap_spec.worker.startup.memory_budget import free_bytes
from overlap_spec.worker.startup.start_costs import what_they_depend_on
from overlap_spec.worker.startup.step_times import (
    GREEDY,
    PROBE_TOKENS,
    asking,
    prefill_all_plan,
    prefill_plan,
    run,
    run_all,
)
from overlap_spec.worker.step import FINER_BELOW, captured_shapes

KERNELS = "kernels"  # the phase of a start that compiles them
DRAWN_ROWS = range(64, 641)  # of captured steps with output: up to 512 tokens, and the last chunk of its prompt
FEW_TOKENS = 16  # in the prompts that warm up a CPU: nothing is compiled there
SMALL_STEP = 2048  # rows; tensors of larger steps fit into the memory that the longest step has left

SAMPLED = SamplingParams(temperature=1.0, seed=0)
FILTERED = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, min_new_tokens=1, seed=0)


class NotFinite(Exception):
    """The target's logits are NaN or infinite. `first_not_finite` finds out where they become so."""


def prepare(
    settings: Settings,
    executor: Executor,
    geometry: Geometry,
    say: Callable[[str, int, int], None],
    ended: Callable[[str, float], None] = lambda phase, compiling: None,
    started: ProcessPoolExecutor | None = None,
    agreement: Agreement = ALONE,
) -> "tuple[Captures, int]":
    """Compile, warm up, capture. Also returns what captures and the steps beside them take of a GPU's memory.

    `say`: is told what begins; `ended`: a phase, with the seconds of it that went by in waiting for kernels.
    Raises: NotFinite.
    """
    batch_sizes = settings.graph_batch_sizes
    if settings.model.device == "cpu":
        say("warming up", 0, 0)
        warm_up(executor, geometry, (), FEW_TOKENS)
        ended("warm-up", 0.0)
        return capture_graphs(executor, geometry, ()), 0
    say("compiling kernels", 0, 0)
    with precompiling(settings, executor, geometry, started, agreement) as compiling:
        ended(KERNELS, 0.0)
        say("warming up", 0, 0)
        warm_up(executor, geometry, cuda_prompt_lengths(geometry), decodes=not batch_sizes)
        ended("warm-up", compiling())
        free = free_bytes("cuda")
        if batch_sizes:
            say("capturing CUDA graphs", 0, 0)
        captures = capture_graphs(executor, geometry, batch_sizes)
        if batch_sizes:
            ended("CUDA graphs", compiling())
            run_uncaptured(executor, geometry)
            ended("long steps", compiling())
        taken = free - free_bytes("cuda")
    ended(KERNELS, 0.0)
    return captures, taken


def warm_up(
    executor: Executor,
    geometry: Geometry,
    prompt_lengths: tuple[int, ...] = (PROBE_TOKENS,),
    num_tokens: int = PROBE_TOKENS,
    decodes: bool = True,
) -> None:
    """Prefill and decode once in each variant: greedy, sampled, with everything; on CUDA at every width.

    `prompt_lengths`: greedy prompts that are run before, without layers that are alike. `num_tokens`: the length of the
    prompts of the variants. `decodes`: False where `capture_graphs` follows, which runs every decode step once.
    Raises: NotFinite if the target's logits after a prompt of a variant are NaN or infinite.
    """
    lengths = (min(length, geometry.max_len - 1) for length in prompt_lengths)
    with skipping_layers():
        run_all(executor, (prefill_plan(geometry, GREEDY, 0, length) for length in lengths))
    for sampling in (GREEDY, SAMPLED, _everything(executor)):
        _run_prompt(executor, geometry, sampling, num_tokens)
        if decodes:
            _warm_up_decoding(executor, geometry, sampling)
    for warm_up_hook in executor.hooks.warm_up:
        warm_up_hook()


def _everything(executor: Executor) -> SamplingParams:
    """A request that asks for all that there is: compiles the kernels of every other kind of sampling too."""
    asked = msgspec.structs.replace(FILTERED, **executor.hooks.warms_up)
    return asking(executor.slots.outputs, asked)


def _run_prompt(executor: Executor, geometry: Geometry, sampling: SamplingParams, num_tokens: int) -> None:
    plan = prefill_plan(geometry, sampling, 0, min(num_tokens, geometry.max_len - 1), executor.slots.outputs)
    if any(NO_TOKEN in run for run in executor.launch(plan).wait().tokens):
        raise NotFinite


def _warm_up_decoding(executor: Executor, geometry: Geometry, sampling: SamplingParams) -> None:
    for _ in range(2):
        run(executor, StepPlan(0, geometry.width, [0]))
    for width in geometry.narrower if executor.slots.length.is_cuda else ():  # a CPU compiles nothing
        run(executor, prefill_plan(geometry, sampling, start=0, num_tokens=1))
        run(executor, StepPlan(0, width, [0]))
        run(executor, StepPlan(0, geometry.width, [0]))  # after width 1 the draft catches up


def cuda_prompt_lengths(geometry: Geometry) -> tuple[int, ...]:
    """Prompt chunks that between them meet every attention tile and number of splits, and need the most memory."""
    return (1, 6, 16, PROBE_TOKENS, *range(256, 1025, 128), geometry.max_chunk)


@dataclass(frozen=True)
class Captures:
    """What runs steps, captured; by the part of a step, how many graphs there are and how long they took."""

    runner: Runner
    counts: Counter[str]
    seconds: dict[str, float]


def capture_graphs(
    executor: Executor,
    geometry: Geometry,
    batch_sizes: tuple[int, ...],
    make_recorder: Callable[[], GraphRecorder] = CudaRecorder,
) -> Captures:
    """Let decode and short prefill steps run as CUDA graphs from now on. Nothing may be in flight."""
    if not batch_sizes:
        return Captures(executor.eager, Counter(), {})
    runner, recorder = graph_runner(executor, graph_sizes(executor, geometry, batch_sizes)), make_recorder()
    runner.capture(recorder)
    executor.use(runner)
    return Captures(runner, recorder.counts, recorder.seconds)


def graph_runner(executor: Executor, sizes: GraphSizes) -> GraphRunner:
    """What replays steps of these sizes, not captured yet."""
    return GraphRunner(executor.eager, executor.decode_step.method, executor.slots, sizes)


def graph_sizes(executor: Executor, geometry: Geometry, batch_sizes: tuple[int, ...]) -> GraphSizes:
    """What an engine captures. `batch_sizes`: of decode steps."""
    step, slots, widths = executor.decode_step, executor.slots, geometry.step_widths
    most_rows, reads_last = min(geometry.max_len, geometry.max_chunk), executor.prefill_step.reads_last
    prompts = captured_shapes(most_rows, geometry.batch_rows, geometry.num_slots, reads_last)
    drawn = [replace(each, are_drawn=True) for each in prompts if geometry.has_drawn and each.max_rows in DRAWN_ROWS]
    return GraphSizes(
        width=slots.width,
        reach=Reach(slots.num_pages, slots.width, step.page_size, step.method.tree is not None),
        batches=tuple(sorted(batch_sizes)),
        widths=widths,
        largest=geometry.largest,
        hides_rare=geometry.batch_rows < FINER_BELOW,
        absorbs_later=widths[0] == 1 < slots.width and not executor.is_self_drafting,
        prompts=(*drawn, *prompts),
        beside=geometry.two_parts,
        reads_last=reads_last,
        placed=() if executor.eager.placed is None else geometry.placed_batches,
    )


def run_uncaptured(executor: Executor, geometry: Geometry) -> None:
    """Run steps that no graph holds, so that they take no memory later. Call it after `capture_graphs`.

    Steps of many sizes, because small tensors and large ones lie in memory of their own.
    """
    with skipping_layers():
        run_all(executor, _every_kind(executor, geometry))
        run_all(executor, (plan for plan in _every_size(geometry) if not _is_captured(executor, plan)))


def _is_captured(executor: Executor, plan: StepPlan) -> bool:
    """Whether a graph holds this step of prompts."""
    shape = executor.runner.shape_for(Step(plan, ()).exact(executor.slots.num_pages), lambda: 0)
    return shape is not None and executor.runner.replays(shape)


def _every_kind(executor: Executor, geometry: Geometry) -> Iterator[StepPlan]:
    """The longest prompt, and as many as there can be: once as long as they can be, whose attention is not split."""
    slots, longest = _together(geometry), min(geometry.max_chunk, geometry.max_len - 1)
    everything, outputs = _everything(executor), executor.slots.outputs
    yield prefill_plan(geometry, everything, 0, longest, outputs)
    yield prefill_all_plan(geometry, GREEDY, slots, min(geometry.max_chunk // len(slots), longest), all_pages=True)
    for sampling in (SAMPLED, everything):
        yield prefill_all_plan(geometry, sampling, slots, 1)
    for width in geometry.narrower:  # graphs propose whole windows; masks of narrower ones are other rows to attend
        for prompts in (range(1), slots):
            yield prefill_all_plan(geometry, GREEDY, prompts, 1, width=width)


def _every_size(geometry: Geometry) -> Iterator[StepPlan]:
    """Prompts together and alone, up to the size from which on tensors fit into the memory of the longest prompt's."""
    slots, longest = _together(geometry), min(geometry.max_chunk, geometry.max_len - 1)
    for num_tokens in _growing(1, min(longest, min(SMALL_STEP, geometry.max_chunk) // len(slots))):
        yield prefill_all_plan(geometry, GREEDY, slots, num_tokens)
    for num_tokens in _growing(PROBE_TOKENS, min(longest, SMALL_STEP)):
        yield prefill_plan(geometry, GREEDY, start=0, num_tokens=num_tokens)


def _together(geometry: Geometry) -> range:
    """The slots whose prompts one step can hold."""
    return range(min(geometry.num_slots, geometry.max_chunk))


def _growing(first: int, last: int) -> Iterator[int]:
    """Up to `last`, each a quarter more than the one before."""
    while first <= last:
        yield first
        first += max(first // 4, 1)


log = logging.getLogger(__name__)


@contextlib.contextmanager
def precompiling(
    settings: Settings,
    executor: Executor,
    geometry: Geometry,
    started: ProcessPoolExecutor | None = None,
    agreement: Agreement = ALONE,
) -> Iterator[Callable[[], float]]:
    """In this block run `warm_up`, `capture_graphs` and `run_uncaptured`: what they launch is compiled, many at once.

    Nothing is compiled if an earlier start has done so. Only for a GPU. Yields what tells for how many seconds launches
    have waited for kernels since it was last asked.

    Whatever goes wrong in finding kernels, the start goes on: what is not found is compiled when it is launched. That
    is not so for one of several ranks, as the others would wait for it. `started`: processes that were started ahead
    (`started_compilers`); they end with the block.
    """
    stamp = _stamp(settings, geometry)
    is_compiled = agreement.of_first("compiled", stamp.exists, bool)
    if is_compiled or settings.compile_max_batch:  # torch.compile wants to see the operations themselves
        if started is not None:
            started.shutdown(wait=False, cancel_futures=True)
        yield float
        return
    with compiling_together(started or compilers()) as compilations:
        found = False
        try:
            with compilations.finding():
                _launch_everything(settings, executor, geometry)
            found = True
        except Exception:
            if agreement.ranks > 1:
                raise
            log.warning("not all kernels were found, so some are compiled one after another", exc_info=True)
        yield compilations.waited
    if found:
        with contextlib.suppress(OSError):
            stamp.touch()


def _launch_everything(settings: Settings, executor: Executor, geometry: Geometry) -> None:
    """What a start launches, in the order in which it does."""
    batch_sizes = settings.graph_batch_sizes
    warm_up(executor, geometry, cuda_prompt_lengths(geometry), decodes=not batch_sizes)
    if batch_sizes:
        graph_runner(executor, graph_sizes(executor, geometry, batch_sizes)).run_once()
        run_uncaptured(executor, geometry)


def _stamp(settings: Settings, geometry: Geometry) -> Path:
    """In Triton's cache: who empties it takes the stamp too."""
    import triton

    key = hashlib.sha256(msgspec.json.encode(what_they_depend_on(settings, geometry))).hexdigest()[:16]
    return Path(triton.knobs.cache.dir) / f"{STAMPED}{key}"


TOKEN = 1  # what the prompts of the warm-up are made of


def first_not_finite(target: LoadedTarget, page_size: int) -> str:
    """The first part of the target whose output is not finite. Sync: waits for the device."""
    device, dtype = target.embedding.device, target.embedding.dtype
    cache = KVCache.allocate(target.kv_shape, 1, page_size, dtype, device, slots=SlotSizes(1, 1, dtype))
    place = torch.zeros(1, dtype=torch.int64, device=device)
    rows = RowBatch(place, None, place.int()[None], None, 1, True, state=StateRows(place, are_final=False))
    rows = rows.placed(page_size)
    with torch.inference_mode():
        model = target.attach(cache, page_size, tuple(range(target.num_layers)))
        tokens = torch.full_like(place, TOKEN)
        output = model.forward(tokens, rows)
        if not _is_finite(model.embed(tokens)):
            return "the embedding (embed_tokens)"
        for layer, hidden in enumerate(output.aux.chunk(target.num_layers, dim=1)):
            if not _is_finite(hidden):
                return f"layer {layer} of 0 to {target.num_layers - 1}"
        if not _is_finite(output.hidden):
            return "the final norm"
        return "the head (lm_head)" if not _is_finite(model.logits(output.hidden).compute()) else "no layer, run alone"


def _is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())
