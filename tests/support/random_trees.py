"""A proposer of random trees, to verify trees that no draft model made.

A tiny target mostly maps its current token to the next one. So half of a node's children follow that map, which is
right about every second time, and the others are any tokens; some guesses are missing.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap_spec.models.interfaces import DraftProfile, LoadedTarget, RowBatch, TargetOutput, TreeShape
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.speculative.drafts import EngineShape
from overlap_spec.speculative.interfaces import Guesses, Prompts, SlotBatch, Verdict

MOST_CHILDREN = 4


@dataclass(frozen=True)
class RandomTreeDraft:
    """`LoadedProposer` of trees with at most `num_levels` levels."""

    next_tokens: list[int]  # by token
    num_levels: int

    @classmethod
    def of(cls, target: LoadedTarget, num_levels: int) -> "RandomTreeDraft":
        normed = target.embedding.weight / target.embedding.weight.pow(2).mean(1, keepdim=True).sqrt()
        return cls(target.head.argmax(normed).tolist(), num_levels)

    @property
    def profile(self) -> DraftProfile:
        return DraftProfile(tree=TreeShape(self.num_levels))

    def attach(self, cache: KVCache, shape: EngineShape) -> "RandomTrees":
        return RandomTrees(self)


class RandomTrees:
    """The proposer; it learns the new root alone."""

    def __init__(self, draft: RandomTreeDraft) -> None:
        self._draft = draft
        self._rng = random.Random(1)
        self._roots: dict[int, int] = {}

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> Tensor:
        return prompts.next_tokens[prompts.last_rows][:, None]

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> Tensor:
        slots, longest = verdict.tokens.shape
        assert rows.positions.shape == (slots * longest,) and len(output.hidden) == slots * longest
        assert longest <= self._draft.num_levels + 1
        return verdict.tokens.gather(1, verdict.accept_len[:, None])

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        """What was missed is of no use."""

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        """See `defer`."""

    def propose(self, batch: SlotBatch, learnt: Tensor, num_guesses: int) -> Guesses:
        trees = [self._tree(int(root), num_guesses) for root in learnt[:, 0]]
        tokens, parents = (torch.tensor([tree[i] for tree in trees], dtype=torch.int64) for i in range(2))
        return Guesses(tokens.view(len(trees), -1).t().contiguous(), parents.view(len(trees), -1).t().contiguous())

    def _tree(self, root: int, num_guesses: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the columns after the root's."""
        tokens, parents, levels = [root], [0], [0]
        for _ in range(num_guesses):
            open_to = [c for c, level in enumerate(levels) if tokens[c] >= 0 and level < self._draft.num_levels]
            parent = self._rng.choice(open_to[-3:])
            siblings = {tokens[c] for c in range(1, len(tokens)) if parents[c] == parent}
            likely = self._draft.next_tokens[tokens[parent]]
            others = [t for t in (self._rng.randrange(6, 128) for _ in range(20)) if t not in siblings]
            token = likely if likely not in siblings and self._rng.random() < 0.7 else others[0]
            if self._rng.random() < 0.1 or len(siblings) >= MOST_CHILDREN:
                token = -1
            tokens.append(token)
            parents.append(parent)
            levels.append(levels[parent] + 1)
        return tokens[1:], parents[1:]
