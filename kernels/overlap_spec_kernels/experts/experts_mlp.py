"""The experts of a layer as one operation: each row through its own gated MLPs, and their weighted sum.

    group      by expert, the places of its rows among the T * k
    gate, up   tiles of rows of one expert -> silu(gate) * up, or clamped, by place
    down       the same tiles -> results, by place
    sum        each row's k results, largest weight first

Grids follow from shapes alone: there are as many programs as tiles could be at most, and those without rows end at
once. A product's K is divided by the shape of the weight alone, and each output of a tensor core's product depends on
its own row, so a row's result has the same bits wherever it is in a tile, and whatever rows are beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.experts.sum_of_experts import Routing, sum_of_experts
from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, ceil_div, next_power_of_2, require, runs_triton
from overlap_spec_kernels.norm.silu_mul import silu_mul_reference

_FEW_ROWS, _MANY_ROWS = 16, 64  # of a tile
_MANY = 32  # rows of an expert on average from which tiles are large
_MOST_K = 128  # columns of a step
_GROUP_BLOCK = 1024  # places that a program looks at together
_SUM_BLOCK = 1024
_VECTORS = 64  # columns that fill a CPU's vectors


class Clamp(NamedTuple):
    """A gated product whose factors are bounded (gpt-oss): gate * sigmoid(alpha * gate) * (up + 1)."""

    alpha: float
    limit: float  # gate <= limit, -limit <= up <= limit


class Biases(NamedTuple):
    """Of the linears of experts."""

    gate_up: Tensor  # [E, 2I], gate first
    down: Tensor  # [E, H]


def experts_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routing: Routing,
    biases: Biases | None = None,
    clamp: Clamp | None = None,
) -> Tensor:
    """For each row the sum of weight * down(silu(gate(x)) * up(x)) over its experts, in the order of its weights.

    `clamp`: the product of gate and up instead of silu(gate) * up.
    Shapes: x [T, H], gate_up [E, 2I, H], gate first, down [E, H, I], routing [T, k] -> [T, H]. A row's experts are
    distinct. Raises: ValueError naming the argument. Sync: never on CUDA but in float64, whose reference waits.
    """
    require(x.dim() == 2 and x.stride(1) == 1, "x", "[T, H] with a contiguous last dimension")
    require(gate_up.dim() == 3 and gate_up.is_contiguous(), "gate_up", "[E, 2I, H], contiguous")
    require(gate_up.shape[2] == x.shape[1] and gate_up.shape[1] % 2 == 0, "gate_up", "rows as long as x, two halves")
    inner = gate_up.shape[1] // 2
    require(down.shape == (len(gate_up), x.shape[1], inner) and down.is_contiguous(), "down", "[E, H, I], contiguous")
    require(x.dtype == gate_up.dtype == down.dtype, "x", "the dtype of the weights")
    require(routing.experts.shape == routing.weights.shape and len(routing.experts) == len(x), "routing", "[T, k]")
    require(routing.experts.is_contiguous() and routing.weights.is_contiguous(), "routing", "contiguous")
    if biases is not None:
        require(biases.gate_up.shape == gate_up.shape[:2], "biases", "gate_up [E, 2I]")
        require(biases.down.shape == down.shape[:2], "biases", "down [E, H]")
        require(all(each.is_contiguous() and each.dtype == x.dtype for each in biases), "biases", "as the weights are")
    run = _experts_mlp_triton if runs_triton(x) else experts_mlp_reference
    return run(x, gate_up, down, routing, biases, clamp)


def experts_mlp_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routing: Routing,
    biases: Biases | None = None,
    clamp: Clamp | None = None,
) -> Tensor:
    def compute(expert: int, rows: Tensor) -> Tensor:
        of_gate_up, of_down = (None, None) if biases is None else (biases.gate_up[expert], biases.down[expert])
        values = F.linear(rows, gate_up[expert], of_gate_up)
        values = silu_mul_reference(values) if clamp is None else clamped_mul(values, clamp)
        return F.linear(values, down[expert], of_down)

    return sum_of_experts(x, routing, len(gate_up), compute)


def clamped_mul(gate_up: Tensor, clamp: Clamp) -> Tensor:
    """The clamped product of the two halves, in float32 or wider, rounded once. Shapes: [T, 2I] -> [T, I].

    Rows are padded: a CPU's sigmoid rounds the last elements of a tensor in another way than those that fill a vector.
    """
    wide, inner = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)), gate_up.shape[1] // 2
    gate, up = F.pad(wide.unflatten(1, (2, inner)), (0, -inner % _VECTORS)).unbind(1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (gate * torch.sigmoid(clamp.alpha * gate) * (up + 1))[:, :inner].to(gate_up.dtype)


def _experts_mlp_triton(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routing: Routing,
    biases: Biases | None = None,
    clamp: Clamp | None = None,
) -> Tensor:
    (num_rows, size), (num_experts, _, inner), top_k = x.shape, down.shape, routing.experts.shape[1]
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    places = torch.empty((num_experts, num_rows), dtype=torch.int32, device=x.device)
    pairs = num_rows * top_k
    _group_kernel[(num_experts,)](routing.experts, counts, places, num_rows, pairs, BLOCK=_GROUP_BLOCK, num_warps=4)
    gated = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    of_gate_up, of_down = (None, None) if biases is None else biases
    _multiply(x, gate_up, of_gate_up, gated, counts, places, top_k, True, clamp)
    results = torch.empty((pairs, size), dtype=x.dtype, device=x.device)
    _multiply(gated, down, of_down, results, counts, places, 1, False, None)
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    _sum_kernel[(num_rows, ceil_div(size, _SUM_BLOCK))](
        results, routing.weights, out, size, TOP_K=top_k, BLOCK=min(next_power_of_2(size), _SUM_BLOCK)
    )
    return out


def _multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, counts: Tensor, places: Tensor, shared: int,
    gated: bool, clamp: Clamp | None,
) -> None:  # fmt: skip
    """`shared`: places side by side that have the same row of x."""
    (num_experts, num_rows), (pairs, size_n), size_k = places.shape, out.shape, weight.shape[2]
    is_wide = x.element_size() > 2
    many = not is_wide and pairs >= _MANY * num_experts
    block_m, block_n = (_MANY_ROWS, 64) if many else (_FEW_ROWS, 32)
    tiles = min(pairs, pairs // block_m + num_experts)
    _multiply_kernel[(ceil_div(size_n, block_n), tiles)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        counts,
        places,
        x.stride(0),
        size_n,
        num_rows,
        shared,
        *(clamp or (1.0, 0.0)),
        SIZE_K=size_k,
        EXPERTS=num_experts,
        GATED=gated,
        BIASED=bias is not None,
        CLAMPED=clamp is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=min(max(next_power_of_2(size_k), 16), _MOST_K),
        BLOCK_E=next_power_of_2(num_experts),
        num_warps=4,
        num_stages=2 if is_wide else 3,
    )


@TritonKernel.with_options(do_not_specialize=("num_rows", "pairs"))
def _group_kernel(
    experts_ptr: tl.tensor, counts_ptr: tl.tensor, places_ptr: tl.tensor, num_rows: int, pairs: int,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program per expert: where it is chosen, ascending, and how often."""
    expert = tl.program_id(0)
    count = 0
    for begin in range(0, pairs, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        mine = (tl.load(experts_ptr + place, mask=place < pairs, other=-1) == expert).to(tl.int32)
        rank = count + tl.cumsum(mine, axis=0) - 1
        tl.store(places_ptr + expert.to(tl.int64) * num_rows + rank, place, mask=mine > 0)
        count += tl.sum(mine, axis=0)
    tl.store(counts_ptr + expert, count)


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def _multiply_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, out_ptr: tl.tensor, counts_ptr: tl.tensor,
    places_ptr: tl.tensor, x_stride: int, size_n: tl.tensor, num_rows: int, shared: int, alpha: float, limit: float,
    SIZE_K: tl.constexpr, EXPERTS: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
) -> None:  # fmt: skip
    """One program per BLOCK_N columns and tile of BLOCK_M rows of one expert. Tiles of an expert follow one another."""
    each = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + each, mask=each < EXPERTS, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((ends <= tl.program_id(1)).to(tl.int32), axis=0)
    if expert < EXPERTS:
        first = tl.program_id(1) - tl.sum(tl.where(each == expert, ends - tiles, 0), axis=0)
        rank = first * BLOCK_M + tl.arange(0, BLOCK_M)
        live = rank < tl.sum(tl.where(each == expert, counts, 0), axis=0)
        place = tl.load(places_ptr + expert.to(tl.int64) * num_rows + rank, mask=live, other=0)
        x_rows = x_ptr + (place // shared).to(tl.int64)[:, None] * x_stride
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_n = n < size_n
        weight_rows = n.to(tl.int64)[None, :] * SIZE_K
        matrix_ptr = weight_ptr + expert.to(tl.int64) * size_n * SIZE_K * (2 if GATED else 1)
        up_ptr = matrix_ptr + size_n.to(tl.int64) * SIZE_K
        y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for begin in range(0, SIZE_K, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            inside_k = k < SIZE_K
            mask = inside_k[:, None] & inside_n[None, :]
            x = tl.load(x_rows + k[None, :], mask=live[:, None] & inside_k[None, :], other=0.0)
            y = tl.dot(
                x, tl.load(matrix_ptr + weight_rows + k[:, None], mask=mask, other=0.0), y, input_precision="ieee"
            )
            if GATED:
                w = tl.load(up_ptr + weight_rows + k[:, None], mask=mask, other=0.0)
                up = tl.dot(x, w, up, input_precision="ieee")
        if BIASED:
            biases = bias_ptr + expert.to(tl.int64) * size_n * (2 if GATED else 1) + n
            y += tl.load(biases, mask=inside_n, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(biases + size_n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
        if CLAMPED:
            y = tl.minimum(y, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
            y = y / (1.0 + tl.exp(-alpha * y)) * (up + 1.0)
        elif GATED:
            y = y / (1.0 + tl.exp(-y)) * up
        tl.store(out_ptr + place.to(tl.int64)[:, None] * size_n + n[None, :], y, mask=live[:, None] & inside_n[None, :])


@TritonKernel
def _sum_kernel(
    results_ptr: tl.tensor, weights_ptr: tl.tensor, out_ptr: tl.tensor, size: int, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in range(TOP_K):
        result = tl.load(results_ptr + (row * TOP_K + place) * size + column, mask=inside, other=0.0)
        total += tl.load(weights_ptr + row * TOP_K + place) * result.to(tl.float32)
    tl.store(out_ptr + row * size + column, total, mask=inside)
