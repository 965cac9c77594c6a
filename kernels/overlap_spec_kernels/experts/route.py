"""The router of a mixture of experts: logits, softmax, and the experts of largest probability.

Two launches: logits by tensor cores, in float32 and never rounded; then a program per row chooses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.experts.sum_of_experts import Routing, in_tiles
from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import (
    TritonKernel,
    ceil_div,
    dependent_launch,
    next_power_of_2,
    require,
    runs_triton,
)

_BLOCK = 16  # rows of x, and experts, of a program: the smallest product of tensor cores
_LARGE_BLOCK, _MANY_ROWS = 64, 512  # of many rows
_MOST_K, _LARGE_K = 256, 64  # columns of a step: tensor cores add them in one order
_MAX_EXPERTS = 1024


def route(x: Tensor, weight: Tensor, top_k: int, normalised: bool, bias: Tensor | None = None) -> Routing:
    """Softmax over all experts, of which a row takes the `top_k` most probable; of equal ones those of lower index.

    `normalised`: a row's weights are divided by their sum. NaN counts as the largest probability. A row's result has
    the same bits whatever rows are beside it.
    Shapes: x [T, H], weight [E, H], bias [E], of logits -> [T, top_k] twice; E <= 1024. Raises: ValueError naming the
    argument. Sync: never.
    """
    _require_fitting(x, weight)
    require(1 <= top_k <= weight.shape[0], "top_k", "1 to the number of experts")
    fits = bias is None or (bias.shape == weight.shape[:1] and bias.dtype == weight.dtype and bias.is_contiguous())
    require(fits, "bias", "[E], contiguous, the dtype of weight")
    return (_route_triton if runs_triton(x) else route_reference)(x, weight, top_k, normalised, bias)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """The logits that `route` chooses by, for routers that choose in another way. A row's have the same bits whatever
    rows are beside it.

    Shapes: x [T, H], weight [E, H] -> [T, E] f32 (f64 of a float64 model); E <= 1024. Raises: ValueError naming the
    argument. Sync: never.
    """
    _require_fitting(x, weight)
    return (_logits_triton if runs_triton(x) else _logits_reference)(x, weight)


def _require_fitting(x: Tensor, weight: Tensor) -> None:
    require(x.dim() == 2 and x.stride(1) == 1, "x", "[T, H] with a contiguous last dimension")
    require(weight.shape[1:] == x.shape[1:] and weight.is_contiguous(), "weight", "[E, H], contiguous")
    require(weight.dtype == x.dtype and weight.shape[0] <= _MAX_EXPERTS, "weight", "the dtype of x, at most 1024 rows")


def _logits_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    matrix = weight.to(wide)
    logits = in_tiles(lambda rows: F.linear(rows, matrix), x.to(wide), len(matrix))
    return logits if bias is None else logits + bias.to(wide)


def route_reference(x: Tensor, weight: Tensor, top_k: int, normalised: bool, bias: Tensor | None = None) -> Routing:
    logits = _logits_reference(x, weight, bias)
    ranked = logits.softmax(1).sort(dim=1, descending=True, stable=True)
    weights, experts = ranked.values[:, :top_k].contiguous(), ranked.indices[:, :top_k].contiguous()
    if normalised:
        weights = weights / weights.sum(1, keepdim=True)
    return Routing(experts, weights)


def _logits_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    (num_rows, size), num_experts = x.shape, len(weight)
    logits = torch.empty((num_rows, num_experts), dtype=torch.float32, device=x.device)
    is_wide = x.element_size() > 2
    is_large = num_rows >= _MANY_ROWS and not is_wide
    block, most_k = (_LARGE_BLOCK, _LARGE_K) if is_large else (_BLOCK, _MOST_K // 2 if is_wide else _MOST_K)
    router_logits_kernel[(ceil_div(num_experts, block), ceil_div(num_rows, block))](
        x,
        weight,
        weight if bias is None else bias,
        logits,
        x.stride(0),
        num_rows,
        SIZE_K=size,
        EXPERTS=num_experts,
        BIASED=bias is not None,
        BLOCK=block,
        BLOCK_K=min(max(next_power_of_2(size), 16), most_k),
        num_warps=4,
        num_stages=4 if is_large or is_wide else 6,
        **dependent_launch(x.device, num_rows),
    )
    return logits


def _route_triton(x: Tensor, weight: Tensor, top_k: int, normalised: bool, bias: Tensor | None = None) -> Routing:
    num_rows, num_experts = len(x), len(weight)
    logits = _logits_triton(x, weight, bias)
    experts = torch.empty((num_rows, top_k), dtype=torch.int64, device=x.device)
    weights = torch.empty((num_rows, top_k), dtype=torch.float32, device=x.device)
    choose_experts_kernel[(num_rows,)](
        logits,
        experts,
        weights,
        EXPERTS=num_experts,
        TOP_K=top_k,
        NORMALISED=normalised,
        BLOCK=next_power_of_2(num_experts),
        BLOCK_K=next_power_of_2(top_k),
        num_warps=1,
        **dependent_launch(x.device, num_rows),
    )
    return Routing(experts, weights)


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def router_logits_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, logits_ptr: tl.tensor, x_stride: int, num_rows: int,
    SIZE_K: tl.constexpr, EXPERTS: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per BLOCK experts and BLOCK rows."""
    wait_for_inputs(PDL)
    expert = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live, known = row < num_rows, expert < EXPERTS
    logits = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for begin in range(0, SIZE_K, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        inside = k < SIZE_K
        x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        w = tl.load(
            weight_ptr + expert[None, :] * SIZE_K + k[:, None], mask=known[None, :] & inside[:, None], other=0.0
        )
        logits = tl.dot(x, w, logits, input_precision="ieee")
    if BIASED:
        logits += tl.load(bias_ptr + expert, mask=known, other=0.0).to(tl.float32)[None, :]
    tl.store(logits_ptr + row[:, None] * EXPERTS + expert[None, :], logits, mask=live[:, None] & known[None, :])


@TritonKernel
def choose_experts_kernel(
    logits_ptr: tl.tensor, experts_ptr: tl.tensor, weights_ptr: tl.tensor, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    NORMALISED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row: the largest probability, TOP_K times."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    known = expert < EXPERTS
    logits = tl.load(logits_ptr + row * EXPERTS + expert, mask=known, other=0.0)
    highest = tl.max(tl.where(known, logits, float("-inf")), axis=0)
    exponentials = tl.where(known, tl.exp(logits - highest), 0.0)
    probabilities = exponentials / tl.sum(exponentials, axis=0)
    left = tl.where(probabilities == probabilities, probabilities, 2.0)  # NaN before all others
    left = tl.where(known, left, -1.0)
    weights = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for rank in range(TOP_K):
        best = tl.min(tl.where(left == tl.max(left, axis=0), expert, BLOCK), axis=0)
        found = tl.sum(tl.where(expert == best, probabilities, 0.0), axis=0)
        weights = tl.where(place == rank, found, weights)
        left = tl.where(expert == best, -1.0, left)
        tl.store(experts_ptr + row * TOP_K + rank, best.to(tl.int64))
    if NORMALISED:
        weights = weights / tl.sum(weights, axis=0)
    tl.store(weights_ptr + row * TOP_K + place, weights, mask=place < TOP_K)
