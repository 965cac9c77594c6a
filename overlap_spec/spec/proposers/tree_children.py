"""The children of a tree's nodes, and their log-probs."""

import torch
from overlap_spec_kernels import gumbel, top_tokens
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.sampling.context import DrawContext
from overlap_spec.sampling.sampler import log_weights, processed_logits, slices


def top_children(lazy_logits: LazyLogits, context: DrawContext, topk: int) -> tuple[Tensor, Tensor]:
    """The topk most probable columns of each row, distinct and descending, with the logs of their probabilities.

    Where tokens are drawn, the probabilities are those of log q / T + g: the first child is what a chain would draw.
    What filters and processors drop has -inf. Sync: never.
    Shapes: logits of B * R rows -> logs [B, R, topk] f32 or f64, columns [B, R, topk] i64.
    """
    logits = processed_logits(lazy_logits, context)
    if context.sampling.work.sampled:
        parts = [top_tokens(_noisy(logits, context, part), topk) for part in slices(logits)]
        logs, columns, _ = (torch.cat(part) for part in zip(*parts, strict=True))
    else:
        logs, columns, _ = top_tokens(logits.flatten(0, 1), topk)
    return logs.view(*logits.shape[:2], topk), columns.view(*logits.shape[:2], topk)


def _noisy(logits: Tensor, context: DrawContext, part: slice) -> Tensor:
    """What the first child is the largest of; a greedy slot's logits. Shapes: [B, R, N] -> [b * R, N] f64."""
    sampling, rows = context.sampling, logits.shape[1]
    seeds = sampling.seed[part].repeat_interleave(rows)
    noise = gumbel(seeds, context.positions[part].reshape(-1), context.token_ids)
    drawn = log_weights(logits, sampling, part) + noise
    greedy = (sampling.temperature[part] <= 0).repeat_interleave(rows)
    return torch.where(greedy[:, None], logits[part].flatten(0, 1).double(), drawn)
