"""Repetition, presence and frequency penalties, exact for every row of a window.

    logit > 0: logit / repetition, else logit * repetition      if the token is in the prompt or in the output
    less presence                                               if it is in the output
    less frequency * n                                          where it is n times in the output

The output of a row is what is committed and then the guesses that lead to the row. So a row has the penalties that
plain decoding has there. Nothing is counted from step to step: each step counts the tokens of the token pool, which is
whole after a prefix hit and after a preemption.
"""

import torch
from torch import Tensor

from overlap_spec.sampling.context import IN_PROMPT, DrawContext
from overlap_spec.sampling.sampler import slices


def penalize(logits: Tensor, context: DrawContext) -> Tensor:
    """New logits; of a slot without penalties the same values. Sync: never. Shapes: [B, R, N] -> [B, R, N]."""
    new, guesses = torch.empty_like(logits), context.guesses
    for part in slices(logits):
        counts = _counts(context.history.counts[part], guesses[part])[:, :, context.token_ids]
        new[part] = _penalized(logits[part], counts, context.sampling.penalties[part])
    return new


def _counts(committed: Tensor, guesses: Tensor) -> Tensor:
    """With the guesses before each row. Shapes: [B, V] i32, [B, R, D] i64 -> [B, R, V] i32."""
    counts = committed[:, None].repeat(1, guesses.shape[1], 1)
    return counts.scatter_add_(2, guesses.clamp(min=0), (guesses >= 0).int())


def _penalized(logits: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """Shapes: logits, counts [B, R, N], penalties [B, 3] -> [B, R, N]."""
    repetition, presence, frequency = penalties.to(logits.dtype)[:, :, None, None].unbind(1)
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    in_output = counts & (IN_PROMPT - 1)
    return torch.where(counts > 0, scaled, logits) - in_output * frequency - (in_output > 0) * presence
