"""The experts of a layer as one operation: each row through its own gated MLPs, and their weighted sum.

    group      by expert, the places of its rows among the T * k; not for few rows
    gate, up   tiles of rows of one expert -> silu(gate) * up, or clamped, by place
    down       the same tiles -> results, by place
    sum        each row's k results, largest weight first; with a residual and its norm, if asked for

For one row the last two are one launch of `sum_of_experts.py`, or in 4-bit floats of `float4_streams.py`, with the same
bits, and for a few rows of float8 or 16 bits `quantized_streams.sum_down`.

Grids follow from shapes alone: there are as many programs as tiles could be at most, and those without rows end at
once. `products.py` states why a row's result has the same bits whatever rows are beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.experts.float4_products import multiply_float4
from overlap_spec_kernels.experts.float4_streams import float4_down, takes_float4_down
from overlap_spec_kernels.experts.products import Clamp, Places, multiply, places_of
from overlap_spec_kernels.experts.quantized_products import (
    multiply_quantized,
    multiply_tiles,
    takes_tiles,
)
from overlap_spec_kernels.experts.quantized_streams import streams_gate, streams_sum, sum_down
from overlap_spec_kernels.experts.route import Rows, written
from overlap_spec_kernels.experts.stacks import ExpertWeight, QuantizedStack, fits_stack, matrix_of
from overlap_spec_kernels.experts.sum_of_experts import (
    PART,
    Routing,
    down_row,
    gate_row,
    multiply_and_add,
    squares_of,
    sum_of_experts,
    sums_in_product,
    takes_down,
    takes_gate,
)
from overlap_spec_kernels.language import halves_added, let_next_begin, tl, wait
from overlap_spec_kernels.launch import (
    TritonKernel,
    ceil_div,
    dependent_launch,
    next_power_of_2,
    require,
    runs_triton,
    warps_for,
)
from overlap_spec_kernels.linear.float4 import Float4Matrices
from overlap_spec_kernels.norm.normed import Norm, Normed
from overlap_spec_kernels.norm.rms_norm import OF_NORMS, fits_norm, rms_norm_reference
from overlap_spec_kernels.norm.silu_mul import silu, silu_mul_reference

_SUM_BLOCK = 1024

Gate = Clamp | Callable[[Tensor], Tensor]  # of gate and up, [T, 2I] -> [T, I]


class Biases(NamedTuple):
    """Of the linears of experts."""

    gate_up: Tensor  # [E, 2I], gate first
    down: Tensor  # [E, H]


def experts_mlp(
    x: Rows,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    routing: Routing,
    biases: Biases | None = None,
    clamp: Gate | None = None,
) -> Tensor:
    """For each row the sum of weight * down(silu(gate(x)) * up(x)) over its experts, in the order of its weights.

    `clamp`: the product of gate and up instead of silu(gate) * up; a function of both is an operation of its own.
    Shapes: x [T, H], gate_up [E, 2I, H], gate first, down [E, H, I], routing [T, k] -> [T, H]. A row's experts are
    distinct. Raises: ValueError naming the argument. Sync: never on CUDA but in float64, whose reference waits.
    """
    _require_fitting(written(x), gate_up, down, routing, biases)
    if runs_triton(written(x)):
        return _experts_mlp_triton(x, gate_up, down, routing, biases, clamp)
    return experts_mlp_reference(written(x), gate_up, down, routing, biases, clamp)


def experts_add(
    x: Rows,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    routing: Routing,
    residual: Tensor,
    norm: Norm,
    biases: Biases | None = None,
    clamp: Gate | None = None,
    shared: Tensor | None = None,
) -> Normed:
    """`residual + (experts_mlp(..) + shared)`, and its norm. Each of these sums is rounded.

    `shared`: of an expert that every row has. Shapes: residual, shared [T, H], norm [H]. Raises: ValueError naming the
    argument. Sync: as `experts_mlp`.
    """
    rows = written(x)
    _require_fitting(rows, gate_up, down, routing, biases)
    require(residual.shape == rows.shape and residual.stride(1) == 1, "residual", "[T, H], contiguous last dimension")
    require(residual.dtype == rows.dtype, "residual", "the dtype of x")
    require(norm.weight.shape == rows.shape[1:] and norm.weight.is_contiguous(), "norm", "[H], contiguous")
    require(fits_norm(norm.weight, rows.dtype), "norm", OF_NORMS)
    if shared is not None:
        require(shared.shape == rows.shape and shared.is_contiguous(), "shared", "[T, H], contiguous")
        require(shared.dtype == rows.dtype, "shared", "the dtype of x")
    if runs_triton(rows):
        return _experts_add_triton(x, gate_up, down, routing, residual, norm, biases, clamp, shared)
    return experts_add_reference(rows, gate_up, down, routing, residual, norm, biases, clamp, shared)


def _require_fitting(
    x: Tensor, gate_up: ExpertWeight, down: ExpertWeight, routing: Routing, biases: Biases | None
) -> None:
    require(x.dim() == 2 and x.stride(1) == 1, "x", "[T, H] with a contiguous last dimension")
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if isinstance(weight, Float4Matrices):
            require(weight.fits and weight.parts == (2 if name == "gate_up" else 1), name, "parts in tiles")
            require(x.dtype in (weight.dtype, torch.float64), "x", "the dtype that the weights are made for")
        elif isinstance(weight, QuantizedStack):
            require(weight.data.dim() == 3 and fits_stack(weight), name, "bytes of rows, scales and zeros in float32")
        else:
            require(weight.dim() == 3 and weight.is_contiguous(), name, "[E, O, I], contiguous")
            require(x.dtype == weight.dtype, "x", "the dtype of the weights")
    num_experts, rows, size = gate_up.shape
    require(size == x.shape[1] and rows % 2 == 0, "gate_up", "rows as long as x, two halves")
    require(tuple(down.shape) == (num_experts, x.shape[1], rows // 2), "down", "[E, H, I]")
    require(routing.experts.shape == routing.weights.shape and len(routing.experts) == len(x), "routing", "[T, k]")
    require(routing.experts.is_contiguous() and routing.weights.is_contiguous(), "routing", "contiguous")
    if biases is not None:
        require(tuple(biases.gate_up.shape) == (num_experts, rows), "biases", "gate_up [E, 2I]")
        require(tuple(biases.down.shape) == (num_experts, size), "biases", "down [E, H]")
        require(all(each.is_contiguous() and each.dtype == x.dtype for each in biases), "biases", "as x is")


def experts_mlp_reference(
    x: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    routing: Routing,
    biases: Biases | None = None,
    clamp: Gate | None = None,
) -> Tensor:
    def compute(expert: int, rows: Tensor) -> Tensor:
        of_gate_up, of_down = (None, None) if biases is None else (biases.gate_up[expert], biases.down[expert])
        values = F.linear(rows, matrix_of(gate_up, expert, rows.dtype), of_gate_up)
        if clamp is None:
            values = silu_mul_reference(values)
        else:
            values = clamped_mul(values, clamp) if isinstance(clamp, Clamp) else clamp(values)
        return F.linear(values, matrix_of(down, expert, rows.dtype), of_down)

    return sum_of_experts(x, routing, gate_up.shape[0], compute)


def experts_add_reference(
    x: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    routing: Routing,
    residual: Tensor,
    norm: Norm,
    biases: Biases | None = None,
    clamp: Gate | None = None,
    shared: Tensor | None = None,
) -> Normed:
    routed = experts_mlp_reference(x, gate_up, down, routing, biases, clamp)
    values = residual + (routed if shared is None else routed + shared)
    return Normed(values, rms_norm_reference(values, norm.weight, norm.eps))


def clamped_mul(gate_up: Tensor, clamp: Clamp) -> Tensor:
    """The clamped product of the two halves, in float32 or wider, rounded once. Shapes: [T, 2I] -> [T, I]."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=1)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (silu(gate, clamp.alpha) * (up + 1)).to(gate_up.dtype)


