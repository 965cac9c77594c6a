"""Proposes a chain with a draft head that runs one step per guess (EAGLE family).

Not here: the head (`models/eagle3.py`) and the judging. The row rule, from which everything follows: the draft
row at position p holds (features of p, token of p + 1), writes its KV at p and predicts the token of p + 2.

    committed  x0 .. xL | guesses          L = length: the root xL has no target KV yet
    draft rows 0 .. L-1 |                  row L-1 = (features of L-1, xL) predicts guess 1, at position L+1
                        | L, L+1, ..       row L+i = (own output, guess i+1) predicts guess i+2
"""

import torch
from torch import Tensor

from overlap_spec.models.interfaces import DraftHead, RowBatch, TargetOutput
from overlap_spec.spec.interfaces import Prompts
from overlap_spec.spec.rows import single_rows
from overlap_spec.spec.sampler import draw
from overlap_spec.spec.types import SlotBatch, Verdict


class AutoregressiveProposer:
    """Remembers one head output per slot: that of the last committed draft row, from which guess 1 is drawn."""

    def __init__(self, head: DraftHead, num_guesses: int, outputs: Tensor, page_size: int) -> None:
        self._head = head
        self._num_guesses = num_guesses
        self._outputs = outputs  # [S, Hd]
        self._page_size = page_size

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> None:
        """Absorb prompt chunks: every row, with the token that follows it."""
        drafted = self._head.forward(prompts.next_tokens, self._head.fuse(output), rows)
        self._outputs[prompts.slots] = drafted[prompts.last_rows]

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Absorb the window: row j takes the token committed after column j; later rows are overwritten next time."""
        tokens = verdict.tokens.clamp(min=0).reshape(-1)
        drafted = self._head.forward(tokens, self._head.fuse(output), rows)
        per_slot = drafted.view(*verdict.tokens.shape, -1)
        last = verdict.accept_len[:, None, None].expand(-1, 1, per_slot.shape[-1])
        self._outputs[batch.slots] = per_slot.gather(1, last).squeeze(1)

    def propose(self, batch: SlotBatch) -> Tensor:
        """Draw each guess with the noise the target will use at that position. Shapes: -> [B, K] i64."""
        drafted = self._outputs[batch.slots]
        guesses: list[Tensor] = []
        for i in range(self._num_guesses):
            if guesses:
                rows = single_rows(batch, batch.lengths + (i - 1), self._page_size)
                drafted = self._head.forward(guesses[-1], self._head.next_features(drafted), rows)
            logits = self._head.logits(drafted)[:, None]
            columns = draw(logits, (batch.lengths + 1 + i)[:, None], batch.sampling, self._head.target_ids)
            guesses.append(self._head.target_ids[columns.squeeze(1)])
        return torch.stack(guesses, 1)
