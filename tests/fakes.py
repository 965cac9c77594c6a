"""Models and proposers that can be computed by hand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, TargetOutput
from overlap_spec.spec.interfaces import Prompts
from overlap_spec.spec.types import SlotBatch, Verdict


class TableModel:
    """A target whose next token is `table[token]`, by a wide margin: expected text is a walk through the table."""

    hidden_size = 1

    def __init__(self, table: list[int]) -> None:
        self.vocab_size = len(table)
        self._table = torch.tensor(table)

    def forward(self, tokens: Tensor, rows: RowBatch) -> TargetOutput:
        assert len(tokens) == len(rows.positions)
        return TargetOutput(tokens[:, None].double(), tokens.new_empty(len(tokens), 0).double())

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(self._table[hidden[:, 0].long()], self.vocab_size).double() * 50

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
    """Guesses right for `position % (K + 1)` tokens after the root and wrong after them; needs the roots' rows."""

    model: TableModel
    window: Tensor  # the slot rows' window [S, W], column 0 = root
    num_guesses: int

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> None:
        assert prompts.next_tokens.shape == prompts.tokens.shape

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> None:
        assert int(verdict.accept_len.max()) <= self.num_guesses

    def propose(self, batch: SlotBatch) -> Tensor:
        guesses = []
        for slot, length in zip(batch.slots.tolist(), batch.lengths.tolist(), strict=True):
            right = length % (self.num_guesses + 1)
            walk = self.model.walk(int(self.window[slot, 0]), self.num_guesses)
            guesses.append([t if i < right else (t + 1) % self.model.vocab_size for i, t in enumerate(walk)])
        return torch.tensor(guesses, dtype=torch.int64).view(len(guesses), self.num_guesses)
