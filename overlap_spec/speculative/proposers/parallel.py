"""Proposes with an EAGLE-3 head that has a mask row (P-EAGLE): all guesses, of a chain or a tree, come of one forward.

    committed  x0 .. xL | guesses g1 .. gK        L = length: the root xL has no target KV yet
    draft rows 0 .. L-1 |                         as in `autoregressive.py`; row L-1 predicts g1
                        | L .. L+K-2              (mask, mask): row L+i predicts g(i+2), from the rows before it alone

A decode step runs the rows of its window and the masks in one forward, though it does not know on the host where the
committed ones end: each row becomes a mask by the accept length. K/V of masks is overwritten by the step after, as that
of guesses is. Their number follows the levels that the window can have, and its pages reach as far.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec.models.interfaces import (
    DraftHead,
    DraftProfile,
    LoadedDraft,
    MarginalLogits,
    MaskRow,
    RowBatch,
    TargetOutput,
)
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.speculative.drafts import EngineShape
from overlap_spec.speculative.interfaces import Guesses, Prompts, SlotBatch, Verdict
from overlap_spec.speculative.proposers.autoregressive import AutoregressiveProposer, DeferredRows
from overlap_spec.speculative.proposers.block import BlockGuesser, with_trees
from overlap_spec.speculative.proposers.tree import Branching
from overlap_spec.speculative.rows import window_rows


@dataclass(frozen=True)
class ParallelDraft:
    """A head with a mask row (`LoadedProposer`)."""

    draft: LoadedDraft[DraftHead]
    mask: MaskRow
    num_steps: int
    tree: Branching | None = None  # None: it guesses chains

    @property
    def profile(self) -> DraftProfile:
        return with_trees(replace(self.draft.profile, has_masks=True), self.tree)

    def attach(self, cache: KVCache, shape: EngineShape) -> "ParallelProposer":
        head = self.draft.attach(cache, shape.num_positions, shape.attention)
        size = self.profile.features_size(shape.hidden_size)
        deferred = DeferredRows.allocate(shape.num_rows, shape.max_deferred, size, shape.dtype, shape.device)
        guesser = BlockGuesser.of(shape, self.num_steps, head.target_ids, self.tree)
        return ParallelProposer(head, self.mask, shape.page_size, deferred, guesser, self.num_steps)


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
        guesser: BlockGuesser,
        num_steps: int,
    ) -> None:
        self._head = head
        self._mask = mask
        self._page_size = page_size
        self._guesser = guesser
        self._num_steps = num_steps
        self._chain = AutoregressiveProposer(head, page_size, deferred)

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
        """Guess from the rows. Of a tree, as many levels as so many guesses can have."""
        if num_guesses == 0:
            return Guesses(batch.slots.new_empty(0, len(batch.slots)))
        num_levels = min(self._num_steps, num_guesses)
        if learnt.shape[1] < num_levels:
            learnt = torch.cat((learnt, self._run_masks(batch, num_levels - 1)), 1)
        by_level = learnt[:, :num_levels].transpose(0, 1).contiguous()  # [L, B, H]
        logits = MarginalLogits(lambda rows: self._head.logits(self._head.enter(rows)), by_level)
        return self._guesser.guess(logits, batch, num_levels, num_guesses)

    def _run_masks(self, batch: SlotBatch, num_masks: int) -> Tensor:
        """Of slots whose committed rows have run: masks alone. Shapes: -> [B, num_masks, H]."""
        count = len(batch.slots)
        positions = batch.lengths[:, None] + torch.arange(num_masks, device=batch.lengths.device)
        tokens = torch.full((count * num_masks,), self._mask.token, device=positions.device)
        features = self._mask.features.expand(count * num_masks, -1).contiguous()
        drafted = self._head.forward(tokens, features, window_rows(batch, positions, self._page_size))
        return drafted.values.view(count, num_masks, -1)
