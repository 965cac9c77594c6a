"""Proposes nothing: plain decoding is speculation with a window of one."""

from typing import Any

import torch
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, TargetOutput
from overlap_spec.speculative.interfaces import Guesses, Prompts, SlotBatch, Verdict


class NoProposer:
    """The null proposer."""

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> Any:
        """Nothing to learn."""

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> Any:
        """Nothing to learn."""

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Nothing to learn later."""

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        """Nothing was missed."""

    def propose(self, batch: SlotBatch, learnt: Any, num_guesses: int) -> Guesses:
        return Guesses(torch.full((num_guesses, len(batch.slots)), -1, dtype=torch.int64, device=batch.slots.device))
