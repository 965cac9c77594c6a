"""The parts of a step as CUDA graphs: what a part launches is recorded once and replayed.

A step is three graphs, in the order of its parts. Tokens leave between the second and the third, so that an ordinary
event tells the host that they are out; one captured event could not tell replay N from N + 1:

    input -> | layers | judge, of the step's kind of sampling | published -> pinned, event | draft |

`judge` and `draft` read what `layers` left at fixed addresses, so all kinds of sampling share the layers, and all kinds
that a draft does not tell apart share the draft. Everything is on one stream: the copy into the input for step N + 1
runs after step N, and so does whatever overwrites its output.

There are hundreds of graphs, all captured before the engine is ready: a capture takes some three milliseconds, and one
while requests are served might take memory of the device.

A capture is relaxed: kernels are loaded, and in a first start waited for, when it comes to them. What all launches of
a kernel share, counters and the like, may not be made in one (`made_before`): it is given up, the step is run with that
kind of sampling, and the capture is made again. Before a capture a part is run only where the same is launched
operation by operation later, for the memory that this takes (`FirstRuns`), without layers that are alike.
"""

import gc
import logging
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from overlap_spec_kernels import NotMadeError, made_before

from overlap_spec.models.layers.layer_run import skipping_layers
from overlap_spec.sampling.context import COMMON_WORK, EVERY_WORK, GREEDY_WORK, SAMPLING_WORK, SamplingWork
from overlap_spec.worker.step import NO_MARKS, GraphMarks, ProfileMarks

FIRST_RUNS = "first runs"  # what they took, among the seconds of captures

log = logging.getLogger(__name__)

Replay = Callable[[], None]
Forwarded = TypeVar("Forwarded")  # what the layers leave for the other parts
Judged = TypeVar("Judged")  # what is decided and published
Result = TypeVar("Result")


class GraphRecorder(Protocol):
    """Makes a graph of what a function launches. `counts`: how many there are, by part; `seconds`: what they took.

    `seconds` also has what `FIRST_RUNS` took.
    """

    counts: Counter[str]
    seconds: dict[str, float]

    def record(self, part: str, work: Callable[[], Result]) -> tuple[Replay, Result]:
        """Returns what replays it, and the result, which every replay writes anew. `part` names the graph."""

    def finish(self) -> None:
        """Wait for what was launched. Nothing is being recorded."""


