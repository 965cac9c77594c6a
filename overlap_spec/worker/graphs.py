"""Steps as CUDA graphs: what is captured, by shape, and how a step is put into what holds it.

Windows alone, prompts alone and placed windows have graphs of all their parts (`capture.py`). Prompts of a small model
have a draft for each width that they propose: its launches take longer than the device does. Windows and prompts
together have one of the layers alone, which take the host longer than the device operation by operation; what follows
is launched while they run. So it is for rare kinds of sampling after prompts of a large model.

A graph has a fixed number of rows. Fewer windows are padded with the dummy slot, whose page table is all page 0 and
whose length every step puts back to 0; prompts as `Chunks.laid_out` pads them. What is replayed is overwritten by the
next step of its shape.

What is captured is a table of step shapes, in the order of captures:

    windows              batch sizes x widths x reach of page tables; and a batch's catch-up of the draft
    prompts              rows, for few requests and for many, and for one with output that is computed again
    windows and prompts  a batch of one width, x the rows of the prompts beside it
    placed windows       batch sizes

Of each kind the largest come first: the pool of memory is taken in this order. Kernels are chosen by shapes, and
attention over short contexts has one that is faster by microseconds a layer. They count in steps of few requests, so
these are captured once more with page tables that end at `SHORT_CONTEXT`; the host knows how many pages its slots have.
(It takes trees of up to `SHORT_TREE` columns. Larger ones attend by a kernel of their own.)
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from overlap_spec_kernels import Published
from torch import Tensor

from overlap_spec.messages import TwoPartSizes
from overlap_spec.models.layers.layer_run import skipping_layers
from overlap_spec.sampling.context import COMMON_WORK, EVERY_WORK, GREEDY_WORK, SamplingWork
from overlap_spec.speculative.interfaces import ABSORBED_ROWS, SpecMethod
from overlap_spec.worker.capture import (
    ANY_KIND,
    EVERY_KIND,
    LEAST_AND_MOST,
    NO_RUN,
    FirstRuns,
    GraphRecorder,
    PartGraphs,
    Parts,
    Replay,
    capture_layers,
    capture_parts,
    no_collection,
    run_once,
)
from overlap_spec.worker.runner import EagerRunner, Part, PartKind
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step import CHUNKS, PromptShape, StepShape, captured_shape, holds

SHORT_CONTEXT = 2048  # tokens; attention's choice for such page tables is in short_decode.py
SHORT_BATCH = 8  # slots of a step that has graphs of its own for short contexts, at most
SHORT_TREE = 4  # columns of its windows, if they are trees

BESIDE_BATCHES = (8, 16, 24, 40, 64)  # windows that prompts are captured beside
BESIDE_ROWS = (256, 384, 512, 640, 768, 896, 1024)  # of both together, so that they fill the tiles of products
LEAST_PROMPTS = 64  # rows left to prompts, at least
LEAST_FLOP = 3 * 10**12  # of the layers: with less, they do not hide the launches of what follows


def two_part_sizes(width: int, num_slots: int, max_chunk: int, row_flop: int, most_rows: int) -> TwoPartSizes:
    """What is captured of windows and prompts together, where the target's layers take so much for a row.

    `most_rows`: of a captured step.
    """
    totals = [rows for rows in BESIDE_ROWS if rows <= most_rows and rows * row_flop >= LEAST_FLOP]
    sizes: dict[int, tuple[int, ...]] = {}
    for batch in sorted({min(size, num_slots) for size in BESIDE_BATCHES}):
        left = (rows - batch * width for rows in totals)
        sizes[batch] = tuple(rows for rows in left if LEAST_PROMPTS <= rows <= max_chunk)
    kept = {batch: rows for batch, rows in sizes.items() if rows}
    return TwoPartSizes(width, CHUNKS, tuple(kept), tuple(kept.values()))


class Reach:
    """How many columns the page tables of captured steps have."""

    def __init__(self, num_pages: int, width: int, page_size: int, is_tree: bool = False) -> None:
        """`is_tree`: of a method whose wider windows are trees."""
        self.all, self._is_tree = num_pages, is_tree
        self._short = min(SHORT_CONTEXT // page_size, num_pages)
        self._beyond = -(-2 * width // page_size)  # a step reads no page further behind a slot's own: `gather_window`

    def columns(self, size: int, width: int) -> list[int]:
        """Of the graphs of a batch size and a width, most first."""
        has_short = 0 < size <= SHORT_BATCH and (width <= SHORT_TREE or not self._is_tree)
        return sorted({self.all, self._short} if has_short else {self.all}, reverse=True)

    def columns_for(self, size: int, width: int, most_pages: Callable[[], int]) -> int:
        """Of the graph for slots with so many pages, at most; they are not counted where all steps have one graph."""
        if len(self.columns(size, width)) == 1 or most_pages() + self._beyond > self._short:
            return self.all
        return self._short


@dataclass(frozen=True)
class GraphSizes:
    """What is captured of an engine's steps. Of a kind without sizes nothing is."""

    width: int  # of whole windows, which prompts propose
    reach: Reach
    batches: tuple[int, ...] = ()  # of windows, ascending
    widths: tuple[int, ...] = ()  # of windows, ascending
    largest: tuple[int, ...] = ()  # batch that a step of each width has; (): any
    hides_rare: bool = False  # layers of prompts hide the launches of rare kinds of sampling, which are not captured
    absorbs_later: bool = False  # a batch has a graph more, for rows that its draft missed
    prompts: tuple[PromptShape, ...] = ()  # as `captured_shapes` has them
    beside: TwoPartSizes | None = None  # windows and prompts together
    reads_last: bool = False  # of prompts beside windows, see `captured_shape`
    placed: tuple[int, ...] = ()  # batches of windows at given places, ascending

    def shapes(self) -> Iterator[StepShape]:
        """All that are captured, in the order of captures."""
        for size in reversed(self.batches):
            for width in reversed(self.widths):
                if size in self.batches_of(width):
                    yield from [StepShape(size, width, columns) for columns in self.reach.columns(size, width)]
            if self.absorbs_later:
                yield StepShape(size, 0, self.reach.all)
        for prompts in reversed(self.prompts):
            yield StepShape(0, self.width, 0, prompts)
        both = [shape for index in range(len(self.beside_batches)) for shape in self._beside(index)]
        yield from sorted(both, key=lambda shape: (shape.prompt_rows, shape.slots), reverse=True)
        for size in reversed(self.placed):
            yield StepShape(size, 1, self.reach.all, placed=True)

    def holding(self, exact: StepShape, most_pages: Callable[[], int]) -> StepShape | None:
        """The smallest shape that holds a step of exactly this one; None: there is none. `most_pages`: see `Reach`."""
        slots, width, columns, prompts, placed = exact
        if prompts is None:
            if (size := _smallest(self.placed if placed else self.batches_of(width), slots)) == 0:
                return None
            reach = columns if placed else self.reach.columns_for(size, width, most_pages)
            return StepShape(size, width, reach, None, placed)
        if slots == 0:
            held = next((shape for shape in self.prompts if holds(shape, prompts)), None)
            return None if held is None else StepShape(0, self.width, 0, held)
        index = None if self.beside is None else self.beside.batch_for(slots, width)
        shapes = () if index is None else self._beside(index)
        return next((shape for shape in shapes if shape.prompts and holds(shape.prompts, prompts)), None)

    def batches_of(self, width: int) -> tuple[int, ...]:
        """Of windows of this width, ascending: all that a step is padded to."""
        if not self.largest or width not in self.widths:
            return self.batches
        most = self.largest[self.widths.index(width)]
        return self.batches[: bisect.bisect_left(self.batches, most) + 1]

    def kinds(self, shape: StepShape) -> tuple[SamplingWork, ...]:
        """Kinds of sampling that a shape is captured in; (): every one."""
        return COMMON_WORK if self.hides_rare and shape.prompts is not None else ()

    @property
    def beside_batches(self) -> tuple[int, ...]:
        """Of windows that prompts are captured beside, ascending."""
        return () if self.beside is None else self.beside.batches

    def _beside(self, index: int) -> list[StepShape]:
        """Of one batch of windows, ascending."""
        assert self.beside is not None
        batch, width, chunks = self.beside.batches[index], self.beside.width, self.beside.chunks
        prompts = (captured_shape(rows, chunks, rows, self.reads_last) for rows in self.beside.rows[index])
        return [StepShape(batch, width, self.reach.all, shape) for shape in prompts]


