"""Proposes a chain with an EAGLE-3 head that has a mask row (P-EAGLE): all guesses come of one forward.

    committed  x0 .. xL | guesses g1 .. gK        L = length: the root xL has no target KV yet
    draft rows 0 .. L-1 |                         as in `autoregressive.py`; row L-1 predicts g1
                        | L .. L+K-2              (mask, mask): row L+i predicts g(i+2), from the rows before it alone

A decode step runs the rows of its window and the masks in one forward, though it does not know on the host where the
committed ones end: each row becomes a mask by the accept length. K/V of masks is overwritten by the step after, as that
of guesses is. Their number follows the window, whose pages reach as far.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec.models.interfaces import DraftHead, DraftProfile, LoadedDraft, MaskRow, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.speculative.drafts import EngineShape
from overlap_spec.speculative.interfaces import Guesses, Prompts, SlotBatch, Verdict
from overlap_spec.speculative.proposers.autoregressive import AutoregressiveProposer, DeferredRows
from overlap_spec.speculative.rows import window_rows
from overlap_spec.speculative.verifiers import DraftProbs, draw_guess


@dataclass(frozen=True)
class ParallelDraft:
    """A head with a mask row (`LoadedProposer`)."""

    draft: LoadedDraft[DraftHead]
    mask: MaskRow
    num_steps: int

    @property
    def profile(self) -> DraftProfile:
        return self.draft.profile

    def attach(self, cache: KVCache, shape: EngineShape) -> "ParallelProposer":
        head = self.draft.attach(cache, shape.num_positions, shape.attention)
        size = self.profile.features_size(shape.hidden_size)
        deferred = DeferredRows.allocate(shape.num_rows, shape.max_deferred, size, shape.dtype, shape.device)
        if shape.probs is not None:
            shape.probs.allocate(shape.num_rows, self.num_steps, head.target_ids)
        return ParallelProposer(head, self.mask, shape.page_size, deferred, shape.probs)


class ParallelProposer:
    """A `Proposer[Tensor]`. It learns the head's output at the row of each guess, as far as it has run.

    Shapes: [B, n, H], n = 1 after a prompt, whose masks have not run.
    """

    def __init__(
        self,
        head: DraftHead,
        mask: MaskRow,
        page_size: int,
        deferred: DeferredRows,
        probs: DraftProbs | None = None,
    ) -> None:
        """`probs`: guesses are drawn, and it is told what from; else they share the target's noise."""
        self._head = head
        self._mask = mask
        self._page_size = page_size
        self._probs = probs
        self._chain = AutoregressiveProposer(head, page_size, deferred, probs)

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> Tensor:
        """Absorb prompt chunks: every row, with the token that follows it."""
        return self._chain.prefill(prompts, rows, output)[:, None]

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> Tensor:
        """Absorb what is kept of the window and run the masks after it, W - 2 of them, in one forward."""
        count, width = verdict.tokens.shape
        if width <= 2:
            return self._chain.extend(batch, rows, output, verdict)[:, None]
        columns = torch.arange(2 * width - 2, device=verdict.tokens.device)
        is_mask = columns > verdict.accept_len[:, None]
        tokens = F.pad(verdict.follow.view(count, width), (0, width - 2)).masked_fill(is_mask, self._mask.token)
        features = F.pad(self._head.fuse(output).view(count, width, -1), (0, 0, 0, width - 2))
        features = torch.where(is_mask[:, :, None], self._mask.features, features)
        placed = window_rows(batch, batch.lengths[:, None] + columns, self._page_size)
        drafted = self._head.forward(tokens.view(-1), features.view(len(placed.positions), -1), placed).values
        of_guesses = verdict.accept_len[:, None] + columns[: width - 1]
        drafted = drafted.view(count, len(columns), -1)
        return drafted.gather(1, of_guesses[:, :, None].expand(-1, -1, drafted.shape[2]))

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        self._chain.defer(batch, output, verdict)

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        self._chain.catch_up(batch, counts)

    def propose(self, batch: SlotBatch, learnt: Tensor, num_guesses: int) -> Guesses:
        """Draw each guess from its own row, with the noise the target will use at that position."""
        if num_guesses == 0:
            return Guesses(batch.slots.new_empty(0, len(batch.slots)))
        if learnt.shape[1] < num_guesses:
            learnt = torch.cat((learnt, self._run_masks(batch, num_guesses - 1)), 1)
        values = learnt[:, :num_guesses].transpose(0, 1).contiguous()  # [K, B, H]
        head, target_ids = self._head, self._head.target_ids
        if self._probs is None and not batch.sampling.needs_logits:
            logits = head.logits(head.enter(values.flatten(0, 1)))
            return Guesses(logits.argmax(target_ids).view(num_guesses, -1))
        guesses: list[Tensor] = []
        for row in values:
            guesses.append(draw_guess(head.logits(head.enter(row)), batch, guesses, target_ids, self._probs))
        return Guesses(torch.stack(guesses))

    def _run_masks(self, batch: SlotBatch, num_masks: int) -> Tensor:
        """Of slots whose committed rows have run: masks alone. Shapes: -> [B, num_masks, H]."""
        count = len(batch.slots)
        positions = batch.lengths[:, None] + torch.arange(num_masks, device=batch.lengths.device)
        tokens = torch.full((count * num_masks,), self._mask.token, device=positions.device)
        features = self._mask.features.expand(count * num_masks, -1).contiguous()
        drafted = self._head.forward(tokens, features, window_rows(batch, positions, self._page_size))
        return drafted.values.view(count, num_masks, -1)
