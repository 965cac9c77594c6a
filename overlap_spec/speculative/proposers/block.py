"""Proposes with one forward: the root and a mask for each guess, which see each other and the context.

    committed  x0 .. xL | guesses g1 .. gK        L = length: the root xL has no target KV yet
    context    0 .. L-1 |                         keys and values of the target's hidden states, written by steps before
    block             L | L+1 .. L+K              [xL, mask, .., mask]: row L+i guesses gi

That is DFlash's block: each guess is drawn from its own row, as if the guesses before it were not known. DSpark's has
no row to spare: row L+i guesses g(i+1), and its logits depend on the guess before it.

A block has the same number of rows in every step: with fewer masks its rows would be others, and a narrow step would
guess less well.

Guesses are a chain. Those that are drawn as if the ones before were not known can be a tree, too: of the likeliest
tokens of every row, the best paths (`tree.Marginals`).
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from overlap_spec.models.interfaces import DraftProfile, LoadedDraft, RowBatch, TargetOutput, TreeKeys, TreeShape
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.speculative.drafts import EngineShape, children_logs
from overlap_spec.speculative.interfaces import ABSORBED_ROWS, Guesses, Prompts, SlotBatch, Verdict
from overlap_spec.speculative.proposers.autoregressive import DeferredRows
from overlap_spec.speculative.proposers.tree import Branching, GuessLogits, Marginals
from overlap_spec.speculative.rows import earlier_rows, tree_rows
from overlap_spec.speculative.verifiers import DraftProbs, draw_guess


@dataclass(frozen=True)
class BlockGuesser:
    """Makes guesses of a block's logits."""

    target_ids: Tensor  # [Vd] i64
    probs: DraftProbs | None = None  # guesses are drawn, and it is told what from; else they share the target's noise
    trees: Marginals | None = None  # None: chains

    @classmethod
    def of(cls, shape: EngineShape, num_levels: int, target_ids: Tensor, tree: Branching | None) -> "BlockGuesser":
        """Raises: ConfigError if a node has more children than the draft has tokens."""
        if tree is not None:
            return cls(target_ids, trees=Marginals(tree.topk, children_logs(shape, tree, target_ids)))
        if shape.probs is not None:
            shape.probs.allocate(shape.num_rows, num_levels, target_ids)
        return cls(target_ids, shape.probs)

    def guess(self, logits: GuessLogits, batch: SlotBatch, num_levels: int, num_guesses: int) -> Guesses:
        """Draw each guess with the noise the target will use at that position. `logits`: of `num_levels` guesses."""
        if self.trees is not None:
            return self.trees.best_nodes(logits, batch, self.target_ids, num_levels, num_guesses)
        if self.probs is None and not batch.sampling.needs_logits and (every := logits.together()) is not None:
            return Guesses(every.argmax(self.target_ids).view(num_guesses, -1))
        guesses = list[Tensor]()
        for _ in range(num_guesses):
            guesses.append(draw_guess(logits.following(guesses), batch, guesses, self.target_ids, self.probs))
        return Guesses(torch.stack(guesses))


def with_trees(profile: DraftProfile, tree: Branching | None) -> DraftProfile:
    """The profile of a draft that guesses a block. A tree's guesses are not drawn for rejection sampling."""
    if tree is None:
        return profile
    return replace(profile, tree=TreeShape(tree.num_levels, level_rows=tree.num_levels), draft_vocab_size=0)


class BlockHead(Protocol):
    """A draft that guesses a block at once, with its own KV cache."""

    num_rows: int  # R, of a block, the root included
    first_guess: int  # the first row that guesses
    target_ids: Tensor  # [Vd] i64

    def absorb(self, output: TargetOutput, rows: RowBatch) -> None:
        """Write the context of target rows. Shapes: output of T rows."""

    def run_block(self, roots: Tensor, rows: RowBatch) -> Tensor:
        """Run each slot's root and masks. Shapes: roots [B] i64 -> [B, R, H]."""

    def guess_logits(self, values: Tensor, roots: Tensor) -> GuessLogits:
        """Of the first K rows that guess. Shapes: values [K, B, H], roots [B] i64."""


@dataclass(frozen=True)
class BlockDraft:
    """A draft that guesses a block at once (`LoadedProposer`)."""

    draft: LoadedDraft[BlockHead]
    tree: Branching | None = None  # None: it guesses chains

    @property
    def profile(self) -> DraftProfile:
        return with_trees(self.draft.profile, self.tree)

    def attach(self, cache: KVCache, shape: EngineShape) -> "BlockProposer":
        head = self.draft.attach(cache, shape.num_positions, shape.attention)
        size = self.profile.features_size(shape.hidden_size)
        deferred = DeferredRows.allocate(shape.num_rows, shape.max_deferred, size, shape.dtype, shape.device)
        guesser = BlockGuesser.of(shape, head.num_rows - head.first_guess, head.target_ids, self.tree)
        return BlockProposer(head, shape.page_size, shape.scratch_start, deferred, guesser)


class BlockProposer:
    """A `Proposer[Tensor]`: it learns each slot's root. Shapes: [B] i64."""

    def __init__(
        self,
        head: BlockHead,
        page_size: int,
        scratch_start: int,
        deferred: DeferredRows,
        guesser: BlockGuesser,
    ) -> None:
        self._head = head
        self._page_size = page_size
        self._scratch_start = scratch_start
        self._deferred = deferred
        self._guesser = guesser
        self._columns = torch.arange(head.num_rows, device=head.target_ids.device)

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> Tensor:
        """Write the context of prompt chunks."""
        self._head.absorb(output, rows)
        return prompts.next_tokens[prompts.last_rows]

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> Tensor:
        """Write the context of the whole window; rows after the accepted ones are overwritten next time."""
        self._head.absorb(output, rows)
        return verdict.tokens.gather(1, verdict.accept_len[:, None]).squeeze(1)

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Keep the root's hidden states."""
        self._deferred.put(batch, output, verdict.follow)

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        """Write the context of rows that were deferred."""
        rows = earlier_rows(batch, counts, ABSORBED_ROWS, self._page_size)
        _, output = self._deferred.get(batch, rows.positions.view(len(batch.slots), -1))
        self._head.absorb(output, rows)

    def propose(self, batch: SlotBatch, learnt: Tensor, num_guesses: int) -> Guesses:
        """Run the block. Of a tree, as many levels as so many guesses can have."""
        if num_guesses == 0:
            return Guesses(batch.slots.new_empty(0, len(batch.slots)))
        block, first = self._head.run_block(learnt, self._block_rows(batch)), self._head.first_guess
        num_levels = min(self._head.num_rows - first, num_guesses)
        by_level = block[:, first : first + num_levels].transpose(0, 1).contiguous()  # [L, B, H]
        return self._guesser.guess(self._head.guess_logits(by_level, learnt), batch, num_levels, num_guesses)

    def _block_rows(self, batch: SlotBatch) -> RowBatch:
        """The rows of every slot's block, each of which sees the context and the whole block."""
        size, count = self._head.num_rows, len(batch.slots)
        positions = batch.lengths[:, None] + self._columns
        cache_rows = (batch.slots * size + self._scratch_start)[:, None] + self._columns
        mask = torch.full((count, size, 1), (1 << size) - 1, device=self._columns.device)
        keys = TreeKeys(batch.lengths, cache_rows, mask, positions, size)
        return tree_rows(batch, positions, cache_rows, keys)
