"""The losses of guesses over the vocabulary, and their gradients where the logits were."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


def token_losses(
    logits: Tensor, tokens: Tensor, weights: Tensor, target: Tensor | None = None, share: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Each row's cross-entropy with a token, and its distance from the target: sum |softmax(logits) - softmax(target)|.

    `logits` become, in place, the gradient of the sum of weights * ((1 - share) * cross-entropy + share * distance).
    Without a target, distances are 0. Shapes: logits and target [R, V], tokens [R] i64, weights [R] f32 -> 2 x [R] f32.
    Raises: ValueError naming the argument. Sync: never.
    """
    require(logits.dim() == 2 and logits.is_contiguous(), "logits", "[R, V], contiguous")
    require(tokens.shape == logits.shape[:1] and tokens.is_contiguous(), "tokens", "[R], contiguous")
    require(weights.shape == logits.shape[:1] and weights.dtype == torch.float32, "weights", "[R] float32")
    fits = target is None or (target.shape == logits.shape and target.is_contiguous())
    require(fits and (target is not None or not share), "target", "as logits, contiguous; none only without a share")
    run = _token_losses_triton if runs_triton(logits) else token_losses_reference
    return run(logits, tokens, weights, target, share)


def token_losses_reference(
    logits: Tensor, tokens: Tensor, weights: Tensor, target: Tensor | None, share: float
) -> tuple[Tensor, Tensor]:
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    errors = F.cross_entropy(values, tokens, reduction="none")
    probs, distances = values.softmax(1), torch.zeros_like(errors)
    gradient = (1 - share) * probs
    gradient.scatter_add_(1, tokens[:, None], torch.full_like(gradient[:, :1], share - 1))
    if target is not None:
        difference = probs - target.to(values.dtype).softmax(1)
        distances, signs = difference.abs().sum(1), difference.sign()
        gradient += share * probs * (signs - (probs * signs).sum(1, keepdim=True))
    logits.copy_(gradient * weights[:, None])
    return errors, distances


def _token_losses_triton(
    logits: Tensor, tokens: Tensor, weights: Tensor, target: Tensor | None, share: float
) -> tuple[Tensor, Tensor]:
    errors, distances = torch.empty_like(weights), torch.zeros_like(weights)
    if len(logits):
        _token_losses_kernel[(len(logits),)](
            logits, logits if target is None else target, tokens, weights, errors, distances,
            logits.shape[1], weights.stride(0), share,
            HAS_TARGET=target is not None, BLOCK=_BLOCK, LEAST=_LEAST, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return errors, distances


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


@TritonKernel
def _token_losses_kernel(
    logits_ptr: tl.tensor, target_ptr: tl.tensor, tokens_ptr: tl.tensor, weights_ptr: tl.tensor,
    errors_ptr: tl.tensor, distances_ptr: tl.tensor, size: int, weights_stride: int, share: float,
    HAS_TARGET: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row, which is read three times, all but once out of a cache: sums, the distance, the gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * size
    target_ptr += row * size
    weight = tl.load(weights_ptr + row * weights_stride)
    token = tl.load(tokens_ptr + row)
    right = tl.load(logits_ptr + token).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), LEAST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    most_of_target = tl.full((BLOCK,), LEAST, tl.float32)
    total_of_target = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, size, BLOCK):
        inside = first + columns < size
        values = tl.load(logits_ptr + first + columns, mask=inside, other=LEAST).to(tl.float32)
        larger = tl.maximum(most, values)
        total = total * tl.exp(most - larger) + tl.exp(values - larger)
        most = larger
        if HAS_TARGET:
            values = tl.load(target_ptr + first + columns, mask=inside, other=LEAST).to(tl.float32)
            larger = tl.maximum(most_of_target, values)
            total_of_target = total_of_target * tl.exp(most_of_target - larger) + tl.exp(values - larger)
            most_of_target = larger
    highest = tl.max(most)
    log_total = highest + tl.log(tl.sum(total * tl.exp(most - highest)))
    tl.store(errors_ptr + row, log_total - right)
    lean = 0.0
    log_total_of_target = 0.0
    if HAS_TARGET:
        highest = tl.max(most_of_target)
        log_total_of_target = highest + tl.log(tl.sum(total_of_target * tl.exp(most_of_target - highest)))
        distance = tl.zeros((BLOCK,), tl.float32)
        leaning = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, size, BLOCK):
            inside = first + columns < size
            values = tl.load(logits_ptr + first + columns, mask=inside, other=LEAST).to(tl.float32)
            wanted = tl.load(target_ptr + first + columns, mask=inside, other=LEAST).to(tl.float32)
            probs = tl.exp(values - log_total)
            difference = probs - tl.exp(wanted - log_total_of_target)
            distance += tl.abs(difference)
            leaning += tl.where(difference > 0, probs, tl.where(difference < 0, -probs, 0.0))
        tl.store(distances_ptr + row, tl.sum(distance))
        lean = tl.sum(leaning)
    for first in range(0, size, BLOCK):
        inside = first + columns < size
        values = tl.load(logits_ptr + first + columns, mask=inside, other=LEAST).to(tl.float32)
        probs = tl.exp(values - log_total)
        gradient = (1 - share) * (probs - tl.where(first + columns == token, 1.0, 0.0))
        if HAS_TARGET:
            wanted = tl.load(target_ptr + first + columns, mask=inside, other=LEAST).to(tl.float32)
            difference = probs - tl.exp(wanted - log_total_of_target)
            signs = tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, 0.0))
            gradient += share * probs * (signs - lean)
        tl.store(logits_ptr + first + columns, (gradient * weight).to(logits_ptr.dtype.element_ty), mask=inside)
