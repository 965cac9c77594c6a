"""The cross-entropy with a distribution over the vocabulary, and its gradient where the logits were."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, next_power_of_2, require, runs_triton

_BLOCK, _NUM_WARPS = 4096, 8  # columns at once of a row that is read twice
_MOST, _MOST_WARPS = 16384, 16  # columns of a row that is read once
_LEAST = -1e30  # of columns that are none: finite, so that no difference is NaN


def soft_cross_entropy(logits: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
    """Each row's loss times its weight; `logits` become the gradient of the losses' sum, in place.

    Shapes: logits [R, V], probs [R, V] f32 whose rows sum to 1, weights [R] f32 -> [R] f32.
    Raises: ValueError naming the argument. Sync: never.
    """
    require(logits.dim() == 2 and logits.is_contiguous(), "logits", "[R, V], contiguous")
    contiguous = probs.is_contiguous() and probs.dtype == torch.float32
    require(probs.shape == logits.shape and contiguous, "probs", "as logits, float32")
    require(weights.shape == logits.shape[:1] and weights.dtype == torch.float32, "weights", "[R] float32")
    run = _soft_cross_entropy_triton if runs_triton(logits) else soft_cross_entropy_reference
    return run(logits, probs, weights)


def soft_cross_entropy_reference(logits: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
    values = logits.float()
    losses = values.logsumexp(1) - (probs * values).sum(1)
    logits.copy_((values.softmax(1) - probs) * weights[:, None])
    return losses * weights


def _soft_cross_entropy_triton(logits: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
    losses = torch.empty_like(weights)
    size = logits.shape[1]
    block, num_warps = (next_power_of_2(size), _MOST_WARPS) if size <= _MOST else (_BLOCK, _NUM_WARPS)
    if len(logits):
        _soft_cross_entropy_kernel[(len(logits),)](
            logits, probs, weights, losses, size, weights.stride(0),
            IS_WHOLE=size <= _MOST, BLOCK=block, LEAST=_LEAST, num_warps=num_warps,
        )  # fmt: skip
    return losses


@TritonKernel
def _soft_cross_entropy_kernel(
    logits_ptr: tl.tensor, probs_ptr: tl.tensor, weights_ptr: tl.tensor, losses_ptr: tl.tensor,
    size: int, weights_stride: int,
    IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row. What does not fit a block is read twice, the second time out of a cache."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * size
    probs_ptr += row * size
    weight = tl.load(weights_ptr + row * weights_stride)
    columns = tl.arange(0, BLOCK)
    if IS_WHOLE:
        inside = columns < size
        values = tl.load(logits_ptr + columns, mask=inside, other=LEAST).to(tl.float32)
        probs = tl.load(probs_ptr + columns, mask=inside, other=0.0)
        highest = tl.max(values)
        log_total = highest + tl.log(tl.sum(tl.exp(values - highest)))
        tl.store(losses_ptr + row, (log_total - tl.sum(probs * values)) * weight)
        gradient = (tl.exp(values - log_total) - probs) * weight
        tl.store(logits_ptr + columns, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
    else:
        most = tl.full((BLOCK,), LEAST, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        expected = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, size, BLOCK):
            inside = first + columns < size
            values = tl.load(logits_ptr + first + columns, mask=inside, other=LEAST).to(tl.float32)
            expected += tl.load(probs_ptr + first + columns, mask=inside, other=0.0) * values
            larger = tl.maximum(most, values)
            total = total * tl.exp(most - larger) + tl.exp(values - larger)
            most = larger
        highest = tl.max(most)
        log_total = highest + tl.log(tl.sum(total * tl.exp(most - highest)))
        tl.store(losses_ptr + row, (log_total - tl.sum(expected)) * weight)
        for first in range(0, size, BLOCK):
            inside = first + columns < size
            values = tl.load(logits_ptr + first + columns, mask=inside, other=LEAST).to(tl.float32)
            probs = tl.load(probs_ptr + first + columns, mask=inside, other=0.0)
            gradient = (tl.exp(values - log_total) - probs) * weight
            tl.store(logits_ptr + first + columns, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
