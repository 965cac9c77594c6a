"""Proposes a chain with a small model that attends to the target's own keys and values, and has none itself.

    committed   x0 .. xL | guesses        L = length: the root xL has no KV yet
    guess 1     (hidden state of L-1, xL) at position L-1, sees 0 .. L-1
    guess i+1   (own hidden state, guess i) at the same position, sees the same

So nothing is absorbed and nothing deferred: what a step learns is the target's hidden state after the last committed
token that it has read, and the root.
"""

from typing import NamedTuple, Protocol

import torch
from overlap_spec_kernels import select_rows
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits, RowBatch, TargetOutput
from overlap_spec.speculative.interfaces import Guesses, Prompts, SlotBatch, Verdict
from overlap_spec.speculative.rows import window_rows
from overlap_spec.speculative.verifiers import DraftProbs, draw_guess


class SharedKVModel(Protocol):
    """A model that is attached to the target's KV cache."""

    target_ids: Tensor  # [Vd] i64: target id of each column of its logits

    def forward(self, tokens: Tensor, hidden: Tensor, rows: RowBatch) -> Tensor:
        """Rows write nothing. Shapes: tokens [R] i64, hidden [R, H], of the target's width -> [R, h]."""

    def next_hidden(self, output: Tensor) -> Tensor:
        """Shapes: [R, h] -> [R, H]."""

    def logits(self, output: Tensor) -> LazyLogits:
        """Shapes: [R, h] -> logits [R, Vd]."""


class LastRow(NamedTuple):
    """What is known of the end of each slot."""

    hidden: Tensor  # [B, H]: of the target, after its final norm, of the last token that it has read
    root: Tensor  # [B] i64


class SharedKVProposer:
    """A `Proposer[LastRow]`."""

    def __init__(self, model: SharedKVModel, page_size: int, probs: DraftProbs | None = None) -> None:
        """`probs`: guesses are drawn, and it is told what from; else they share the target's noise."""
        self._model = model
        self._page_size = page_size
        self._probs = probs

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> LastRow:
        """Nothing is absorbed: the last row of each chunk is kept."""
        hidden = output.hidden if rows.read is not None else output.hidden[prompts.last_rows]
        return LastRow(hidden, prompts.next_tokens[prompts.last_rows])

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> LastRow:
        """Find the last accepted row of each window, and the token after it."""
        hidden = select_rows(output.hidden.view(*verdict.tokens.shape, -1), verdict.accept_len)
        root = verdict.follow.view_as(verdict.tokens).gather(1, verdict.accept_len[:, None]).squeeze(1)
        return LastRow(hidden, root)

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Nothing is missed: a step that needs guesses reads what it needs itself."""

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        """Nothing was missed."""

    def propose(self, batch: SlotBatch, learnt: LastRow, num_guesses: int) -> Guesses:
        """Draw each guess, with the noise the target will use at that position."""
        last = (batch.lengths - 1).clamp(min=0)  # the dummy slot has no tokens
        rows = window_rows(batch, last[:, None], self._page_size)
        tokens, hidden = learnt.root, learnt.hidden
        guesses: list[Tensor] = []
        for _ in range(num_guesses):
            output = self._model.forward(tokens, hidden, rows)
            logits = self._model.logits(output)
            guesses.append(draw_guess(logits, batch, guesses, self._model.target_ids, self._probs))
            tokens, hidden = guesses[-1], self._model.next_hidden(output)
        return Guesses(torch.stack(guesses) if guesses else batch.slots.new_empty(0, len(batch.slots)))
