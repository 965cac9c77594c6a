"""The layers of joined steps (`joined.py`) as CUDA graphs, for a few sizes of both parts.

Operation by operation they take the host longer than the device. What follows the layers is launched while they run,
and needs no graphs. A decode step is padded with dummy slots, chunks as in a prefill step of their own.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap_spec.messages import JoinedSizes
from overlap_spec.models.layers.skip_layers import rehearsing
from overlap_spec.sampling.types import SamplingWork
from overlap_spec.worker.chunks import Chunks, PromptShape
from overlap_spec.worker.joined import JoinedStep
from overlap_spec.worker.prefill import Prefilled
from overlap_spec.worker.prefill_graphs import CHUNKS, captured_shape, holds
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step_graphs import (
    ANY_KIND,
    EVERY_KIND,
    FirstRuns,
    GraphRecorder,
    Parts,
    Replay,
    capture_layers,
    no_collection,
    run_once,
)
from overlap_spec.worker.windows import Forwarded

BATCHES = (8, 16, 24, 40, 64)  # decode steps that are captured for
ROWS = (256, 384, 512, 640, 768, 896, 1024)  # of windows and prompts together, so that they fill the tiles of products
LEAST_PROMPTS = 64  # rows left to them, at least
LEAST_FLOP = 3 * 10**12  # of the layers: with less, they do not hide the launches of what follows


def joined_sizes(width: int, num_slots: int, max_chunk: int, row_flop: int, most_rows: int) -> JoinedSizes:
    """What is captured of a target whose layers take so much for a row. `most_rows`: of a captured step."""
    totals = [rows for rows in ROWS if rows <= most_rows and rows * row_flop >= LEAST_FLOP]
    sizes: dict[int, tuple[int, ...]] = {}
    for batch in sorted({min(size, num_slots) for size in BATCHES}):
        left = (rows - batch * width for rows in totals)
        sizes[batch] = tuple(rows for rows in left if LEAST_PROMPTS <= rows <= max_chunk)
    kept = {batch: rows for batch, rows in sizes.items() if rows}
    return JoinedSizes(width, CHUNKS, tuple(kept), tuple(kept.values()))


@dataclass(frozen=True)
class JoinedGraph:
    """One size of both parts, captured."""

    slots: Tensor  # [B] i64, an input
    packed: Tensor  # i64, an input
    replay: Replay
    forwarded: Forwarded
    prefilled: Prefilled


class GraphJoiner:
    """Replays the smallest captured size that holds both parts. The next joined step overwrites what is replayed."""

    def __init__(
        self, step: JoinedStep, slots: SlotRows, sizes: JoinedSizes, decode_sizes: Collection[int] = ()
    ) -> None:
        """`decode_sizes`: batches whose decode steps are captured before, so that what they draw by is loaded."""
        self._step = step
        self._decode_sizes = decode_sizes
        self._slots = slots
        self._sizes = sizes
        self._graphs: dict[tuple[int, PromptShape], JoinedGraph] = {}

    def shape_for(self, num_slots: int, width: int, exact: PromptShape) -> PromptShape | None:
        index = self._sizes.batch_for(num_slots, width)
        shapes = () if index is None else self._shapes(index)
        return next((shape for shape in shapes if holds(shape, exact)), None)

    def forward(self, slots: Tensor, width: int, packed: Tensor, shape: PromptShape) -> tuple[Forwarded, Prefilled]:
        index = self._sizes.batch_for(len(slots), width)
        assert index is not None, "`shape_for` gave a shape"
        graph = self._graphs[self._sizes.batches[index], shape]
        graph.slots[: len(slots)].copy_(slots)
        graph.slots[len(slots) :].fill_(self._slots.dummy)
        graph.packed.copy_(packed)
        graph.replay()
        return graph.forwarded, graph.prefilled

    def run_once(self) -> None:
        """Launch what `capture` captures and what follows it, operation by operation."""
        with torch.inference_mode(), rehearsing():
            for batch, shape, runs in self._first_runs():
                run_once(self._parts(*self._inputs(batch, shape), shape), runs)

    def capture(self, recorder: GraphRecorder) -> None:
        """Capture every size, largest first."""
        with torch.inference_mode(), no_collection():
            for batch, shape, runs in self._first_runs():
                if batch in self._decode_sizes and batch < self._sizes.batches[-1]:  # of the largest, memory is taken
                    runs = ANY_KIND
                slots, packed = self._inputs(batch, shape)
                parts = self._parts(slots, packed, shape)
                replay, (forwarded, prefilled) = capture_layers(parts, recorder, "joined layers", runs)
                self._graphs[batch, shape] = JoinedGraph(slots, packed, replay, forwarded, prefilled)
        recorder.finish()

    def _parts(self, slots: Tensor, packed: Tensor, shape: PromptShape) -> Parts[tuple[Forwarded, Prefilled], None]:
        step, decode, prefill = self._step, self._step.decode, self._step.prefill

        def judge(both: tuple[Forwarded, Prefilled], kind: SamplingWork) -> None:
            decode.judge(both[0], kind)
            prefill.draw(both[1], kind)

        def draft(both: tuple[Forwarded, Prefilled], kind: SamplingWork) -> None:
            decode.draft(both[0], kind)
            prefill.draft(both[1], kind, self._slots.width)

        return Parts(
            forward=lambda: step.forward(slots, self._sizes.width, packed, shape),
            judge=judge,
            draft=draft if self._slots.width > 1 else None,
            draft_work=decode.method.draft_work,
            absorb=(lambda both: prefill.absorb(both[1])) if self._slots.width > 1 else None,
        )

    def _first_runs(self) -> Iterator[tuple[int, PromptShape, FirstRuns]]:
        """The sizes, those with the most rows first, and the kinds of sampling to run before a capture.

        What kinds differ in depends on the batch alone: prompts are of the same number of chunks.
        """
        sizes = [(batch, shape) for i, batch in enumerate(self._sizes.batches) for shape in self._shapes(i)]
        run: set[int] = set()
        for batch, shape in sorted(sizes, key=lambda size: (size[1].rows, size[0]), reverse=True):
            yield batch, shape, ANY_KIND if batch in run else EVERY_KIND
            run.add(batch)

    def _shapes(self, index: int) -> list[PromptShape]:
        """Of the chunks beside a batch, ascending."""
        chunks, reads_last = self._sizes.chunks, self._step.prefill.reads_last
        return [captured_shape(rows, chunks, rows, reads_last) for rows in self._sizes.rows[index]]

    def _inputs(self, batch: int, shape: PromptShape) -> tuple[Tensor, Tensor]:
        """Dummies."""
        place, dummy = self._slots.length.device, self._slots.dummy
        slots = torch.full((batch,), dummy, dtype=torch.int64, device=place)
        return slots, torch.from_numpy(Chunks([]).laid_out(shape, dummy)).to(place)
