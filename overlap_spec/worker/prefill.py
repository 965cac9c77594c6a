"""One prefill step, as device work alone: run chunks, draw first tokens, propose first windows.

It is cut in two where tokens may leave, as a decode step is (`decode.py`): `draw` ends with what is to be published,
`draft` works after it. A seat whose prompt goes on, or that is nobody's, draws for the dummy slot: nothing comes of it.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, TargetModel, TargetOutput
from overlap_spec.sampling.context import DrawContext
from overlap_spec.sampling.sampler import draw_after
from overlap_spec.sampling.types import SamplingWork
from overlap_spec.spec.interfaces import Prompts, SpecMethod
from overlap_spec.spec.rows import chunk_rows
from overlap_spec.spec.types import SlotBatch
from overlap_spec.worker.chunks import PromptShape
from overlap_spec.worker.slots import SlotRows


@dataclass(frozen=True)
class PromptInputs:
    """The integers of a prefill step (`Chunks.laid_out`). N seats; all i64."""

    tokens: Tensor  # [T]
    next_tokens: Tensor  # [T]: -1 where it is the token drawn for the row's seat
    positions: Tensor  # [T]
    owners: Tensor  # [T]: seats
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


@dataclass(frozen=True)
class Prefilled:
    """What `draw` leaves for `draft`. `published`: the token drawn or -1, and 0: a prefill has no guesses."""

    prompts: Prompts
    rows: RowBatch
    output: TargetOutput
    after: SlotBatch
    published: Tensor  # [N, 2] i64


class Prefiller(Protocol):
    """Runs prefill steps, launching each operation or replaying a graph."""

    def shape_for(self, exact: PromptShape) -> PromptShape:
        """What to lay a step out for."""
        ...

    def draw(self, packed: Tensor, shape: PromptShape, sampling: SamplingWork) -> Prefilled:
        """Run the chunks, draw first tokens, start their slots. Sync: never."""
        ...

    def draft(self, prefilled: Prefilled) -> None:
        """Absorb the prompts and propose first windows. Sync: never."""
        ...


class PrefillStep:
    """The step itself, operation by operation."""

    def __init__(self, slots: SlotRows, target: TargetModel, method: SpecMethod, page_size: int) -> None:
        self._slots = slots
        self._target = target
        self._proposer = method.proposer
        self._page_size = page_size
        self._token_ids = torch.arange(target.vocab_size, device=slots.length.device)

    def shape_for(self, exact: PromptShape) -> PromptShape:
        """Nothing is padded."""
        return exact

    def draw(self, packed: Tensor, shape: PromptShape, sampling: SamplingWork) -> Prefilled:
        """See `Prefiller`."""
        inputs = PromptInputs.of(packed, shape)
        page_table = self._slots.page_table[inputs.slots]
        rows = chunk_rows(
            page_table, inputs.owners, inputs.positions, inputs.row_starts, shape.max_rows, self._page_size
        )
        output = self._target.forward(inputs.tokens, rows)
        assert rows.cache_rows is not None, "chunks say where their rows are"
        self._slots.pool.write_chunks(rows.cache_rows, inputs.tokens)
        batch = self._slots.batch(inputs.finals, sampling)
        lazy_logits, last = self._target.logits(output.hidden[inputs.last_rows]), inputs.lengths - 1
        context = DrawContext(batch.sampling, self._token_ids, batch.page_table, last, last[:, None])
        drawn = draw_after(lazy_logits, context).squeeze(1)
        next_tokens = torch.where(inputs.next_tokens < 0, drawn[inputs.owners], inputs.next_tokens)
        published = drawn.masked_fill(inputs.finals == self._slots.dummy, -1)
        return Prefilled(
            Prompts(inputs.tokens, next_tokens, inputs.last_rows, inputs.finals, inputs.slots, inputs.fresh),
            rows,
            output,
            self._slots.start(batch, inputs.lengths, drawn),
            torch.stack((published, torch.zeros_like(published)), 1),
        )

    def draft(self, prefilled: Prefilled) -> None:
        """See `Prefiller`."""
        learnt = self._proposer.prefill(prefilled.prompts, prefilled.rows, prefilled.output)
        guesses = self._proposer.propose(prefilled.after, learnt, self._slots.width - 1)
        self._slots.set_guesses(prefilled.after, guesses)
