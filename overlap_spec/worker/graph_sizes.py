"""What is captured as CUDA graphs: a table of step shapes, in the order of captures, and which of them holds a step.

    windows              batch sizes x widths x reach of page tables; and a batch's catch-up of the draft
    prompts              rows, for few requests and for many
    windows and prompts  a batch of one width, x the rows of the prompts beside it
    placed windows       batch sizes

Of each kind the largest come first: the pool of memory is taken in this order.

Kernels are chosen by shapes, and attention over short contexts has one that is faster by microseconds a layer. They
count in steps of few requests, so these are captured once more with page tables that end at `SHORT_CONTEXT`; the host
knows how many pages its slots have. (Trees attend by a kernel of their own; their windows of one column are chains.)
"""

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from overlap_spec.messages import TwoPartSizes
from overlap_spec.worker.step import PromptShape, StepShape

SHORT_CONTEXT = 2048  # tokens; attention's choice for such page tables is in short_decode.py
SHORT_BATCH = 8  # slots of a step that has graphs of its own for short contexts, at most

ROWS = (16, 32, 64, 128, 256, 512)  # prompt tokens that are captured for
FINER_ROWS = (384, 640, 768, 896, 1024)  # and these, where 128 rows more take a millisecond or longer
FINER_BELOW = 4096  # rows of a captured step, at most, of a model that is so large
CHUNKS = 8  # requests in a captured step; one more chunk takes the rows that are left over
BATCH_ROWS = (512, 1024, 1536, 2048, 3072, 4096)  # of steps with more requests
BATCH_CHUNKS = 64
LONGEST = 1024  # rows of one request in such a step, and more than may be left over
READS_ALL = 256  # rows of a step, at most, that computes all of the last layer: its time is that of the weights

BESIDE_BATCHES = (8, 16, 24, 40, 64)  # windows that prompts are captured beside
BESIDE_ROWS = (256, 384, 512, 640, 768, 896, 1024)  # of both together, so that they fill the tiles of products
LEAST_PROMPTS = 64  # rows left to prompts, at least
LEAST_FLOP = 3 * 10**12  # of the layers: with less, they do not hide the launches of what follows


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


def holds(shape: PromptShape, exact: PromptShape) -> bool:
    """Whether so many rows and chunks, one more for the rows that are left over, and what is read of them fit."""
    fits = exact.rows <= shape.rows and exact.chunks < shape.chunks and exact.max_rows <= shape.max_rows
    return fits and (exact.reads_last or not shape.reads_last)


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
        has_short = 0 < size <= SHORT_BATCH and (width == 1 or not self._is_tree)
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
    absorbs_later: bool = False  # a batch has a graph more, for rows that its draft missed
    prompts: tuple[PromptShape, ...] = ()  # as `captured_shapes` has them
    beside: TwoPartSizes | None = None  # windows and prompts together
    reads_last: bool = False  # of prompts beside windows, see `captured_shape`
    placed: tuple[int, ...] = ()  # batches of windows at given places, ascending

    def shapes(self) -> Iterator[StepShape]:
        """All that are captured, in the order of captures."""
        for size in reversed(self.batches):
            for width in reversed(self.widths):
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
            if (size := _smallest(self.placed if placed else self.batches, slots)) == 0:
                return None
            reach = columns if placed else self.reach.columns_for(size, width, most_pages)
            return StepShape(size, width, reach, None, placed)
        if slots == 0:
            held = next((shape for shape in self.prompts if holds(shape, prompts)), None)
            return None if held is None else StepShape(0, self.width, 0, held)
        index = None if self.beside is None else self.beside.batch_for(slots, width)
        shapes = () if index is None else self._beside(index)
        return next((shape for shape in shapes if shape.prompts and holds(shape.prompts, prompts)), None)

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
