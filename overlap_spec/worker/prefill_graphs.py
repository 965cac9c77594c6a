"""Prefill steps of a few sizes as CUDA graphs, so that a short prompt is not bound by its launches.

Two graphs a step, cut where tokens leave, as in `decode_graphs.py`. What no captured size holds is launched operation
by operation: it has enough work for the device to hide that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overlap_spec.sampling.types import SAMPLING_WORK, SamplingWork
from overlap_spec.worker.chunks import Chunks, PromptShape
from overlap_spec.worker.decode_graphs import no_garbage_collection
from overlap_spec.worker.prefill import Prefilled, PrefillStep
from overlap_spec.worker.slots import SlotRows

ROWS = (16, 32, 64, 128, 256, 512)  # prompt tokens that are captured for
SEATS = 8  # requests in a captured step; one more seat takes the rows that are left over


@dataclass(frozen=True)
class PromptGraphs:
    """One size and one kind of sampling, captured."""

    packed: Tensor  # i64, the input
    draw: torch.cuda.CUDAGraph
    prefilled: Prefilled  # fixed addresses
    draft: Callable[[], None]


class GraphPrefiller:
    """Replays the smallest captured size that holds the step's rows. `most_rows`: positions that a row may have."""

    def __init__(self, step: PrefillStep, slots: SlotRows, most_rows: int) -> None:
        self._step = step
        self._slots = slots
        self._shapes = [PromptShape(rows, SEATS + 1, rows) for rows in ROWS if rows <= most_rows]
        self._graphs: dict[tuple[PromptShape, SamplingWork], PromptGraphs] = {}
        self._running: PromptGraphs | None = None

    def capture(self, pool: Any) -> None:
        """Capture every size and kind of sampling, largest first."""
        with torch.inference_mode(), no_garbage_collection():
            for shape in reversed(self._shapes):
                for sampling in SAMPLING_WORK:
                    self._graphs[shape, sampling] = self._capture(shape, sampling, pool)
        torch.cuda.synchronize()

    def shape_for(self, exact: PromptShape) -> PromptShape:
        """See `Prefiller`."""
        fitting = (shape for shape in self._shapes if exact.rows <= shape.rows and exact.seats <= SEATS)
        return next(fitting, exact)

    def draw(self, packed: Tensor, shape: PromptShape, sampling: SamplingWork) -> Prefilled:
        """See `Prefiller`. The result is overwritten by the next step of this size."""
        graphs = self._running = self._graphs.get((shape, sampling))
        if graphs is None:
            return self._step.draw(packed, shape, sampling)
        graphs.packed.copy_(packed)
        graphs.draw.replay()
        return graphs.prefilled

    def draft(self, prefilled: Prefilled) -> None:
        """See `Prefiller`."""
        if self._running is None:
            self._step.draft(prefilled)
        else:
            self._running.draft()

    def _capture(self, shape: PromptShape, sampling: SamplingWork, pool: Any) -> PromptGraphs:
        nobody = Chunks([]).laid_out(shape, self._slots.dummy)
        packed = torch.frombuffer(nobody, dtype=torch.int64).to(self._slots.length.device)
        self._step.draft(self._step.draw(packed, shape, sampling))  # compiles kernels, which a capture must not
        torch.cuda.synchronize()
        draw = torch.cuda.CUDAGraph()
        with torch.cuda.graph(draw, pool=pool):
            prefilled = self._step.draw(packed, shape, sampling)
        return PromptGraphs(packed, draw, prefilled, self._capture_draft(prefilled, pool))

    def _capture_draft(self, prefilled: Prefilled, pool: Any) -> Callable[[], None]:
        """Returns the replay; without guesses there is nothing to capture."""
        if self._slots.width == 1:
            return lambda: None
        draft = torch.cuda.CUDAGraph()
        with torch.cuda.graph(draft, pool=pool):
            self._step.draft(prefilled)
        return draft.replay
