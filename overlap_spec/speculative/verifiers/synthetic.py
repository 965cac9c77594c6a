"""Synthetic acceptance: a benchmark's stand-in for the accept decision.

A head with random weights guesses nothing right, so the speed of a shape is measured with an accept length that is
given. Everything else is done as ever: every row of the window is computed, sampled and judged; only how many guesses
are accepted is then replaced. What is committed are the guesses and a drawn token, so text means nothing.

Random weights also find all guesses equally likely. A tree that grew by that would be as broad as it can, and its
columns would be of no use to narrow windows. So it grows by what a draft that guesses so well would say (`certainty`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from overlap_spec_kernels import synthetic_accept
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.speculative.interfaces import Verifier
from overlap_spec.speculative.types import Drawn, SlotBatch, Window

TABLE_SIZE = 1 << 16  # a power of two
SEED = 1234
SURE = 0.02, 0.98  # of a guess, at least and at most
HALVINGS = 30


class SyntheticAcceptance:
    """Guesses to accept: floor or ceil of the mean, chosen per (seed, position) so that the mean comes out."""

    def __init__(self, means: Sequence[float], seeds: Tensor) -> None:
        """`means`: one, or two, of which seeds from TABLE_SIZE on take the second. `seeds`: of every slot.

        Shapes: [S] i64.
        """
        assert len(means) in (1, 2) and min(means) >= 1, "a step commits at least its bonus"
        self._seeds = seeds
        order = torch.randperm(TABLE_SIZE, generator=torch.Generator().manual_seed(SEED))
        halves = [(order < round((mean % 1) * TABLE_SIZE)).long() + (int(mean) - 1) for mean in means]
        self._table = torch.cat(halves).to(seeds.device)  # a lookup is one launch, a generator some thirty

    def accept_len(self, batch: SlotBatch) -> Tensor:
        """How many guesses to accept, which may be more than there are. Shapes: -> [B] i64. Sync: never."""
        return synthetic_accept(self._table, self._seeds, batch.slots, batch.lengths)


def certainty(mean: float, num_levels: int, topk: int) -> list[float]:
    """Log-probs that a draft gives a node's children, best first, where `mean` tokens a step are committed.

    Each guess is as often right after those before it: rate + rate^2 + .. over the levels is mean - 1.
    """
    low, high = SURE
    for _ in range(HALVINGS):
        rate = (low + high) / 2
        too_low = sum(rate**level for level in range(1, num_levels + 1)) < mean - 1
        low, high = (rate, high) if too_low else (low, rate)
    return [math.log(low) + rank * math.log(1 - low) for rank in range(topk)]


class SimulatedVerifier:
    """Replaces another verifier's accept decision, after it has done all its work."""

    def __init__(self, inner: Verifier, acceptance: SyntheticAcceptance) -> None:
        self._inner = inner
        self._acceptance = acceptance

    def verify(self, window: Window, lazy_logits: LazyLogits, batch: SlotBatch) -> Drawn:
        """Does not keep the target's distribution."""
        return replace(self._inner.verify(window, lazy_logits, batch), accept_len=self._acceptance.accept_len(batch))
