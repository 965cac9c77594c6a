"""Synthetic acceptance: a benchmark's stand-in for the accept decision.

A head with random weights guesses nothing right, so the speed of a shape is measured with an accept length that is
given. Everything else is done as ever: every row of the window is computed, sampled and judged; only how many guesses
are accepted is then replaced. What is committed are the guesses and a drawn token, so text means nothing.
"""

from dataclasses import replace

import torch
from overlap_spec_kernels import synthetic_accept
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.spec.interfaces import Verifier
from overlap_spec.spec.types import Drawn, SlotBatch, Window

TABLE_SIZE = 1 << 16  # a power of two
SEED = 1234


class SyntheticAcceptance:
    """Guesses to accept: floor or ceil of the mean, chosen per (seed, position) so that the mean comes out."""

    def __init__(self, mean: float, seeds: Tensor) -> None:
        """`seeds`: of every slot. Shapes: [S] i64."""
        assert mean >= 1, "a step commits at least its bonus"
        self._seeds = seeds
        more = round((mean % 1) * TABLE_SIZE)
        extra = (torch.randperm(TABLE_SIZE, generator=torch.Generator().manual_seed(SEED)) < more).long()
        self._table = (extra + (int(mean) - 1)).to(seeds.device)  # a lookup is one launch, a generator some thirty

    def accept_len(self, batch: SlotBatch) -> Tensor:
        """How many guesses to accept, which may be more than there are. Shapes: -> [B] i64. Sync: never."""
        return synthetic_accept(self._table, self._seeds, batch.slots, batch.lengths)


class SimulatedVerifier:
    """Replaces another verifier's accept decision, after it has done all its work."""

    def __init__(self, inner: Verifier, acceptance: SyntheticAcceptance) -> None:
        self._inner = inner
        self._acceptance = acceptance

    def verify(self, window: Window, lazy_logits: LazyLogits, batch: SlotBatch) -> Drawn:
        """Does not keep the target's distribution."""
        return replace(self._inner.verify(window, lazy_logits, batch), accept_len=self._acceptance.accept_len(batch))