def _experts_mlp_triton(
    x: Rows,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    routing: Routing,
    biases: Biases | None = None,
    clamp: Gate | None = None,
) -> Tensor:
    return _summed(_results(x, gate_up, down, routing, biases, clamp), routing.weights)


def _experts_add_triton(
    x: Rows,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    routing: Routing,
    residual: Tensor,
    norm: Norm,
    biases: Biases | None = None,
    clamp: Gate | None = None,
    shared: Tensor | None = None,
) -> Normed:
    if biases is None and isinstance(down, QuantizedStack) and takes_down(residual, down, routing.experts):
        places = places_of(routing.experts, gate_up.shape[0])
        return down_row(_gated(x, gate_up, None, places, clamp), down, routing, residual, norm, shared)
    if biases is None and isinstance(down, Tensor) and sums_in_product(down, routing.experts):
        places = places_of(routing.experts, gate_up.shape[0])
        return multiply_and_add(_gated(x, gate_up, None, places, clamp), down, routing, residual, norm, shared)
    if biases is None and not isinstance(down, Float4Matrices) and streams_sum(written(x), down, routing.experts):
        places = _places(x, gate_up, routing.experts, clamp)
        return sum_down(_gated(x, gate_up, None, places, clamp), down, routing, residual, norm, shared)
    if isinstance(down, Float4Matrices) and takes_float4_down(residual, down, routing.experts):
        places, (of_gate_up, of_down) = places_of(routing.experts, gate_up.shape[0]), biases or (None, None)
        if isinstance(gate_up, Float4Matrices) and (clamp is None or isinstance(clamp, Clamp)):
            gated = multiply_float4(written(x), gate_up, of_gate_up, places, True, True, clamp, before_sum=True)
        else:
            gated = _gated(x, gate_up, of_gate_up, places, clamp)
        return float4_down(gated, down, of_down, routing, residual, norm, shared)
    results = _results(x, gate_up, down, routing, biases, clamp)
    weighted, squares = torch.empty_like(residual, memory_format=torch.contiguous_format), squares_of(residual)
    values = _summed(results, routing.weights, Addition(residual, norm, weighted, squares, shared))
    return Normed(values, weighted, squares, norm.eps)