class CudaRecorder:
    """CUDA graphs in one pool of memory, as they run one after another.

    A capture neither waits for the device nor gives memory back, as `torch.cuda.graph` does before each.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._given_up: list[torch.cuda.CUDAGraph] = []  # they keep the pool while no other graph has memory there
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)

    def record(self, part: str, work: Callable[[], Result]) -> tuple[Replay, Result]:
        graph, begun = torch.cuda.CUDAGraph(), time.perf_counter()
        with torch.cuda.stream(self._stream), made_before():
            graph.capture_begin(self._pool, capture_error_mode="relaxed")
            try:
                result = work()
            except NotMadeError:
                self._given_up.append(graph)
                raise
            finally:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # it was given up at once
                    graph.capture_end()
        self.counts[part] += 1
        self.seconds[part] += time.perf_counter() - begun
        return graph.replay, result

    def finish(self) -> None:
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Parts(Generic[Forwarded, Judged]):
    """The parts of one step on one input, operation by operation.

    `draft`: proposes windows of `width`, those of `narrower` other ones; None where there is nothing to draft.
    `draft_work`: what of a kind of sampling a draft takes. `absorb`: the part of `draft` that is the same in all kinds,
    and what takes its place where nothing is proposed.
    """

    forward: Callable[[], Forwarded]
    judge: Callable[[Forwarded, SamplingWork], Judged]
    draft: Callable[[Forwarded, SamplingWork], None] | None
    width: int
    draft_work: Callable[[SamplingWork], SamplingWork]
    marks: ProfileMarks = NO_MARKS
    narrower: tuple[tuple[int, Callable[[Forwarded, SamplingWork], None]], ...] = ()
    absorb: Callable[[Forwarded], object] | None = None


@dataclass(frozen=True)
class FirstRuns:
    """The kinds of sampling in which parts are run before they are captured, or to find kernels, without alike layers.

    The layers and what is absorbed always are.
    """

    judge: tuple[SamplingWork, ...] = SAMPLING_WORK
    draft: tuple[SamplingWork, ...] = SAMPLING_WORK


EVERY_KIND = FirstRuns()
LEAST_AND_MOST = FirstRuns((GREEDY_WORK, EVERY_WORK), (GREEDY_WORK, EVERY_WORK))
ANY_KIND = FirstRuns((GREEDY_WORK,), ())  # where every kind has been run on as many tokens to draw
NO_RUN = None


@dataclass(frozen=True)
class KindGraphs(Generic[Judged]):
    """What a step replays after its layers, by its kind of sampling."""

    judged: Judged  # fixed addresses, to be read before anything else is replayed
    judge: Replay
    mark: Replay  # tells the marks that they are replayed


@dataclass(frozen=True)
class PartGraphs(Generic[Forwarded, Judged]):
    """The parts of one step, captured: layers, kinds of sampling, and drafts, by width of what they propose, too."""

    layers: Replay
    forwarded: Forwarded
    kinds: dict[SamplingWork, KindGraphs[Judged]]
    drafts: dict[tuple[int, SamplingWork], Replay]


def capture_parts(
    parts: Parts[Forwarded, Judged],
    recorder: GraphRecorder,
    run: FirstRuns | None = EVERY_KIND,
    captured: Sequence[SamplingWork] = (),
) -> PartGraphs[Forwarded, Judged]:
    """Run parts once, in the kinds of sampling of `run` if there are any; then capture them.

    `captured`: the kinds that are captured; (): every one.

    Raises: NotMadeError if a capture comes to what running the step with its kind does not make.
    """
    _run_first(parts, recorder, run)
    layers, forwarded = _record(parts, recorder, "layers", parts.forward)
    kinds: dict[SamplingWork, KindGraphs[Judged]] = {}
    drafts: dict[SamplingWork, tuple[Replay, GraphMarks]] = {}
    for kind in captured or SAMPLING_WORK:
        judge, judged = _record(parts, recorder, "judge", partial(parts.judge, forwarded, kind), kind)
        marks, work = parts.marks.captured(), parts.draft_work(kind)
        if work not in drafts:
            drafts[work] = _capture_draft(parts, forwarded, kind, recorder)
        kinds[kind] = KindGraphs(judged, judge, partial(parts.marks.replayed, (*marks, *drafts[work][1])))
    works = {(parts.width, kind): parts.draft_work(kind) for kind in SAMPLING_WORK}
    shared = {key: drafts[work][0] for key, work in works.items() if work in drafts}
    return PartGraphs(layers, forwarded, kinds, shared | _capture_narrower(parts, forwarded, recorder))


def capture_layers(
    parts: Parts[Forwarded, Judged], recorder: GraphRecorder, name: str, run: FirstRuns | None
) -> tuple[Replay, Forwarded]:
    """The same, of the layers alone: the other parts are launched operation by operation."""
    _run_first(parts, recorder, run)
    return _record(parts, recorder, name, parts.forward)


def _record(
    parts: Parts[Forwarded, Judged],
    recorder: GraphRecorder,
    name: str,
    work: Callable[[], Result],
    *kinds: SamplingWork,
) -> tuple[Replay, Result]:
    """Capture one part. If it comes to what was not made before, run the step with these kinds, and again."""
    try:
        return recorder.record(name, work)
    except NotMadeError as error:
        log.debug("a capture is made again: %s had to be made", error)
    parts.marks.captured()
    _run_first(parts, recorder, FirstRuns(kinds, kinds))
    return recorder.record(name, work)


def _run_first(parts: Parts[Forwarded, Judged], recorder: GraphRecorder, runs: FirstRuns | None) -> None:
    """Launch parts and do not wait: the device works while the next capture is made, which launches nothing."""
    if runs is NO_RUN:
        return
    begun = time.perf_counter()
    with skipping_layers():
        run_once(parts, runs)
    recorder.seconds[FIRST_RUNS] = recorder.seconds.get(FIRST_RUNS, 0.0) + time.perf_counter() - begun


def run_once(parts: Parts[Forwarded, Judged], runs: FirstRuns = EVERY_KIND) -> None:
    """Launch what a step of each of these kinds of sampling launches."""
    forwarded = parts.forward()
    for kind in runs.judge:
        parts.judge(forwarded, kind)
    if parts.draft is not None:
        for kind in dict.fromkeys(map(parts.draft_work, runs.draft)):
            for draft in (parts.draft, *(narrower for _, narrower in parts.narrower)):
                draft(forwarded, kind)
    if parts.absorb is not None:
        parts.absorb(forwarded)


def _capture_draft(
    parts: Parts[Forwarded, Judged], forwarded: Forwarded, kind: SamplingWork, recorder: GraphRecorder
) -> tuple[Replay, GraphMarks]:
    if parts.draft is None:
        return _nothing, ()
    draft, _ = _record(parts, recorder, "draft", partial(parts.draft, forwarded, parts.draft_work(kind)), kind)
    return draft, parts.marks.captured()


def _capture_narrower(
    parts: Parts[Forwarded, Judged], forwarded: Forwarded, recorder: GraphRecorder
) -> dict[tuple[int, SamplingWork], Replay]:
    """Of the kinds of sampling that most requests ask for. A draft that proposes nothing is one for every kind."""
    replays: dict[tuple[int, SamplingWork], Replay] = {}
    for width, draft in parts.narrower:
        for kind in COMMON_WORK if width > 1 else SAMPLING_WORK:
            work = parts.draft_work(kind) if width > 1 else GREEDY_WORK
            if (width, work) not in replays:
                replays[width, work], _ = _record(parts, recorder, "draft", partial(draft, forwarded, work), kind)
            replays[width, kind] = replays[width, work]
    return replays


def _nothing() -> None:
    """The replay of a part that launches nothing."""


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection while a capture is under way: freeing a graph or an event would invalidate it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
