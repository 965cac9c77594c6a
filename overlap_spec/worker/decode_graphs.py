"""Decode steps as CUDA graphs: what a step launches is recorded once and replayed.

Two graphs a step, cut where tokens leave, so that an ordinary event between them tells the host that results are out;
one captured event could not tell replay N from N + 1. Everything is on one stream: the copy of slots into a graph's
input for step N + 1 runs after step N, and so does whatever overwrites its output.

    launch:  slots -> input | verify graph | published -> pinned, event | draft graph

There is a pair for every batch size, width and kind of sampling; at width 1 there is no draft. One more graph per batch
size lets the draft catch up after steps of width 1. A graph has a fixed number of rows. A smaller batch is padded with
the dummy slot, whose page table is all page 0 and whose length is put back to 0 by every step.
"""

import bisect
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overlap_spec.sampling.types import SAMPLING_WORK, SamplingWork
from overlap_spec.worker.decode import DecodeStep
from overlap_spec.worker.profile_marks import GraphMarks
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.windows import Verified


@dataclass(frozen=True)
class CatchUpGraph:
    """One batch size, captured."""

    slots: Tensor  # [B] i64, an input
    counts: Tensor  # [B] i64, an input
    graph: torch.cuda.CUDAGraph


@dataclass(frozen=True)
class StepGraphs:
    """One batch size, width and kind of sampling, captured."""

    slots: Tensor  # [B] i64, the input
    verify: torch.cuda.CUDAGraph
    verified: Verified  # fixed addresses
    draft: Callable[[], None]
    marks: GraphMarks  # in the order of time; none unless a trace is wanted


class GraphDecoder:
    """Replays the smallest captured batch that holds the step's; what none holds is launched operation by operation."""

    def __init__(self, step: DecodeStep, slots: SlotRows, widths: Sequence[int], batch_sizes: Sequence[int]) -> None:
        self._step = step
        self._rows = slots
        self._widths = sorted(widths)
        self._sizes = sorted(batch_sizes)
        self._graphs: dict[tuple[int, int, SamplingWork], StepGraphs] = {}
        self._catch_up: dict[int, CatchUpGraph] = {}
        self._filled: dict[int, Tensor] = {}  # id of a graph's slots -> what was written into them last
        self._running: StepGraphs | None = None

    def capture(self, pool: Any) -> None:
        """Capture every batch size, width and kind of sampling, largest first, in one memory pool."""
        defers = self._widths[0] == 1 < self._rows.width and self._step.self_drafting is None
        with torch.inference_mode(), no_garbage_collection():
            for size in reversed(self._sizes):
                for width in reversed(self._widths):
                    for sampling in SAMPLING_WORK:
                        self._graphs[size, width, sampling] = self._capture(size, width, sampling, pool)
                if defers:
                    self._catch_up[size] = self._capture_catch_up(size, pool)
        torch.cuda.synchronize()

    def catch_up(self, slots: Tensor, counts: Tensor) -> None:
        """See `Decoder`."""
        captured = self._catch_up.get(self._size_for(len(slots)))
        if captured is None:
            self._step.catch_up(slots, counts)
            return
        self._fill(captured.slots, slots)
        captured.counts[: len(slots)].copy_(counts)
        captured.counts[len(slots) :].zero_()
        captured.graph.replay()

    def verify(self, slots: Tensor, width: int, sampling: SamplingWork) -> Verified:
        """See `Decoder`. The result is overwritten by the next step; its first len(slots) rows are this batch."""
        graphs = self._running = self._graphs.get((self._size_for(len(slots)), width, sampling))
        self._step.parts.replayed(() if graphs is None else graphs.marks)
        if graphs is None:
            return self._step.verify(slots, width, sampling)
        self._fill(graphs.slots, slots)
        graphs.verify.replay()
        return graphs.verified

    def draft(self, verified: Verified) -> None:
        """See `Decoder`."""
        if self._running is None:
            self._step.draft(verified)
        else:
            self._running.draft()

    def _size_for(self, num_slots: int) -> int:
        """The smallest captured batch that holds so many; 0 if there is none."""
        index = bisect.bisect_left(self._sizes, num_slots)
        return self._sizes[index] if index < len(self._sizes) else 0

    def _fill(self, held: Tensor, slots: Tensor) -> None:
        """Write a graph's slots, padded with the dummy, unless they are in it: the same object holds the same slots."""
        if self._filled.get(id(held)) is slots:
            return
        held[: len(slots)].copy_(slots)
        held[len(slots) :].fill_(self._rows.dummy)
        self._filled[id(held)] = slots

    def _dummies(self, size: int) -> Tensor:
        return torch.full((size,), self._rows.dummy, dtype=torch.int64, device=self._rows.length.device)

    def _capture(self, size: int, width: int, sampling: SamplingWork, pool: Any) -> StepGraphs:
        slots = self._dummies(size)
        self._step.draft(self._verify(slots, width, sampling))  # compiles kernels, which a capture must not
        torch.cuda.synchronize()
        verify = torch.cuda.CUDAGraph()
        with torch.cuda.graph(verify, pool=pool):
            verified = self._verify(slots, width, sampling)
        draft = self._capture_draft(verified, width, pool)
        return StepGraphs(slots, verify, verified, draft, self._step.parts.captured())

    def _capture_draft(self, verified: Verified, width: int, pool: Any) -> Callable[[], None]:
        """Returns the replay. Where there are no guesses there is nothing to launch, and nothing to capture."""
        if not self._step.drafts_after(width):
            return lambda: None
        draft = torch.cuda.CUDAGraph()
        with torch.cuda.graph(draft, pool=pool):
            self._step.draft(verified)
        return draft.replay

    def _capture_catch_up(self, size: int, pool: Any) -> CatchUpGraph:
        slots = self._dummies(size)
        counts = torch.zeros_like(slots)
        self._step.catch_up(slots, counts)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._step.catch_up(slots, counts)
        return CatchUpGraph(slots, counts, graph)

    def _verify(self, slots: Tensor, width: int, sampling: SamplingWork) -> Verified:
        return self._step.verify(slots, width, sampling)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect now, and not while a capture is under way: freeing CUDA memory would invalidate it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
