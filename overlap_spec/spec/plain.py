"""Proposes nothing: plain decoding is speculation with a window of one. Not here: anything else."""

import torch
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, TargetOutput
from overlap_spec.spec.interfaces import Prompts
from overlap_spec.spec.types import SlotBatch, Verdict


class NoProposer:
    """The null proposer."""

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> None:
        """Nothing to learn."""

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Nothing to learn."""

    def propose(self, batch: SlotBatch) -> Tensor:
        """Shapes: -> [B, 0] i64."""
        return torch.empty(len(batch.slots), 0, dtype=torch.int64, device=batch.slots.device)
