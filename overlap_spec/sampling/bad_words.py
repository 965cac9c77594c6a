"""Bad words: sequences of tokens that the output may not have."""

import torch
from torch import Tensor

from overlap_spec.sampling.context import DrawContext


def forbid_words(logits: Tensor, context: DrawContext) -> Tensor:
    """Forbid the last token of each bad word whose others end the output, in place. Sync: never.

    Shapes: [B, R, N] -> [B, R, N].
    """
    lists, slots = context.sampling.processors.lists, context.sampling.slots
    words = lists.words[slots].long().masked_fill(lists.has[slots, 1:, None] == 0, -1)[:, None]  # [B, 1, words, M]
    begins = (words[..., :-1] < 0) | (words[..., :-1] == _output(context, words.shape[-1] - 1)[:, :, None])
    return context.forbid_(logits, torch.where(begins.all(-1), words[..., -1], -1))


def _output(context: DrawContext, count: int) -> Tensor:
    """The last tokens before each row; -1 for what is not output. Shapes: -> [B, R, count] i64."""
    positions = context.positions[:, :, None] + torch.arange(-count, 0, device=context.rows.device)
    return context.recent(count).masked_fill(positions < context.output_from[:, None, None], -1)
