"""The shapes of speculation. Not here: how guesses are made or judged.

Legend, used in every comment of `spec/`, `worker/`, `models/` and the kernels:

    B  slots in the step            V   target vocabulary       S  slots of the engine (one more: the dummy)
    W  window width, root included  Vd  draft vocabulary        P  pages in a slot's page-table row
    K  guesses, W - 1               H   hidden size             T  rows of a forward, B * W in decode
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ChainDraft:
    """A window per slot: column 0 is the root (the last committed token), then K guesses; -1 = no guess."""

    tokens: Tensor  # [B, W] i64


@dataclass(frozen=True)
class Verdict:
    """What a verifier decided. Committed tokens = accepted guesses + one bonus."""

    tokens: Tensor  # [B, W] i64, committed, left-aligned, padded with -1
    accept_len: Tensor  # [B] i64, 0..K: guesses accepted, the bonus not counted