def _results(
    x: Rows, gate_up: ExpertWeight, down: ExpertWeight, routing: Routing, biases: Biases | None, clamp: Gate | None
) -> Tensor:
    """Of every place. Shapes: -> [T * k, H]."""
    places = places_of(routing.experts, gate_up.shape[0])
    if (
        isinstance(gate_up, QuantizedStack)
        and isinstance(down, QuantizedStack)
        and biases is None
        and clamp is None
        and takes_tiles(written(x), gate_up, down, places)
    ):
        return multiply_tiles(written(x), gate_up, down, places)
    of_gate_up, of_down = (None, None) if biases is None else biases
    gated = _gated(x, gate_up, of_gate_up, places, clamp)
    return _multiplied(gated, down, of_down, places, False, False, None)


def _places(x: Rows, gate_up: ExpertWeight, experts: Tensor, clamp: Gate | None) -> Places:
    """Without lists where no product takes them. Shapes: experts [T, k]."""
    if isinstance(gate_up, QuantizedStack) and clamp is None and streams_gate(written(x), gate_up, experts):
        return Places(experts, experts, experts)
    return places_of(experts, gate_up.shape[0])


def _gated(x: Rows, gate_up: ExpertWeight, bias: Tensor | None, places: Places, clamp: Gate | None) -> Tensor:
    """The first product of every place, and what is made of gate and up. Shapes: -> [T * k, I]."""
    if (
        bias is None
        and clamp is None
        and not isinstance(gate_up, Float4Matrices)
        and takes_gate(written(x), gate_up, places.experts)
    ):
        return gate_row(x, gate_up, places.experts)
    if clamp is None or isinstance(clamp, Clamp):
        return _multiplied(written(x), gate_up, bias, places, True, True, clamp)
    return clamp(_multiplied(written(x), gate_up, bias, places, True, False, None))


