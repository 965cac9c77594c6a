"""Match verification of a chain: the target draws, and a guess is accepted when it is what was drawn.

Not here: drawing (`sampler.py`) and guessing. The target draws its own token after every node of the window,
keyed by (seed, position, token id), exactly as plain decoding would draw it; guesses only decide how many of
those draws stand. So the committed tokens are plain decoding's, greedy or sampled, for any guess.
"""

import torch
from torch import Tensor

from overlap_spec.spec.sampler import draw
from overlap_spec.spec.types import SlotBatch, Verdict, Window


class ChainVerifier:
    """Accepts the longest run of guesses that equals the target's draws, and adds the draw that follows it."""

    def __init__(self, token_ids: Tensor) -> None:
        self._token_ids = token_ids  # [V] i64

    def verify(self, window: Window, logits: Tensor, batch: SlotBatch) -> Verdict:
        """Judge a window. Pure; Sync: never. Shapes: logits [B, W, V], row j follows window column j."""
        width = window.tokens.shape[1]
        columns = torch.arange(width, device=logits.device)
        drawn = draw(logits, batch.lengths[:, None] + 1 + columns, batch.sampling, self._token_ids)
        return match_chain(window.tokens, drawn)


def match_chain(window: Tensor, drawn: Tensor) -> Verdict:
    """The verdict for tokens `drawn` after each column of `window`. Shapes: both [B, W] i64."""
    matches = (window[:, 1:] == drawn[:, :-1]).long()
    accept_len = matches.cumprod(1).sum(1)
    columns = torch.arange(window.shape[1], device=window.device)
    return Verdict(drawn.masked_fill(columns > accept_len[:, None], -1), accept_len)
