"""One prefill step, as device work alone: run chunks, draw first tokens, propose first windows.

It has the parts of a decode step (`decode.py`): layers, then `decide`, which ends with what is published, then `draft`.
A chunk whose prompt goes on, and a spare one, draws for the dummy slot.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from overlap_spec_kernels import Published, PublishedColumns
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits, RowBatch, TargetModel, TargetOutput
from overlap_spec.sampling.context import DrawContext, History, SamplingWork
from overlap_spec.sampling.sampler import draw_after
from overlap_spec.sampling.stages import Decided, KeptLogits
from overlap_spec.speculative.interfaces import Prompts, SelfDrafting, SlotBatch, SpecMethod
from overlap_spec.speculative.rows import chunk_rows, reading_only
from overlap_spec.worker.chunks import Chunks, PromptShape
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step import StepShape


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
        rows = chunk_rows(
            tables[inputs.slots],
            inputs.owners,
            inputs.positions,
            inputs.row_starts,
            prompts.max_rows,
            self._page_size,
            prompts.places,
        )
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
        learnt = self.absorb(prefilled)
        width = self.proposed(width)
        if width == 1:
            return
        drawing = self._slots.draft_sampling(prefilled.inputs.finals, self.method.draft_work(sampling))
        after = replace(prefilled.batch, sampling=drawing, shares=self._divided(prefilled.batch))
        self._slots.set_guesses(after, self.method.proposer.propose(after, learnt, width - 1))

    def proposed(self, width: int) -> int:
        """See `PartKind`. Guesses that cost nothing fill whole windows."""
        return self._slots.width if isinstance(self.method.proposer, SelfDrafting) else width

    def absorb(self, prefilled: Prefilled) -> Any:
        """The part of `draft` that a prompt needs that goes on. Returns what the proposer has learnt."""
        inputs = prefilled.inputs
        next_tokens = torch.where(inputs.next_tokens < 0, prefilled.drawn[inputs.owners], inputs.next_tokens)
        prompts = Prompts(inputs.tokens, next_tokens, inputs.last_rows, inputs.finals, inputs.slots, inputs.fresh)
        return self.method.proposer.prefill(prompts, prefilled.rows, prefilled.output)

    def _divided(self, batch: SlotBatch) -> Tensor | None:
        """How a chain's attention is divided: as in decode, whose kernels are loaded."""
        method = self.method
        if self._slots.width == 1 or method.tree is not None or isinstance(method.proposer, SelfDrafting):
            return None
        return self.target.divide(batch.lengths, batch.page_table, 1)
