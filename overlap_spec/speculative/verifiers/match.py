"""Match verification of a chain: the target draws, and a guess is accepted when it is what was drawn.

The target draws its own token after every node of the window, keyed by (seed, position, token id), exactly as plain
decoding would draw it; guesses only decide how many of those draws are kept. So the committed tokens are plain
decoding's, greedy or sampled, for any guess.
"""

from dataclasses import replace

from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.sampling.sampler import Draw, draw_after, draw_columns
from overlap_spec.speculative.interfaces import Verifier
from overlap_spec.speculative.types import Drawn, SlotBatch, Window, window_context


class ChainVerifier:
    """Accepts the longest run of guesses that equals the target's draws, and adds the draw that follows it."""

    def __init__(self, token_ids: Tensor, draw: Draw = draw_columns) -> None:
        self._token_ids = token_ids  # [V] i64
        self._draw = draw

    def verify(self, window: Window, lazy_logits: LazyLogits, batch: SlotBatch) -> Drawn:
        return Drawn(draw_after(lazy_logits, window_context(window, batch, self._token_ids), self._draw))


class GreedyVerifier:
    """Lets another verifier judge every request as if its temperature were 0, which is lossy where it is not."""

    def __init__(self, inner: Verifier) -> None:
        self._inner = inner

    def verify(self, window: Window, lazy_logits: LazyLogits, batch: SlotBatch) -> Drawn:
        """Does not keep the target's distribution at temperatures above 0."""
        sampling = batch.sampling
        greedy = replace(sampling, work=replace(sampling.work, sampled=False, filtered=False))
        return self._inner.verify(window, lazy_logits, replace(batch, sampling=greedy))
