"""The children of a tree's nodes, and their log-probs."""

import torch
from overlap_spec_kernels import top_tokens
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.sampling.noise import gumbel
from overlap_spec.sampling.sampler import allowed, log_weights, slices
from overlap_spec.spec.types import SlotBatch


def top_children(
    lazy_logits: LazyLogits, batch: SlotBatch, level: int, topk: int, target_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """The topk most probable columns of each row, distinct and descending, with the logs of their probabilities.

    Where tokens are drawn, the probabilities are those of log q / T + g: the first child is what a chain would draw.
    What filters and masks drop has -inf. Sync: never.
    Shapes: logits of B * R rows, target_ids [Vd] i64 -> logs [B, R, topk] f32 or f64, columns [B, R, topk] i64.
    `level`: the children stand so many + 1 positions after their root.
    """
    sampling, num_slots = batch.sampling, len(batch.slots)
    logits = lazy_logits.compute()
    logits = logits.view(num_slots, -1, logits.shape[1])
    if sampling.work.sampled or sampling.work.masked:
        positions = (batch.lengths + (level + 1))[:, None].expand(-1, logits.shape[1])
        logits = allowed(logits, positions, sampling, target_ids)
    if sampling.work.sampled:
        parts = [top_tokens(_noisy(logits, positions, batch, target_ids, part), topk) for part in slices(logits)]
        logs, columns = (torch.cat(part) for part in zip(*parts, strict=True))
    else:
        logs, columns = top_tokens(logits.flatten(0, 1), topk)
    return logs.view(num_slots, -1, topk), columns.view(num_slots, -1, topk)


def _noisy(logits: Tensor, positions: Tensor, batch: SlotBatch, target_ids: Tensor, part: slice) -> Tensor:
    """What the first child is the largest of; a greedy slot's logits. Shapes: [B, R, N] -> [b * R, N] f64."""
    sampling, rows = batch.sampling, logits.shape[1]
    seeds = sampling.seed[part].repeat_interleave(rows)
    drawn = log_weights(logits, sampling, part) + gumbel(seeds, positions[part].reshape(-1), target_ids)
    greedy = (sampling.temperature[part] <= 0).repeat_interleave(rows)
    return torch.where(greedy[:, None], logits[part].flatten(0, 1).double(), drawn)
