"""Log-probs of tokens: log-softmax of the model's own logits, before processors, temperature and filters.

They are a function of the tokens before a position alone. So they are the same with speculation and without it, for
output and prompt, whatever is forbidden or drawn. The numbers of a position come from one computation: a token's own
log-prob equals its entry among the most probable tokens to the bit (`log_prob_rows`).
"""

import torch
from overlap_spec_kernels import MAX_TOP_TOKENS, TopTokens, Verdict, largest_columns, log_prob_rows, top_tokens
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits, TargetModel

SCORED_LOGITS = 1 << 24  # computed at once for prompt tokens: 64 MiB, less than a slice is drawn through
SCORED_ON_A_CPU = 1 << 22  # the same there, with all that is made of them


class KeptLogits:
    """`LazyLogits` that are computed once and kept: tokens are drawn from them, and log-probs taken."""

    def __init__(self, inner: LazyLogits) -> None:
        self._inner = inner
        self._logits: Tensor | None = None

    def compute(self) -> Tensor:
        """Shapes: -> [R, V]."""
        if self._logits is None:
            self._logits = self._inner.compute()
        return self._logits

    def argmax(self, ids: Tensor | None = None) -> Tensor:
        """Shapes: ids [V] i64 -> [R] i64."""
        return largest_columns(self.compute(), ids)


def most_probable(logits: Tensor) -> TopTokens:
    """As many as a request may ask for. Shapes: logits [R, V]."""
    return top_tokens(logits, min(MAX_TOP_TOKENS, logits.shape[1]))


def window_log_probs(logits: Tensor, verdict: Verdict, slots: Tensor, listed: Tensor) -> Tensor:
    """Of the tokens that a step commits. Sync: never. Shapes: logits [B * W, V], listed [S, M] -> [B * D, n] f64."""
    rows = None
    if verdict.path is not None:
        width = len(logits) // len(slots)
        first = torch.arange(len(slots), device=slots.device) * width
        rows = (first[:, None] + verdict.path).flatten()
    return log_prob_rows(logits, most_probable(logits), verdict.tokens.flatten(), slots, listed, rows)


def drawn_log_probs(logits: Tensor, drawn: Tensor, slots: Tensor, listed: Tensor) -> Tensor:
    """Of one token for each slot. Sync: never. Shapes: logits [B, V], drawn, slots [B] i64 -> [B, n] f64."""
    return log_prob_rows(logits, most_probable(logits), drawn, slots, listed)


def prompt_log_probs(target: TargetModel, hidden: Tensor, tokens: Tensor, slots: Tensor, listed: Tensor) -> Tensor:
    """Of prompt tokens, each drawn from its row of `hidden`, a slice of them at a time. Sync: never.

    Shapes: hidden [N, H], tokens, slots [N] i64, listed [S, M] i64 -> [N, n] f64.
    """
    step = max(1, (SCORED_ON_A_CPU if hidden.is_cpu else SCORED_LOGITS) // target.vocab_size)
    parts = []
    for part in (slice(first, first + step) for first in range(0, len(tokens), step)):
        logits = target.logits(hidden[part]).compute()
        parts.append(log_prob_rows(logits, most_probable(logits), tokens[part], slots[part], listed))
    return torch.cat(parts)
