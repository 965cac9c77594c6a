"""The layers of joined steps (`joined.py`) as CUDA graphs, for a few sizes of both parts.

Operation by operation they take the host longer than the device. What follows the layers is launched while they run,
and needs no graphs. A decode step is padded with dummy slots, chunks as in a prefill step of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap_spec.messages import JoinedSizes
from overlap_spec.sampling.types import SAMPLING_WORK
from overlap_spec.worker.chunks import Chunks, PromptShape
from overlap_spec.worker.joined import JoinedStep
from overlap_spec.worker.prefill import Prefilled
from overlap_spec.worker.prefill_graphs import CHUNKS, holds
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step_graphs import GraphRecorder, Replay, no_collection
from overlap_spec.worker.windows import Forwarded

BATCHES = (8, 24, 64)  # decode steps that are captured for
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

    def __init__(self, step: JoinedStep, slots: SlotRows, sizes: JoinedSizes) -> None:
        self._step = step
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
        """Run what `capture` captures and what is launched after it, operation by operation."""
        with torch.inference_mode():
            for batch, shape in self._all():
                self._run_once(*self._inputs(batch, shape), shape)

    def capture(self, recorder: GraphRecorder) -> None:
        """Capture every size, largest first."""
        with torch.inference_mode(), no_collection():
            for batch, shape in self._all():
                self._graphs[batch, shape] = self._capture(batch, shape, recorder)
        recorder.finish()

    def _capture(self, batch: int, shape: PromptShape, recorder: GraphRecorder) -> JoinedGraph:
        slots, packed = self._inputs(batch, shape)
        self._run_once(slots, packed, shape)
        recorder.finish()
        replay, (forwarded, prefilled) = recorder.record(
            "joined layers", lambda: self._step.forward(slots, self._sizes.width, packed, shape)
        )
        return JoinedGraph(slots, packed, replay, forwarded, prefilled)

    def _run_once(self, slots: Tensor, packed: Tensor, shape: PromptShape) -> None:
        """Of every kind of sampling: what is launched while requests are served is compiled, and takes no memory."""
        decode, prefill = self._step.decode, self._step.prefill
        forwarded, prefilled = self._step.forward(slots, self._sizes.width, packed, shape)
        for kind in SAMPLING_WORK:
            decode.judge(forwarded, kind)
            prefill.draw(prefilled, kind)
            decode.draft(forwarded, kind)
            if self._slots.width > 1:
                prefill.draft(prefilled, kind)

    def _all(self) -> Iterator[tuple[int, PromptShape]]:
        """Batches and shapes, those with the most rows first."""
        sizes = [(batch, shape) for i, batch in enumerate(self._sizes.batches) for shape in self._shapes(i)]
        yield from sorted(sizes, key=lambda size: size[0] * self._sizes.width + size[1].rows, reverse=True)

    def _shapes(self, index: int) -> list[PromptShape]:
        """Of the chunks beside a batch, ascending."""
        return [PromptShape(rows, self._sizes.chunks + 1, rows) for rows in self._sizes.rows[index]]

    def _inputs(self, batch: int, shape: PromptShape) -> tuple[Tensor, Tensor]:
        """Dummies."""
        place, dummy = self._slots.length.device, self._slots.dummy
        slots = torch.full((batch,), dummy, dtype=torch.int64, device=place)
        return slots, torch.from_numpy(Chunks([]).laid_out(shape, dummy)).to(place)
