"""Proposes EAGLE-2's dynamic tree (Li et al. 2024, arXiv:2406.16858) with whatever model drafts chains.

Each level but the last runs its k best nodes, and each of those has k children; a node has the log-prob the product of
the draft's probabilities from the root down to it. At the end the best of all nodes are kept, whatever their level:

    level 1          a        b        c          k children of the root
    level 2        d e f    g h i    j k l        k children each
    level 3          of the k best of d .. l alone

At temperature > 0 log softmax(log q / T + g) takes the place of log q, with the noise g that the target will draw by at
that position: so the best child is the guess that a chain would have drawn, and a tree with k = 1 is that chain.

Rows of nodes are no sequence. They have a place of their own for each slot in the draft's cache, behind its pages:
(level, node) in order; what is committed is absorbed from the target's path, as from a chain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from overlap_spec_kernels import (
    MASK_BITS,
    Candidates,
    TopTokens,
    add_children,
    expand_tree,
    marginal_tree,
    select_tree,
    top_tokens,
)
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits, RowBatch, TargetOutput, TreeKeys, TreeShape
from overlap_spec.sampling.context import DrawContext
from overlap_spec.sampling.sampler import GUESS_SLICE, SLICE, drawn_from, processed_logits, slices
from overlap_spec.speculative.interfaces import (
    Guesses,
    Learnt,
    Prompts,
    Proposer,
    SlotBatch,
    Verdict,
    chain_context,
    level_context,
)
from overlap_spec.speculative.rows import tree_rows

Drafted = TypeVar("Drafted")  # what a draft's rows give


class GuessLogits(Protocol):
    """The logits of a block's K guesses."""

    def together(self) -> LazyLogits | None:
        """Of all guesses, in order; None if a guess depends on the one before it. Shapes: -> logits [K * B, Vd]."""

    def following(self, guesses: Sequence[Tensor]) -> LazyLogits:
        """Of the guess after these; asked for in order. Shapes: guesses [B] i64 each -> logits [B, Vd]."""


