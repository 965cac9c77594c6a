"""Prefill steps of a few sizes as CUDA graphs (`step_graphs.py`), so that a short prompt is not bound by its launches.

What no captured size holds is launched operation by operation: it has enough work for the device to hide that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from overlap_spec_kernels import Published
from torch import Tensor

from overlap_spec.models.layers.skip_layers import rehearsing
from overlap_spec.sampling.types import SamplingWork
from overlap_spec.worker.chunks import Chunks, PromptShape
from overlap_spec.worker.prefill import Prefilled, PrefillStep
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step_graphs import (
    ANY_KIND,
    EVERY_KIND,
    FirstRuns,
    GraphRecorder,
    KindGraphs,
    PartGraphs,
    Parts,
    capture_parts,
    no_collection,
    run_once,
)

ROWS = (16, 32, 64, 128, 256, 512)  # prompt tokens that are captured for
FINER_ROWS = (384, 640, 768, 896, 1024)  # and these, where 128 rows more take a millisecond or longer
FINER_BELOW = 4096  # rows of a captured step, at most, of a model that is so large
CHUNKS = 8  # requests in a captured step; one more chunk takes the rows that are left over
BATCH_ROWS = (512, 1024, 1536, 2048, 3072, 4096)  # of steps with more requests
BATCH_CHUNKS = 64
LONGEST = 1024  # rows of one request in such a step, and more than may be left over
READS_ALL = 256  # rows of a step, at most, that computes all of the last layer: its time is that of the weights


@dataclass(frozen=True)
class PromptGraphs:
    """One size, captured."""

    packed: Tensor  # i64, the input
    parts: PartGraphs[Prefilled, Published]


def captured_rows(most_rows: int, batch_rows: int) -> tuple[int, ...]:
    """The sizes for few requests, ascending. `most_rows`: positions of a request; `batch_rows`: see `captured_shapes`.

    While requests decode, time cuts their steps to sizes between 256 and about 1,024 rows, and padding is lost.
    """
    finer = FINER_ROWS if batch_rows < FINER_BELOW else ()
    sizes = {*ROWS, *(rows for rows in finer if rows <= batch_rows)}
    return tuple(sorted(rows for rows in sizes if rows <= most_rows))


def captured_shapes(most_rows: int, batch_rows: int, num_slots: int, reads_last: bool = False) -> list[PromptShape]:
    """The sizes of captured steps, those for few requests first, each of these ascending.

    `batch_rows`: the most prompt tokens of a step with many requests: with more, the layers of the target take longer
    than their launches. `reads_last`: see `captured_shape`; of a large model.
    """
    reads_last &= batch_rows < FINER_BELOW
    few = [captured_shape(rows, CHUNKS, rows, reads_last) for rows in captured_rows(most_rows, batch_rows)]
    chunks = min(BATCH_CHUNKS, num_slots) + 1
    many = [captured_shape(rows, chunks - 1, LONGEST, reads_last) for rows in BATCH_ROWS if rows <= batch_rows]
    return few + many if chunks > CHUNKS + 1 and most_rows >= LONGEST else few


def captured_shape(num_rows: int, chunks: int, max_rows: int, reads_last: bool) -> PromptShape:
    """A size for so many rows and chunks, and a chunk for the rows that are left over.

    `reads_last`: of the last layer, no more than K and V of most rows is needed. Steps of many rows are captured so;
    those of which prompt log-probs are asked for are then launched operation by operation.
    """
    return PromptShape(num_rows, chunks + 1, max_rows, reads_last=reads_last and num_rows > READS_ALL)


class GraphPrefiller:
    """Replays the smallest captured size that holds the step's rows and requests.

    What is replayed is overwritten by the next step of its size.
    """

    def __init__(self, step: PrefillStep, slots: SlotRows, shapes: Sequence[PromptShape]) -> None:
        self._step = step
        self._slots = slots
        self._shapes = shapes
        self._graphs: dict[PromptShape, PromptGraphs] = {}
        self._running: PromptGraphs | None = None  # of the step being launched
        self._kind: KindGraphs[Prefilled, Published] | None = None

    def run_once(self) -> None:
        """Launch what `capture` captures, operation by operation."""
        with torch.inference_mode(), rehearsing():
            for shape, runs in self._first_runs():
                run_once(self._parts(self._packed(shape), shape), runs)

    def capture(self, recorder: GraphRecorder) -> None:
        """Capture every size, largest first."""
        with torch.inference_mode(), no_collection():
            for shape, runs in self._first_runs():
                self._graphs[shape] = self._capture(shape, recorder, runs)
        recorder.finish()

    def shape_for(self, exact: PromptShape) -> PromptShape:
        """See `Prefiller`."""
        return next((shape for shape in self._shapes if holds(shape, exact)), exact)

    def replays(self, shape: PromptShape) -> bool:
        """See `Prefiller`."""
        return shape in self._graphs

    def forward(self, packed: Tensor, shape: PromptShape) -> Prefilled:
        graphs = self._running = self._graphs.get(shape)
        if graphs is None:
            return self._step.forward(packed, shape)
        graphs.packed.copy_(packed)
        graphs.parts.layers()
        return graphs.parts.forwarded

    def draw(self, prefilled: Prefilled, sampling: SamplingWork) -> Published:
        if self._running is None:
            self._kind = None
            return self._step.draw(prefilled, sampling)
        kind = self._kind = self._running.parts.kinds[sampling]
        kind.judge()
        return kind.judged

    def draft(self, prefilled: Prefilled, sampling: SamplingWork, width: int) -> None:
        """Whole windows are captured; narrower ones have few launches."""
        if self._kind is None or self._step.proposed(width) < self._slots.width:
            self._step.draft(prefilled, sampling, width)
        else:
            self._kind.draft()

    def _first_runs(self) -> Iterator[tuple[PromptShape, FirstRuns]]:
        """The sizes, largest first, and what to run before a capture.

        Kinds differ in what is done with one row of each chunk: they are run once for each number of chunks, which also
        takes the memory in which longer prompts draw.
        """
        run: set[int] = set()
        for shape in reversed(self._shapes):
            yield shape, ANY_KIND if shape.chunks in run else EVERY_KIND
            run.add(shape.chunks)

    def _capture(self, shape: PromptShape, recorder: GraphRecorder, runs: FirstRuns) -> PromptGraphs:
        packed = self._packed(shape)
        parts = self._parts(packed, shape)
        return PromptGraphs(packed, capture_parts(parts, recorder, runs))

    def _packed(self, shape: PromptShape) -> Tensor:
        empty = Chunks([]).laid_out(shape, self._slots.dummy)
        return torch.from_numpy(empty).to(self._slots.length.device)

    def _parts(self, packed: Tensor, shape: PromptShape) -> Parts[Prefilled, Published]:
        step, drafts = self._step, self._slots.width > 1
        return Parts(
            forward=lambda: step.forward(packed, shape),
            judge=step.draw,
            draft=partial(step.draft, width=self._slots.width) if drafts else None,
            draft_work=step.method.draft_work,
            absorb=step.absorb if drafts else None,
        )


def holds(shape: PromptShape, exact: PromptShape) -> bool:
    """Whether so many rows and chunks, one more for the rows that are left over, and what is read of them fit."""
    fits = exact.rows <= shape.rows and exact.chunks < shape.chunks and exact.max_rows <= shape.max_rows
    return fits and (exact.reads_last or not shape.reads_last)
