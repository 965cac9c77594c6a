"""Steps as CUDA graphs: what is captured (`graph_sizes.py`), by shape, and how a step is put into what holds it.

Windows alone, prompts alone and placed windows have graphs of all their parts (`capture.py`). Windows and prompts
together have one of the layers alone, which take the host longer than the device operation by operation; what follows
is launched while they run.

A graph has a fixed number of rows. Fewer windows are padded with the dummy slot, whose page table is all page 0 and
whose length every step puts back to 0; prompts as `Chunks.laid_out` pads them. What is replayed is overwritten by the
next step of its shape.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from overlap_spec_kernels import Published
from torch import Tensor

from overlap_spec.models.layers.layer_run import skipping_layers
from overlap_spec.sampling.context import EVERY_WORK, GREEDY_WORK, SamplingWork
from overlap_spec.speculative.interfaces import ABSORBED_ROWS, SpecMethod
from overlap_spec.worker.capture import (
    ANY_KIND,
    EVERY_KIND,
    LEAST_AND_MOST,
    FirstRuns,
    GraphRecorder,
    KindGraphs,
    Parts,
    Replay,
    capture_layers,
    capture_parts,
    no_collection,
    run_once,
)
from overlap_spec.worker.graph_sizes import GraphSizes
from overlap_spec.worker.runner import EagerRunner, Part, PartKind
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step import StepShape

AllRows = tuple[Any, ...]  # what the layers gave, of each part
KindsOfGraphs = dict[SamplingWork, KindGraphs[Published]]


class CapturedPart(Part):
    """A part whose steps are replayed. The same object in every step of its shape."""

    def __init__(self, kind: PartKind, rows: Any, graphs: KindsOfGraphs, width: int) -> None:
        """`width`: of the windows that its draft, which is captured, proposes."""
        super().__init__(kind, rows)
        self._graphs = graphs
        self._width = width
        self._decided: KindGraphs[Published] | None = None  # of the step being launched

    def decide(self, work: SamplingWork) -> Published:
        graphs = self._decided = self._graphs[work]
        graphs.mark()
        graphs.judge()
        return graphs.judged

    def draft(self, work: SamplingWork, width: int) -> None:
        """Whole windows are captured of prompts; narrower ones have few launches."""
        if self.kind.proposed(width) < self._width:
            self.kind.draft(self.rows, work, width)
        else:
            assert self._decided is not None, "a step decides before it drafts"
            self._decided.draft()


@dataclass(frozen=True)
class Captured:
    """One shape, captured. `inputs`: at fixed addresses, those of each part; without layers, slots and counts."""

    inputs: tuple[Tensor, ...]
    layers: Replay
    parts: tuple[Part, ...] = ()


class GraphRunner:
    """Replays the smallest captured shape that holds a step; what none holds is launched operation by operation."""

    def __init__(self, eager: EagerRunner, method: SpecMethod, slots: SlotRows, sizes: GraphSizes) -> None:
        self._eager = eager
        self._method = method
        self._slots = slots
        self._sizes = sizes
        self._captured: dict[StepShape, Captured] = {}
        self._filled: dict[int, Tensor] = {}  # id of a graph's slots -> what was written into them last

    # --- steps ----------------------------------------------------------------------------------------------

    def shape_for(self, exact: StepShape, most_pages: Callable[[], int]) -> StepShape | None:
        """See `Runner`. Windows that no graph holds are not padded, and not run beside prompts."""
        shape = self._sizes.holding(exact, most_pages)
        return exact if shape is None and not exact.has_both else shape

    def replays(self, shape: StepShape) -> bool:
        return shape in self._captured

    def forward(self, shape: StepShape, *inputs: Tensor) -> tuple[Part, ...]:
        captured = self._captured.get(shape)
        if captured is None:
            return self._eager.forward(shape, *inputs)
        if shape.prompts is None and not shape.placed:
            self._fill(captured.inputs[0], inputs[0])
        else:
            for held, values in zip(captured.inputs, inputs, strict=True):
                self._write(held, values)
        captured.layers()
        return captured.parts

    def absorb_missed(self, slots: Tensor, counts: Tensor, most: int) -> None:
        """See `Runner`. A replay leaves the counts of the next one in the graph's own."""
        held = self._sizes.holding(StepShape(len(slots), 0, self._sizes.reach.all), lambda: self._sizes.reach.all)
        captured = None if held is None else self._captured.get(held)
        if captured is None:
            self._eager.absorb_missed(slots, counts, most)
            return
        self._fill(captured.inputs[0], slots)
        captured.inputs[1][: len(slots)].copy_(counts)
        captured.inputs[1][len(slots) :].zero_()
        for _ in range(0, most, ABSORBED_ROWS):
            captured.layers()

    def _fill(self, held: Tensor, slots: Tensor) -> None:
        """Write a graph's slots, padded with the dummy; skipped if this tensor was the last that was written there."""
        if self._filled.get(id(held)) is slots:
            return
        self._write(held, slots)
        self._filled[id(held)] = slots

    def _write(self, held: Tensor, values: Tensor) -> None:
        """Only slots may be fewer than a graph has."""
        if len(values) == len(held):
            held.copy_(values)
        else:
            held[: len(values)].copy_(values)
            held[len(values) :].fill_(self._slots.dummy)

    # --- captures -------------------------------------------------------------------------------------------

    def run_once(self) -> None:
        """Launch what `capture` captures and what follows it, operation by operation."""
        with torch.inference_mode(), skipping_layers():
            for shape, runs in self._first_runs():
                inputs = self._dummies(shape)
                if shape.width:
                    run_once(self._parts(shape, inputs), runs)
                else:
                    self._eager.windows.absorb_missed(*inputs)

    def capture(self, recorder: GraphRecorder) -> None:
        """Capture every shape, in the order of `GraphSizes`."""
        with torch.inference_mode(), no_collection():
            for shape, runs in self._first_runs(captures=True):
                inputs = self._dummies(shape)
                self._captured[shape] = self._capture(shape, inputs, recorder, runs)
        recorder.finish()

    def _capture(
        self, shape: StepShape, inputs: tuple[Tensor, ...], recorder: GraphRecorder, runs: FirstRuns
    ) -> Captured:
        if shape.width == 0:
            absorb = partial(self._eager.windows.absorb_missed, *inputs)
            absorb()
            return Captured(inputs, recorder.record("catch up", absorb)[0])
        parts, kinds = self._parts(shape, inputs), self._eager.kinds(shape)
        if len(kinds) > 1:
            layers, rows = capture_layers(parts, recorder, "layers together", runs)
            return Captured(inputs, layers, tuple(map(Part, kinds, rows)))
        graphs = capture_parts(parts, recorder, runs)
        (kind,), (rows,) = kinds, graphs.forwarded
        return Captured(inputs, graphs.layers, (CapturedPart(kind, rows, graphs.kinds, shape.width),))

    def _parts(self, shape: StepShape, inputs: tuple[Tensor, ...]) -> Parts[AllRows, Published]:
        """All that a step of this shape launches. Of prompts, whole windows are proposed."""
        eager, kinds = self._eager, self._eager.kinds(shape)
        widths = [self._sizes.width if kind is eager.prompts else shape.width for kind in kinds]
        drafts = any([kind.proposed(width) > 1 for kind, width in zip(kinds, widths, strict=True)])

        def judge(rows: AllRows, work: SamplingWork) -> Published:
            return [kind.decide(each, work) for kind, each in zip(kinds, rows, strict=True)][-1]

        def draft(rows: AllRows, work: SamplingWork) -> None:
            for kind, each, width in zip(kinds, rows, widths, strict=True):
                kind.draft(each, work, width)

        parts = Parts(
            forward=lambda: eager.run_layers(shape, *inputs),
            judge=judge,
            draft=draft if drafts else None,
            draft_work=self._method.draft_work,
            absorb=(lambda rows: eager.prompts.absorb(rows[-1])) if shape.prompts and drafts else None,
        )
        return replace(parts, marks=eager.windows.marks) if kinds[0] is eager.windows else parts

    def _dummies(self, shape: StepShape) -> tuple[Tensor, ...]:
        """Inputs of each part for the dummy slot; of a catch-up, slots and counts."""
        inputs = tuple(kind.dummies(shape) for kind in self._eager.kinds(shape))
        return inputs if shape.width else (*inputs, torch.zeros_like(inputs[0]))

    def _first_runs(self, captures: bool = False) -> Iterator[tuple[StepShape, FirstRuns]]:
        """The shapes in the order of captures, and the kinds of sampling to run before one.

        `captures`: they follow, and make good for kinds that are left out here (`capture_parts`).
        """
        sizes, run = self._sizes, set[object]()
        for shape in sizes.shapes():
            if shape.prompts is None:
                yield shape, EVERY_KIND if shape.placed else self._runs_of_windows(shape, captures)
                continue
            # Kinds differ in what is done with one row of each chunk, and with windows: they are run once for each
            # number of chunks, and of windows beside them. This also takes the memory in which longer prompts draw.
            key = (shape.slots, 0 if shape.slots else shape.prompts.chunks)
            # Of windows that were captured alone, what draws is loaded; of the largest, memory is taken.
            known = captures and shape.slots in sizes.batches and shape.slots < sizes.beside_batches[-1]
            yield shape, ANY_KIND if known or key in run else EVERY_KIND
            run.add(key)

    def _runs_of_windows(self, shape: StepShape, captures: bool) -> FirstRuns:
        """After a narrower step the draft makes the first of the guesses that it makes after the widest one."""
        widest = shape.width == self._sizes.widths[-1]
        if captures and shape.slots < self._sizes.batches[-1]:  # every kind has been run in the largest size
            return LEAST_AND_MOST if widest else replace(LEAST_AND_MOST, draft=(GREEDY_WORK,))
        return EVERY_KIND if widest else FirstRuns(draft=(GREEDY_WORK, EVERY_WORK))