class Drafter(Proposer[Learnt], Protocol[Learnt, Drafted]):
    """A proposer of chains, and the steps of which its chains are made."""

    target_ids: Tensor  # [Vd] i64: target id of each column of logits
    first_row: int  # a child of the root has its row so many positions after the slot's length

    def enter(self, batch: SlotBatch, learnt: Learnt) -> Drafted:
        """The row of each slot that predicts what follows its root: B rows."""

    def features(self, drafted: Drafted) -> Tensor:
        """What rows hand to those that follow them. Shapes: -> [R, n]."""

    def advance(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> Drafted:
        """Run guesses. Shapes: tokens [R] i64, features of the rows before [R, n]."""

    def logits(self, drafted: Drafted) -> LazyLogits:
        """Shapes: -> logits [R, Vd]."""


@dataclass(frozen=True)
class Branching:
    """How a tree grows."""

    num_levels: int
    topk: int  # children of a node, and nodes of a level that have any

    @property
    def num_rows(self) -> int:
        """Rows of a slot's tree that the draft runs: the last level's are not."""
        return (self.num_levels - 1) * self.topk

    @property
    def shape(self) -> TreeShape:
        """What steps need to know."""
        return TreeShape(self.num_levels, self.num_rows, self.topk)


@dataclass(frozen=True)
class Marginals:
    """Trees of a draft that guesses all levels at once, so that a level's tokens are the same after every node.

    Whatever a step's kind of sampling, the nodes are those of `marginal_tree`. Where guesses are drawn, or processors
    are asked for, each level's distribution is that of a chain: the best guess of every level before comes before it.
    """

    topk: int  # tokens of a level
    synthetic_logs: Tensor | None = None  # [topk] f32, of them, best first: in place of the draft's (benchmarks)

    def best_nodes(
        self, logits: GuessLogits, batch: SlotBatch, target_ids: Tensor, num_levels: int, num_guesses: int
    ) -> Guesses:
        """Shapes: target_ids [Vd] i64."""
        every = None if batch.sampling.needs_logits else logits.together()
        if every is not None:
            logs, columns, _ = top_tokens(every.compute(), self.topk)
            logs, columns = (part.view(num_levels, -1, self.topk) for part in (logs, columns))
        else:
            logs, columns = self._level_by_level(logits, batch, target_ids, num_levels)
        if self.synthetic_logs is not None:
            logs.copy_(self.synthetic_logs)
        return Guesses(*marginal_tree(logs, columns, target_ids, num_guesses))

    def _level_by_level(
        self, logits: GuessLogits, batch: SlotBatch, target_ids: Tensor, num_levels: int
    ) -> tuple[Tensor, Tensor]:
        """Shapes: -> logs [L, B, topk] f32 or f64, columns [L, B, topk] i64."""
        path, found = list[Tensor](), list[tuple[Tensor, Tensor]]()
        for _ in range(num_levels):
            context = chain_context(batch, path, target_ids)
            logs, columns = top_children(logits.following(path), context, self.topk)
            found.append((logs.squeeze(1), columns.squeeze(1)))
            path.append(target_ids[columns[:, 0, 0]])
        logs, columns = (torch.stack(parts) for parts in zip(*found, strict=True))
        return logs, columns


@dataclass(frozen=True)
class Nodes(Generic[Drafted]):
    """The nodes of a level that have children: for each slot R of them, 1 (the root) or topk."""

    drafted: Drafted  # B * R rows
    log_probs: Tensor  # [B, R] f32 or f64: logs
    index: Tensor  # [B, R] i64: which child each was, of all; -1: the root
    mask: Tensor  # [B, R, words] i64: rows of the tree that they see


@dataclass(frozen=True)
class Scratch:
    """The rows of each slot's tree in the draft's cache, level by level."""

    prefix: Tensor  # [B] i64: committed rows
    cache_rows: Tensor  # [B, M] i64
    positions: Tensor  # [B, M] i64


class TreeProposer(Generic[Learnt, Drafted]):
    """A `Proposer[Learnt]`: it learns what its drafter learns."""

    def __init__(
        self,
        drafter: Drafter[Learnt, Drafted],
        branching: Branching,
        scratch_start: int,
        synthetic_logs: Tensor | None = None,
    ) -> None:
        """`scratch_start`: cache row of the draft where the tree of slot 0 begins; those of the others follow.

        `synthetic_logs`: log-probs of a node's children, best first, in place of the draft's (benchmarks). Shapes:
        [topk] f32.
        """
        self._drafter = drafter
        self._branching = branching
        self._scratch_start = scratch_start
        self._synthetic_logs = synthetic_logs
        self._row = torch.arange(branching.num_rows, device=drafter.target_ids.device)  # [M]
        self._level = self._row // branching.topk + drafter.first_row  # [M], in positions after the length
        words = torch.arange(max(1, -(-branching.num_rows // MASK_BITS)), device=self._row.device)
        bits = torch.ones_like(self._row) << self._row % MASK_BITS
        self._own_bit = torch.where(self._row[:, None] // MASK_BITS == words, bits[:, None], 0)  # [M, words]

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> Learnt:
        return self._drafter.prefill(prompts, rows, output)

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> Learnt:
        return self._drafter.extend(batch, rows, output, verdict)

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        self._drafter.defer(batch, output, verdict)

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        self._drafter.catch_up(batch, counts)

    def propose(self, batch: SlotBatch, learnt: Learnt, num_guesses: int) -> Guesses:
        """Grow as many levels as so many guesses can have, and keep the best nodes."""
        num_levels, topk = min(self._branching.num_levels, num_guesses), self._branching.topk
        nodes, scratch = self._root(batch, learnt), self._scratch(batch)
        logs, columns = self._children(batch, 0, nodes, None)
        grown = Candidates.allocate(len(logs), topk + (num_levels - 1) * topk**2, logs.dtype, logs.device)
        add_children(grown, 0, logs, columns, self._drafter.target_ids, nodes.log_probs, nodes.index)
        first, end = 0, topk  # of the candidates that were added last
        for level in range(1, num_levels):
            last = grown.log_probs[:, first:end], grown.tokens[:, first:end]
            nodes = self._run_best(batch, level, nodes, last, first, scratch)
            first, end = end, end + topk**2
            logs, columns = self._children(batch, level, nodes, grown)
            add_children(grown, first, logs, columns, self._drafter.target_ids, nodes.log_probs, nodes.index)
        return Guesses(*select_tree(*grown, num_guesses))

    def _root(self, batch: SlotBatch, learnt: Learnt) -> Nodes[Drafted]:
        zeros = torch.zeros_like(batch.slots)[:, None]
        mask = zeros[:, :, None].repeat(1, 1, self._own_bit.shape[1])
        return Nodes(self._drafter.enter(batch, learnt), zeros.float(), zeros - 1, mask)

    def _scratch(self, batch: SlotBatch) -> Scratch:
        cache_rows = (batch.slots * self._branching.num_rows + self._scratch_start)[:, None] + self._row
        prefix = batch.lengths + self._drafter.first_row
        return Scratch(prefix, cache_rows, batch.lengths[:, None] + self._level)

    def _children(
        self, batch: SlotBatch, level: int, nodes: Nodes[Drafted], grown: Candidates | None
    ) -> tuple[Tensor, Tensor]:
        """See `top_children`. The nodes are of level `level`, the root's being 0."""
        context = level_context(batch, grown, nodes.index, level, self._drafter.target_ids)
        logs, columns = top_children(self._drafter.logits(nodes.drafted), context, self._branching.topk)
        return logs if self._synthetic_logs is None else logs.copy_(self._synthetic_logs), columns

    def _run_best(
        self,
        batch: SlotBatch,
        level: int,
        before: Nodes[Drafted],
        children: tuple[Tensor, Tensor],
        first: int,
        scratch: Scratch,
    ) -> Nodes[Drafted]:
        """Run the best of the children of the nodes before, which become the nodes of `level`.

        Shapes: log_probs and tokens [B, R * topk], the first of which is candidate `first`.
        """
        here = slice((level - 1) * self._branching.topk, level * self._branching.topk)
        features = self._drafter.features(before.drafted)
        best = expand_tree(*children, before.mask, features, self._own_bit[here], first)
        keys = TreeKeys(scratch.prefix, scratch.cache_rows, best.mask, scratch.positions, self._branching.num_levels)
        rows = tree_rows(batch, scratch.positions[:, here], scratch.cache_rows[:, here], keys)
        drafted = self._drafter.advance(best.tokens, best.features, rows)
        return Nodes(drafted, best.log_probs, best.indices, best.mask)


def top_children(lazy_logits: LazyLogits, context: DrawContext, topk: int) -> tuple[Tensor, Tensor]:
    """The topk most probable columns of each row, distinct and descending, with the logs of their probabilities.

    Where tokens are drawn, the probabilities are those of log q / T + g: the first child is what a chain would draw.
    What filters and processors drop has -inf. Sync: never.
    Shapes: logits of B * R rows -> logs [B, R, topk] f32 or f64, columns [B, R, topk] i64.
    """
    logits = processed_logits(lazy_logits, context)
    if context.sampling.work.sampled:
        drawing = logits, context.positions, context.sampling, context.token_ids
        at_once = GUESS_SLICE if logits.is_cuda else SLICE
        parts = [top_tokens(drawn_from(*drawing, part).flatten(0, 1), topk) for part in slices(logits, at_once)]
        found = parts[0] if len(parts) == 1 else TopTokens(*map(torch.cat, zip(*parts, strict=True)))
    else:
        found = top_tokens(logits.flatten(0, 1), topk)
    return found.log_probs.view(*logits.shape[:2], topk), found.columns.view(*logits.shape[:2], topk)
