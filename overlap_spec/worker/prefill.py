"""One prefill step: the host flattens chunks into rows; the device runs them, draws first tokens, proposes windows.

**Chunks** become one run of integers. A step has rows (prompt tokens) and chunks (one of each request). It may be laid
out for more of both than it has, so that one captured graph serves many steps: the rows left over belong to the last
chunk, and a chunk left over to the dummy slot.

**The step** has the parts of a decode step (`decode.py`): layers, then `decide`, which ends with what is published,
then `draft`. A chunk whose prompt goes on, and a spare one, draws for the dummy slot.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from overlap_spec_kernels import Published, PublishedColumns
from torch import Tensor

from overlap_spec.messages import TOKEN_BYTES, ChunkWork
from overlap_spec.models.interfaces import LazyLogits, RowBatch, StateRows, TargetModel, TargetOutput
from overlap_spec.sampling.context import DrawContext, History, SamplingWork
from overlap_spec.sampling.sampler import draw_after
from overlap_spec.sampling.stages import Decided, KeptLogits
from overlap_spec.speculative.interfaces import Prompts, SelfDrafting, SlotBatch, SpecMethod
from overlap_spec.speculative.rows import ChunkPlace, chunk_rows, reading_only
from overlap_spec.worker.devices import Ints
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step import PromptShape, StepShape


class Chunks:
    """The prompt chunks of one plan, in plan order. A chunk without a next token completes its prompt."""

    def __init__(self, work: Sequence[ChunkWork], fresh: Container[int] = ()) -> None:
        """`fresh`: slots that a request takes."""
        self._work = work
        self._fresh = fresh
        self._tokens = np.frombuffer(b"".join([w.tokens for w in work]), np.int32)
        self._sizes = [len(w.tokens) // TOKEN_BYTES for w in work]
        self._row_starts = [0, *accumulate(self._sizes)]  # and the end
        self._starts = [w.start for w in work]
        self._num_rows = self._row_starts[-1]

    @property
    def shape(self) -> PromptShape:
        places = tuple(map(ChunkPlace, self._starts, self._sizes))
        reads_last, are_drawn = not self.rows_out(), self._work[0].num_drawn > 0
        return PromptShape(self._num_rows, len(self._work), max(self._sizes), places, reads_last, are_drawn)

    def completed(self) -> list[int]:
        """The slots of prompts that this step completes, in plan order."""
        return [work.slot for work in self._work if work.next_token < 0]

    def counts_out(self) -> list[int]:
        """How many rows of each chunk leave the device; empty if none does."""
        counts = [max(work.rows_out[1] - work.rows_out[0], 0) for work in self._work]
        return counts if any(counts) else []

    def rows_out(self) -> tuple[list[int], ...]:
        """Rows that leave the device, the prompt token after each, and the slot of each; () without any."""
        if not any(work.rows_out[1] for work in self._work):
            return ()
        rows: list[int] = []
        tokens: list[int] = []
        slots: list[int] = []
        next_tokens = self._next_tokens()
        for work, row_start in zip(self._work, self._row_starts, strict=False):
            if not work.rows_out[1]:
                continue
            first, end = (row_start + position - work.start for position in work.rows_out)
            rows += range(first, end)
            tokens += map(int, next_tokens[first:end])
            slots += [work.slot] * (end - first)
        return rows, tokens, slots

    def laid_out(self, shape: PromptShape, dummy: int) -> Ints:
        """Every field, each starting at a multiple of 16 bytes (see `Packer.add`).

        tokens; next tokens (-1: the one drawn for the row's chunk); positions; owners, the row's chunk
        slots; the slot to start, `dummy` where the prompt goes on; last row; prompt length, 0 where it goes on
        1 where a request takes its slot
        first rows, and the end; where output is computed again, those of its prompt, then its own
        """
        num_rows, spare_chunks = self._num_rows, shape.chunks - len(self._work)
        assert shape.rows == num_rows or spare_chunks > 0, "rows that are left over need a chunk that is"
        values = np.zeros(sum(size + size % 2 for size in shape.sizes), np.int64)
        tokens, next_tokens, positions, owners, *_ = fields_of(values, shape)
        tokens[:num_rows] = self._tokens
        next_tokens[:num_rows] = self._next_tokens()
        positions[:num_rows] = self._positions()
        if len(self._work) > 1:
            owners[:num_rows] = np.repeat(np.arange(len(self._work)), self._sizes)
        if shape.rows > num_rows:
            # A captured step may be empty and have more rows than a request has positions.
            positions[num_rows:] = np.minimum(np.arange(shape.rows - num_rows), shape.max_rows - 1)
            owners[num_rows:] = shape.chunks - 1
        of_chunks = self._of_chunks(spare_chunks, dummy, shape)
        values[len(values) - len(of_chunks) :] = of_chunks
        return values

    def _of_chunks(self, spare: int, dummy: int, shape: PromptShape) -> list[int]:
        """The fields from the slots on. They are short: lists are faster than arrays."""
        work, ends, none = self._work, self._row_starts[1:], [0] * spare
        sizes, first_drawn = zip(work, self._sizes, strict=True), self._num_rows - sum(w.num_drawn for w in work)
        fields = [
            [w.slot for w in work] + [dummy] * spare,
            [w.slot if w.next_token < 0 else dummy for w in work] + [dummy] * spare,
            [end - 1 for end in ends] + none,
            [w.start + size if w.next_token < 0 else 0 for w, size in sizes] + none,
            [int(w.slot in self._fresh) for w in work] + none,
            self._row_starts[:-1] + [self._num_rows] * spare + [shape.rows],
            [0, first_drawn, first_drawn, self._num_rows] if shape.are_drawn else [],
        ]
        return [value for field in fields for value in (field + [0] if len(field) % 2 else field)]

    def _next_tokens(self) -> Ints:
        """The token after every row; -1 where it is yet to be drawn."""
        tokens = np.empty(self._num_rows, np.int64)
        tokens[:-1] = self._tokens[1:]
        for work, end in zip(self._work, self._row_starts[1:], strict=True):
            tokens[end - 1] = work.next_token
        return tokens

    def _positions(self) -> Ints:
        """Every row's absolute position."""
        ahead = [start - row for start, row in zip(self._starts, self._row_starts, strict=False)]
        return np.arange(self._num_rows) + (np.repeat(ahead, self._sizes) if any(ahead) else 0)


def fields_of(values: Ints, shape: PromptShape) -> list[Ints]:
    """Views of the fields of a step's integers, in order."""
    starts = accumulate((size + size % 2 for size in shape.sizes), initial=0)
    return [values[start : start + size] for start, size in zip(starts, shape.sizes, strict=False)]


@dataclass(frozen=True)
class PromptInputs:
    """The integers of a prefill step (`Chunks.laid_out`). N chunks; all i64."""

    tokens: Tensor  # [T]
    next_tokens: Tensor  # [T]: -1 where it is the token drawn for the row's chunk
    positions: Tensor  # [T]
    owners: Tensor  # [T]: chunks
    slots: Tensor  # [N]
    finals: Tensor  # [N]: the slot, or the dummy where the prompt goes on
    last_rows: Tensor  # [N]
    lengths: Tensor  # [N]: of completed prompts, else 0
    fresh: Tensor  # [N]: 1 where a request takes its slot
    row_starts: Tensor  # [N + 1]
    drawn: Tensor | None = None  # [4]: first rows and ends, of a prompt and of the output behind it

    @classmethod
    def of(cls, packed: Tensor, shape: PromptShape) -> "PromptInputs":
        """Views of the packed integers."""
        starts = accumulate((size + size % 2 for size in shape.sizes), initial=0)
        return cls(*(packed[start : start + size] for start, size in zip(starts, shape.sizes, strict=False)))


class ChunksRead(NamedTuple):
    """The chunks of a step, and what a forward takes of them."""

    inputs: PromptInputs
    batch: SlotBatch  # of `finals`, at the prompts' ends; sampling is not gathered
    rows: RowBatch

    @property
    def tokens(self) -> Tensor:
        """Shapes: [T] i64."""
        return self.inputs.tokens


@dataclass(frozen=True)
class Prefilled:
    """What the layers gave for the chunks of a step, whichever way tokens are drawn. `decide` writes the last two."""

    inputs: PromptInputs
    batch: SlotBatch  # of `finals`, at the prompts' ends; sampling is not gathered
    rows: RowBatch
    output: TargetOutput
    drawn: Tensor  # [N] i64
    published: Published  # the token drawn, or -1 where the prompt goes on; no guesses


class PrefillStep:
    """Prompts, as a `PromptKind`."""

    def __init__(
        self, slots: SlotRows, target: TargetModel, method: SpecMethod, page_size: int, reads_last: bool = False
    ) -> None:
        """`reads_last`: of the last layer, the draft reads no other rows than chunks' last ones."""
        self._slots = slots
        self.target = target
        self.method = method
        self._page_size = page_size
        self.reads_last = reads_last
        self._token_ids = torch.arange(target.vocab_size, device=slots.length.device)

    def dummies(self, shape: StepShape) -> Tensor:
        assert shape.prompts is not None
        return torch.from_numpy(Chunks([]).laid_out(shape.prompts, self._slots.dummy)).to(self._slots.length.device)

    def read(self, packed: Tensor, shape: StepShape) -> ChunksRead:
        """See `PartKind`. Shapes: packed, as `Chunks.laid_out` has it."""
        prompts = shape.prompts
        assert prompts is not None
        inputs, tables = PromptInputs.of(packed, prompts), self._slots.page_table
        state, drawn = StateRows(inputs.slots, are_final=True), inputs.drawn
        if drawn is not None:  # of one request
            state = StateRows(inputs.slots[:1], True, drawn[:2].int(), drawn[2:])
        of_rows = inputs.owners, inputs.positions, inputs.row_starts, prompts.max_rows
        rows = chunk_rows(tables[inputs.slots], *of_rows, self._page_size, prompts.places, state)
        if self.reads_last and prompts.reads_last:
            # Of a prompt that goes on and of a spare chunk nothing is read: the first key is enough to attend to.
            rows = reading_only(rows, inputs.last_rows, (inputs.lengths - 1).clamp(min=0))
        batch = SlotBatch(inputs.finals, inputs.lengths, tables[inputs.finals], self._slots.no_sampling)
        return ChunksRead(inputs, batch, rows)

    def ran(self, read: ChunksRead, output: TargetOutput) -> Prefilled:
        inputs, rows = read.inputs, read.rows
        assert rows.cache_rows is not None, "chunks say where their rows are"
        self._slots.pool.write_chunks(rows.cache_rows, inputs.tokens)
        published = Published.allocate(len(inputs.finals), PublishedColumns(1), inputs.finals.device)
        return Prefilled(inputs, read.batch, rows, output, torch.empty_like(inputs.finals), published)

    def decide(self, prefilled: Prefilled, sampling: SamplingWork) -> Published:
        inputs, batch, published = prefilled.inputs, prefilled.batch, prefilled.published
        hidden = prefilled.output.hidden
        hidden = hidden[inputs.last_rows] if prefilled.rows.read is None else hidden
        lazy_logits: LazyLogits = self.target.logits(hidden)
        lazy_logits, last = KeptLogits(lazy_logits) if sampling.outputs else lazy_logits, inputs.lengths - 1
        drawing = self._slots.sampling(batch.slots, sampling)
        context = DrawContext(History(drawing, batch.page_table, last), self._token_ids, last[:, None], of_target=True)
        published_tokens = draw_after(lazy_logits, context).squeeze(1)
        drawn = published_tokens.clamp(min=0)  # the slot of a request that ends with `NO_TOKEN` runs until it is freed
        self._slots.start(batch, drawn)
        prefilled.drawn.copy_(drawn)
        published.tokens.copy_(published_tokens.masked_fill(inputs.finals == self._slots.dummy, -1)[:, None])
        published.num_guesses.zero_()
        if not sampling.outputs:
            return published
        decided = Decided(drawn[:, None], batch.slots)
        return published._replace(outputs=self._slots.write_outputs(lazy_logits, decided))

    def draw_nothing(self, prefilled: Prefilled) -> Published:
        """What `decide` publishes where all prompts go on, without logits."""
        prefilled.drawn.zero_()
        prefilled.published.tokens.fill_(-1)
        prefilled.published.num_guesses.zero_()
        return prefilled.published

    def outputs_of(self, prefilled: Prefilled, rows: Tensor, tokens: Tensor, slots: Tensor) -> list[Tensor]:
        """Every output of prompt tokens, each after its row. Sync: never. Shapes: [N] i64 -> [N, n]."""
        hidden = prefilled.output.hidden[rows]
        return [each.write_prompts(self.target.logits, hidden, tokens, slots) for each in self._slots.outputs]

    def draft(self, prefilled: Prefilled, sampling: SamplingWork, width: int) -> None:
        width = self.proposed(width)
        learnt = self.absorb(prefilled, width > 1)
        if width == 1:
            return
        drawing = self._slots.draft_sampling(prefilled.inputs.finals, self.method.draft_work(sampling))
        after = replace(prefilled.batch, sampling=drawing, shares=self._divided(prefilled.batch))
        self._slots.set_guesses(after, self.method.proposer.propose(after, learnt, width - 1))

    def proposed(self, width: int) -> int:
        """See `PartKind`. Guesses that cost nothing fill whole windows."""
        return self._slots.width if isinstance(self.method.proposer, SelfDrafting) else width

    def absorb(self, prefilled: Prefilled, proposes: bool = False) -> Any:
        """The part of `draft` that a prompt needs that goes on. What is learnt is of use if it `proposes`."""
        inputs = prefilled.inputs
        next_tokens = torch.where(inputs.next_tokens < 0, prefilled.drawn[inputs.owners], inputs.next_tokens)
        ends = inputs.last_rows, inputs.finals, inputs.slots, inputs.fresh
        prompts = Prompts(inputs.tokens, next_tokens, *ends, proposes)
        return self.method.proposer.prefill(prompts, prefilled.rows, prefilled.output)

    def _divided(self, batch: SlotBatch) -> Tensor | None:
        """How a chain's attention is divided: as in decode, whose kernels are loaded."""
        method = self.method
        if self._slots.width == 1 or method.tree is not None or isinstance(method.proposer, SelfDrafting):
            return None
        return self.target.divide(batch.lengths, batch.page_table, 1)