def _smallest(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest of ascending sizes that is large enough; 0 if there is none."""
    index = bisect.bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else 0


AllRows = tuple[Any, ...]  # what the layers gave, of each part


class CapturedPart(Part):
    """A part whose steps are replayed. The same object in every step of its shape."""

    def __init__(self, kind: PartKind, graphs: PartGraphs[AllRows, Published]) -> None:
        super().__init__(kind, graphs.forwarded[0])
        self._graphs = graphs

    def decide(self, work: SamplingWork) -> Published:
        """A kind that is not captured is launched while the layers run."""
        if (graphs := self._graphs.kinds.get(work)) is None:
            return self.kind.decide(self.rows, work)
        graphs.mark()
        graphs.judge()
        return graphs.judged

    def draft(self, work: SamplingWork, width: int) -> None:
        """Narrower windows after prompts of a large model are launched, and rare kinds."""
        replay = self._graphs.drafts.get((self.kind.proposed(width), work))
        if replay is None:
            self.kind.draft(self.rows, work, width)
        else:
            replay()


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
                if not shape.width:
                    self._eager.windows.absorb_missed(*inputs)
                elif runs is not NO_RUN:
                    run_once(self._parts(shape, inputs), runs)

    def capture(self, recorder: GraphRecorder) -> None:
        """Capture every shape, in the order of `GraphSizes`."""
        with torch.inference_mode(), no_collection():
            for shape, runs in self._first_runs(captures=True):
                inputs = self._dummies(shape)
                self._captured[shape] = self._capture(shape, inputs, recorder, runs)
        recorder.finish()

    def _capture(
        self, shape: StepShape, inputs: tuple[Tensor, ...], recorder: GraphRecorder, runs: FirstRuns | None
    ) -> Captured:
        if shape.width == 0:
            absorb = partial(self._eager.windows.absorb_missed, *inputs)
            absorb()
            return Captured(inputs, recorder.record("catch up", absorb)[0])
        parts, kinds = self._parts(shape, inputs), self._eager.kinds(shape)
        if len(kinds) > 1:
            layers, rows = capture_layers(parts, recorder, "layers together", runs)
            return Captured(inputs, layers, tuple(map(Part, kinds, rows)))
        graphs = capture_parts(parts, recorder, runs, self._sizes.kinds(shape))
        return Captured(inputs, graphs.layers, (CapturedPart(kinds[0], graphs),))

    def _parts(self, shape: StepShape, inputs: tuple[Tensor, ...]) -> Parts[AllRows, Published]:
        """All that a step of this shape launches. Of prompts, whole windows are proposed."""
        eager, kinds = self._eager, self._eager.kinds(shape)
        widths = [self._sizes.width if kind is eager.prompts else shape.width for kind in kinds]
        drafts = any([kind.proposed(width) > 1 for kind, width in zip(kinds, widths, strict=True)])

        def judge(rows: AllRows, work: SamplingWork) -> Published:
            return [kind.decide(each, work) for kind, each in zip(kinds, rows, strict=True)][-1]

        def draft(widths: Sequence[int], rows: AllRows, work: SamplingWork) -> None:
            for kind, each, width in zip(kinds, rows, widths, strict=True):
                kind.draft(each, work, width)

        alone = drafts and not shape.slots and not self._sizes.hides_rare
        narrow = [each for each in self._sizes.widths if alone and eager.prompts.proposed(each) < self._sizes.width]

        def absorb(rows: AllRows) -> list[Any]:
            return [eager.prompts.absorb(rows[-1], proposes) for proposes in (True, False)]

        parts = Parts(
            forward=lambda: eager.run_layers(shape, *inputs),
            judge=judge,
            draft=partial(draft, widths) if drafts else None,
            width=kinds[-1].proposed(widths[-1]),
            draft_work=self._method.draft_work,
            narrower=tuple((width, partial(draft, [width])) for width in narrow),
            absorb=absorb if shape.prompts and drafts else None,
        )
        return replace(parts, marks=eager.windows.marks) if kinds[0] is eager.windows else parts

    def _dummies(self, shape: StepShape) -> tuple[Tensor, ...]:
        """Inputs of each part for the dummy slot; of a catch-up, slots and counts."""
        inputs = tuple(kind.dummies(shape) for kind in self._eager.kinds(shape))
        return inputs if shape.width else (*inputs, torch.zeros_like(inputs[0]))

    def _first_runs(self, captures: bool = False) -> Iterator[tuple[StepShape, FirstRuns | None]]:
        """The shapes in the order of captures, and the kinds of sampling to run, to find kernels or before a capture.

        `captures`: they follow, and load what windows launch.
        """
        sizes, run = self._sizes, set[object]()
        for shape in sizes.shapes():
            if shape.prompts is None:
                every = EVERY_KIND if shape.placed else self._runs_of_windows(shape)
                yield shape, NO_RUN if captures else every
                continue
            # Kinds differ in what is done with one row of each chunk, and with windows: they are run once for each
            # number of chunks, and of windows beside them. This also takes the memory in which longer prompts draw.
            key = (shape.slots, 0 if shape.slots else shape.prompts.chunks)
            # Of windows that were captured alone, what draws is loaded; of the largest, memory is taken, and what
            # follows is run beside each number of rows.
            known = captures and shape.slots in sizes.batches and shape.slots < sizes.beside_batches[-1]
            again = NO_RUN if captures and (known or not shape.slots) else ANY_KIND
            yield shape, again if known or key in run else EVERY_KIND
            run.add(key)

    def _runs_of_windows(self, shape: StepShape) -> FirstRuns:
        """After a narrower step the draft makes the first of the guesses that it makes after the widest one.

        Kernels that draw are chosen by classes of sizes: a power of two and those below it are one at most.
        """
        sizes = self._sizes
        smaller, widest = shape.slots < sizes.batches_of(shape.width)[-1], shape.width == sizes.widths[-1]
        if smaller and shape.slots & (shape.slots - 1):
            return LEAST_AND_MOST if widest else replace(LEAST_AND_MOST, draft=(GREEDY_WORK,))
        return EVERY_KIND if widest else FirstRuns(draft=(GREEDY_WORK, EVERY_WORK))
