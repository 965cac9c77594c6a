"""Log-probs of tokens: log-softmax of the model's own logits, before processors, temperature and filters.

They are a function of the tokens before a position alone. So they are the same with speculation and without it, for
output and prompt, whatever is forbidden or drawn. The numbers of a position come from one computation: a token's own
log-prob equals its entry among the most probable tokens to the bit (`log_prob_rows`).
"""

from collections.abc import Callable

import torch
from overlap_spec_kernels import MAX_TOP_TOKENS, TopTokens, log_prob_rows, top_tokens
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.sampling.stages import Decided

SCORED_LOGITS = 1 << 24  # computed at once for prompt tokens: 64 MiB, less than a slice is drawn through
SCORED_ON_A_CPU = 1 << 22  # the same there, with all that is made of them


def most_probable(logits: Tensor) -> TopTokens:
    """As many as a request may ask for. Shapes: logits [R, V]."""
    return top_tokens(logits, min(MAX_TOP_TOKENS, logits.shape[1]))


def decided_log_probs(logits: Tensor, decided: Decided, listed: Tensor) -> Tensor:
    """Of the tokens that a step decides. Sync: never. Shapes: logits [B * R, V], listed [S, M] -> [B * D, n] f64."""
    rows, slots = None, decided.slots
    if decided.path is not None:
        width = len(logits) // len(slots)
        first = torch.arange(len(slots), device=slots.device) * width
        rows = (first[:, None] + decided.path).flatten()
    return log_prob_rows(logits, most_probable(logits), decided.tokens.flatten(), slots, listed, rows)


def prompt_log_probs(
    logits_of: Callable[[Tensor], LazyLogits],
    vocab_size: int,
    hidden: Tensor,
    tokens: Tensor,
    slots: Tensor,
    listed: Tensor,
) -> Tensor:
    """Of prompt tokens, each drawn from its row of `hidden`, a slice of them at a time. Sync: never.

    Shapes: hidden [N, H], tokens, slots [N] i64, listed [S, M] i64 -> [N, n] f64.
    """
    step = max(1, (SCORED_ON_A_CPU if hidden.is_cpu else SCORED_LOGITS) // vocab_size)
    parts = []
    for part in (slice(first, first + step) for first in range(0, len(tokens), step)):
        logits = logits_of(hidden[part]).compute()
        parts.append(log_prob_rows(logits, most_probable(logits), tokens[part], slots[part], listed))
    return torch.cat(parts)