def _multiplied(
    x: Tensor, weight: ExpertWeight, bias: Tensor | None, places: Places, first: bool, gated: bool, clamp: Clamp | None
) -> Tensor:
    """See `multiply`."""
    if isinstance(weight, Float4Matrices):
        return multiply_float4(x, weight, bias, places, first, gated, clamp)
    if isinstance(weight, QuantizedStack):
        return multiply_quantized(x, weight, bias, places, first, gated, clamp)
    return multiply(x, weight, bias, places, first, gated, clamp)


class Addition(NamedTuple):
    """What a sum of experts is added to, and where its norm goes."""

    residual: Tensor
    norm: Norm
    weighted: Tensor
    squares: Tensor
    shared: Tensor | None


def _summed(results: Tensor, weights: Tensor, add: Addition | None = None) -> Tensor:
    """Each row's sum; with a residual, what its norm needs besides. Shapes: -> [T, H]."""
    (num_rows, top_k), size = weights.shape, results.shape[1]
    out = torch.empty((num_rows, size), dtype=results.dtype, device=results.device)
    block = min(max(next_power_of_2(size), PART), _SUM_BLOCK)
    shared = None if add is None else add.shared
    sum_kernel[(num_rows, ceil_div(size, block))](
        results,
        weights,
        out if shared is None else shared,
        out if add is None else add.residual,
        out if add is None else add.norm.weight,
        out,
        out if add is None else add.weighted,
        weights if add is None else add.squares,
        size,
        size if add is None else add.residual.stride(0),
        TOP_K=top_k,
        ADDED=add is not None,
        SHARED=shared is not None,
        BLOCK=block,
        num_warps=warps_for(2 * block),
        **dependent_launch(results.device, num_rows),
    )
    return out


@TritonKernel
def sum_kernel(
    results_ptr: tl.tensor, weights_ptr: tl.tensor, shared_ptr: tl.tensor, residual_ptr: tl.tensor,
    norm_ptr: tl.tensor, out_ptr: tl.tensor, weighted_ptr: tl.tensor, squares_ptr: tl.tensor, size: int,
    residual_stride: int, TOP_K: tl.constexpr, ADDED: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row and block of columns. `_multiply_and_add_kernel` has the same sums in the same order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    let_next_begin(PDL)
    # Written before the products (`wait_for_choice`): read before the wait for them.
    if SHARED:
        shared = tl.load(shared_ptr + row * size + column, mask=inside, other=0.0)
    if ADDED:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        result = tl.load(results_ptr + (row * TOP_K + place) * size + column, mask=inside, other=0.0)
        total += tl.load(weights_ptr + row * TOP_K + place) * result.to(tl.float32)
    if SHARED:
        total = (total.to(shared.dtype).to(tl.float32) + shared.to(tl.float32)).to(shared.dtype).to(tl.float32)
    if ADDED:
        total = (total.to(residual.dtype).to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        wide = total.to(tl.float32)
        tl.store(weighted_ptr + row * size + column, wide * weight, mask=inside)
        part = tl.program_id(1) * (BLOCK // 16) + tl.arange(0, BLOCK // 16)
        squares = halves_added(halves_added(halves_added(halves_added(wide * wide, 16), 8), 4), 2)
        tl.store(squares_ptr + part * tl.num_programs(0) + row, squares, mask=part * 16 < size)
    tl.store(out_ptr + row * size + column, total, mask=inside)
