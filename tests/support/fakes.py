"""Models and proposers whose output can be computed by hand."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from overlap_spec_kernels import Normed, normalised
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, TargetOutput
from overlap_spec.speculative.interfaces import Guesses, Prompts, SlotBatch, Verdict
from support.given_logits import GivenLogits


class TableModel:
    """A target whose next token is `table[token]`, by a wide margin: expected text is a walk through the table."""

    hidden_size = 1

    def __init__(self, table: list[int]) -> None:
        self.vocab_size = len(table)
        self._table = torch.tensor(table)

    def forward(self, tokens: Tensor, rows: RowBatch) -> TargetOutput:
        assert len(tokens) == len(rows.positions)
        return TargetOutput(tokens[:, None].double(), tokens.new_empty(len(tokens), 0).double())

    def divide(self, lengths: Tensor, page_table: Tensor, width: int) -> Tensor | None:
        return None

    def logits(self, hidden: Tensor | Normed) -> GivenLogits:
        rows = normalised(hidden)[:, 0].long()
        return GivenLogits(torch.nn.functional.one_hot(self._table[rows], self.vocab_size).double() * 50)

    def embed(self, tokens: Tensor) -> Tensor:
        return tokens[:, None].double()

    def walk(self, token: int, steps: int) -> list[int]:
        """The tokens that follow `token`."""
        out = []
        for _ in range(steps):
            token = int(self._table[token])
            out.append(token)
        return out


@dataclass
class ScriptedProposer:
    """Guesses right for `position % (K + 1)` tokens after the root and wrong after them; needs the roots' rows.

    `num_guesses` is K, of a whole window. `missed` counts, by slot, the rows that were deferred and not caught up with.
    """

    model: TableModel
    window: Tensor  # the slot rows' window [S, W], column 0 = root
    num_guesses: int
    missed: Counter[int] = field(default_factory=Counter)

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> Tensor:
        assert prompts.next_tokens.shape == prompts.tokens.shape
        return prompts.slots[:, None]

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> Tensor:
        assert int(verdict.accept_len.max()) <= self.num_guesses
        return batch.slots[:, None]

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        self.missed.update(batch.slots.tolist())

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        for slot, count in zip(batch.slots.tolist(), counts.tolist(), strict=True):
            assert self.missed.pop(slot, 0) == count

    def propose(self, batch: SlotBatch, learnt: Tensor, num_guesses: int) -> Guesses:
        assert learnt[:, 0].equal(batch.slots)
        assert not any(self.missed[slot] for slot in batch.slots.tolist()), "drafts with rows missing"
        guesses = []
        for slot, length in zip(batch.slots.tolist(), batch.lengths.tolist(), strict=True):
            right = length % (self.num_guesses + 1)
            walk = self.model.walk(int(self.window[slot, 0]), num_guesses)
            guesses.append([t if i < right else (t + 1) % self.model.vocab_size for i, t in enumerate(walk)])
        return Guesses(torch.tensor(guesses, dtype=torch.int64).view(len(guesses), num_guesses).t().contiguous())
