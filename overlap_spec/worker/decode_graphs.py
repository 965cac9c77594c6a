"""Decode steps as CUDA graphs (`step_graphs.py`), for every batch size and width.

One more graph per batch size lets the draft catch up after steps of width 1. A graph has a fixed number of rows. A
smaller batch is padded with the dummy slot, whose page table is all page 0 and whose length every step puts back to 0.

Kernels are chosen by shapes, and attention over short contexts has one that is faster by microseconds a layer. They
count in steps of few requests, so these are captured once more with page tables that end at `SHORT_CONTEXT`; the host
knows how many pages its slots have. (Trees attend by a kernel of their own.)
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from overlap_spec_kernels import Verdict
from torch import Tensor

from overlap_spec.models.layers.skip_layers import rehearsing
from overlap_spec.sampling.types import EVERY_WORK, GREEDY_WORK, SamplingWork
from overlap_spec.worker.decode import DecodeStep
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step_graphs import (
    EVERY_KIND,
    LEAST_AND_MOST,
    FirstRuns,
    GraphRecorder,
    KindGraphs,
    PartGraphs,
    Parts,
    Replay,
    capture_parts,
    no_collection,
    run_once,
)
from overlap_spec.worker.windows import Forwarded

SHORT_CONTEXT = 2048  # tokens; attention's choice for such page tables is in short_decode.py
SHORT_BATCH = 8  # slots of a step that has graphs of its own for short contexts, at most


@dataclass(frozen=True)
class CatchUpGraph:
    """One batch size, captured."""

    slots: Tensor  # [B] i64, an input
    counts: Tensor  # [B] i64, an input
    replay: Replay


@dataclass(frozen=True)
class StepGraphs:
    """One batch size and width, captured."""

    slots: Tensor  # [B] i64, the input
    parts: PartGraphs[Forwarded, Verdict]


class Reach:
    """How many columns the page tables of captured steps have."""

    def __init__(self, num_pages: int, width: int, page_size: int, short_batch: int = SHORT_BATCH) -> None:
        """`short_batch`: slots of the steps that are also captured with short ones, at most."""
        self._all, self._short_batch = num_pages, short_batch
        self._short = min(SHORT_CONTEXT // page_size, num_pages)
        self._beyond = -(-2 * width // page_size)  # a step reads no page further behind a slot's own: `gather_window`

    def columns(self, size: int) -> list[int]:
        """Of the graphs of a batch size, most first."""
        return sorted({self._all, self._short} if 0 < size <= self._short_batch else {self._all}, reverse=True)

    def columns_for(self, size: int, most_pages: Callable[[], int]) -> int:
        """Of the graph for slots with so many pages, at most; they are not counted where all steps have one graph."""
        if len(self.columns(size)) == 1 or most_pages() + self._beyond > self._short:
            return self._all
        return self._short


class GraphDecoder:
    """Replays the smallest captured batch that holds the step's; what none holds is launched operation by operation.

    What is replayed is overwritten by the next step; its first len(slots) rows are the step's batch.
    """

    def __init__(self, step: DecodeStep, slots: SlotRows, widths: Sequence[int], batch_sizes: Sequence[int]) -> None:
        self._step = step
        self._rows = slots
        self._widths = sorted(widths)
        self._sizes = sorted(batch_sizes)
        self._defers = self._widths[0] == 1 < slots.width and step.self_drafting is None
        short_batch = SHORT_BATCH if step.method.tree is None else 0
        self._reach = Reach(slots.num_pages, slots.width, step.page_size, short_batch)
        self._graphs: dict[tuple[int, int, int], StepGraphs] = {}  # batch size, width, columns of page tables
        self._catch_up: dict[int, CatchUpGraph] = {}
        self._filled: dict[int, Tensor] = {}  # id of a graph's slots -> what was written into them last
        self._running: StepGraphs | None = None  # of the step being launched
        self._kind: KindGraphs[Forwarded, Verdict] | None = None

    def run_once(self) -> None:
        """Launch what `capture` captures, operation by operation."""
        with torch.inference_mode(), rehearsing():
            for size in reversed(self._sizes):
                slots = self._dummies(size)
                for width, pages in product(reversed(self._widths), self._reach.columns(size)):
                    run_once(self._parts(slots, width, pages), self._first_runs(width))
                if self._defers:
                    self._step.catch_up(slots, torch.zeros_like(slots))

    def capture(self, recorder: GraphRecorder) -> None:
        """Capture every batch size and width, largest first."""
        with torch.inference_mode(), no_collection():
            for size in reversed(self._sizes):
                for width, pages in product(reversed(self._widths), self._reach.columns(size)):
                    self._graphs[size, width, pages] = self._capture(size, width, pages, recorder)
                if self._defers:
                    self._catch_up[size] = self._capture_catch_up(size, recorder)
        recorder.finish()

    def catch_up(self, slots: Tensor, counts: Tensor) -> None:
        captured = self._catch_up.get(self._size_for(len(slots)))
        if captured is None:
            self._step.catch_up(slots, counts)
            return
        self._fill(captured.slots, slots)
        captured.counts[: len(slots)].copy_(counts)
        captured.counts[len(slots) :].zero_()
        captured.replay()

    def forward(self, slots: Tensor, width: int, most_pages: Callable[[], int]) -> Forwarded:
        size = self._size_for(len(slots))
        graphs = self._running = self._graphs.get((size, width, self._reach.columns_for(size, most_pages)))
        if graphs is None:
            return self._step.forward(slots, width, most_pages)
        self._fill(graphs.slots, slots)
        graphs.parts.layers()
        return graphs.parts.forwarded

    def judge(self, forwarded: Forwarded, sampling: SamplingWork) -> Verdict:
        if self._running is None:
            self._kind = None
            self._step.marks.replayed(())
            return self._step.judge(forwarded, sampling)
        kind = self._kind = self._running.parts.kinds[sampling]
        self._step.marks.replayed(kind.marks)
        kind.judge()
        return kind.judged

    def draft(self, forwarded: Forwarded, sampling: SamplingWork) -> None:
        if self._kind is None:
            self._step.draft(forwarded, sampling)
        else:
            self._kind.draft()

    def _size_for(self, num_slots: int) -> int:
        """The smallest captured batch that holds so many; 0 if there is none."""
        index = bisect.bisect_left(self._sizes, num_slots)
        return self._sizes[index] if index < len(self._sizes) else 0

    def _fill(self, held: Tensor, slots: Tensor) -> None:
        """Write a graph's slots, padded with the dummy; skipped if this tensor was the last that was written there."""
        if self._filled.get(id(held)) is slots:
            return
        held[: len(slots)].copy_(slots)
        held[len(slots) :].fill_(self._rows.dummy)
        self._filled[id(held)] = slots

    def _dummies(self, size: int) -> Tensor:
        return torch.full((size,), self._rows.dummy, dtype=torch.int64, device=self._rows.length.device)

    def _parts(self, slots: Tensor, width: int, pages: int) -> Parts[Forwarded, Verdict]:
        step = self._step
        return Parts(
            forward=lambda: step.forward_within(pages, slots, width),
            judge=step.judge,
            draft=step.draft if step.drafts_after(width) else None,
            draft_work=step.method.draft_work,
            marks=step.marks,
        )

    def _capture(self, size: int, width: int, pages: int, recorder: GraphRecorder) -> StepGraphs:
        slots = self._dummies(size)
        parts, runs = self._parts(slots, width, pages), self._first_runs(width)
        if size < self._sizes[-1]:  # every kind has been run in the largest size
            runs = LEAST_AND_MOST if width == self._widths[-1] else replace(LEAST_AND_MOST, draft=(GREEDY_WORK,))
        return StepGraphs(slots, capture_parts(parts, recorder, runs))

    def _first_runs(self, width: int) -> FirstRuns:
        """After a narrower step the draft makes the first of the guesses that it makes after the widest one."""
        return EVERY_KIND if width == self._widths[-1] else FirstRuns(draft=(GREEDY_WORK, EVERY_WORK))

    def _capture_catch_up(self, size: int, recorder: GraphRecorder) -> CatchUpGraph:
        slots = self._dummies(size)
        counts = torch.zeros_like(slots)
        self._step.catch_up(slots, counts)
        replay, _ = recorder.record("catch up", lambda: self._step.catch_up(slots, counts))
        return CatchUpGraph(slots, counts, replay)
