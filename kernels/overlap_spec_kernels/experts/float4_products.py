"""Products of rows with the matrices of their experts, as `products.py` has them, in 4-bit floats.

Tiles of all sizes add up a row's columns in the order of `linear/float4.py`, by the same operation of tensor cores. So
do the kernels of `float4_streams.py`, which one row in bfloat16 has on Hopper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.experts.float4_streams import float4_gate, takes_float4_gate
from overlap_spec_kernels.experts.products import (
    Clamp,
    Places,
    Tile,
    gate_of,
    listed_tile,
    tile_of_place,
    wait_for_choice,
)
from overlap_spec_kernels.language import tl, wait
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2
from overlap_spec_kernels.linear.float4 import TILE_COLUMNS, Float4Matrices, float4_products

_FEW = Tile(16, 32, TILE_COLUMNS, 4, 5)
_MANY = Tile(32, 64, TILE_COLUMNS, 4, 3)  # 64 rows would make a warpgroup's product, whose operand is in shared memory
_AVERAGE = 24  # rows of an expert on average from which tiles are large


def multiply_float4(
    x: Tensor, weight: Float4Matrices, bias: Tensor | None, places: Places, first: bool, gated: bool,
    clamp: Clamp | None, before_sum: bool = False,
) -> Tensor:  # fmt: skip
    """See `products.multiply`. `before_sum`: the next kernel is `float4_down`.

    Behind `float4_gate` one of Triton's would begin late: multiprocessors would have to divide their memory anew.
    """
    if before_sum and takes_float4_gate(x, weight, places.experts):
        return float4_gate(x, weight, bias, places.experts, clamp)
    (num_experts, rows, size_k), pairs = weight.shape, places.experts.numel()
    (num_rows, top_k), size_n = places.experts.shape, rows // 2 if gated else rows
    is_wide = x.element_size() > 2  # then tiles of another size would have other orders of sums
    tile = _MANY if pairs >= _AVERAGE * num_experts and not is_wide else _FEW
    out = torch.empty((pairs, size_n), dtype=x.dtype, device=x.device)
    tiles = min(pairs, pairs // tile.rows + num_experts) if places.are_listed else pairs
    _multiply_float4_kernel[(ceil_div(size_n, tile.columns), tiles)](
        x,
        weight.words,
        weight.scales,
        weight.scales if weight.factors is None else weight.factors,
        x if bias is None else bias,
        out,
        *places,
        x.stride(0),
        size_n,
        weight.words.shape[2],
        num_rows,
        top_k if first else 1,
        *(clamp or (1.0, 0.0)),
        SIZE_K=size_k,
        EXPERTS=num_experts,
        TOP_K=top_k,
        GROUP=weight.group,
        FACTORS=weight.factors is not None,
        UNIT=weight.unit,
        LISTED=places.are_listed,
        ALONE=num_rows == 1,
        FIRST=first,
        GATED=gated,
        BIASED=bias is not None,
        CLAMPED=clamp is not None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_T=next_power_of_2(top_k),
        num_warps=tile.warps,
        num_stages=2 if is_wide else tile.stages,
        **dependent_launch(x.device, num_rows),
    )
    return out


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def _multiply_float4_kernel(
    x_ptr: tl.tensor, words_ptr: tl.tensor, scales_ptr: tl.tensor, factors_ptr: tl.tensor, bias_ptr: tl.tensor,
    out_ptr: tl.tensor, experts_ptr: tl.tensor, counts_ptr: tl.tensor, places_ptr: tl.tensor, x_stride: int,
    size_n: tl.tensor, row_tiles: int, num_rows: int, shared: int, alpha: float, limit: float, SIZE_K: tl.constexpr,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUP: tl.constexpr, FACTORS: tl.constexpr, UNIT: tl.constexpr,
    LISTED: tl.constexpr, ALONE: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    CLAMPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per BLOCK_N columns and tile of BLOCK_M rows of one expert. `row_tiles`: of a part of its matrix."""
    wait_for_choice(PDL, FIRST)
    if LISTED:
        expert, place, live, runs = listed_tile(counts_ptr, places_ptr, num_rows, EXPERTS, BLOCK_M, BLOCK_E)
    else:
        expert, place, live, runs = tile_of_place(experts_ptr, num_rows, TOP_K, ALONE, BLOCK_M, BLOCK_T)
    if not FIRST:
        wait(PDL)
    if runs:
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_n = n < size_n
        PARTS: tl.constexpr = 2 if GATED else 1
        first = expert.to(tl.int64) * PARTS * row_tiles
        y, up = float4_products(
            x_ptr + (place // shared).to(tl.int64)[:, None] * x_stride, live, words_ptr, scales_ptr, n, first,
            row_tiles, SIZE_K, GROUP, GATED, UNIT, BLOCK_M, BLOCK_N
        )  # fmt: skip
        at = expert.to(tl.int64) * PARTS * size_n + n
        if FACTORS:
            y *= tl.load(factors_ptr + at, mask=inside_n, other=0.0)[None, :] * 256.0
            if GATED:
                up *= tl.load(factors_ptr + at + size_n, mask=inside_n, other=0.0)[None, :] * 256.0
        if BIASED:
            y += tl.load(bias_ptr + at, mask=inside_n, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(bias_ptr + at + size_n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
        y = gate_of(y, up, alpha, limit, GATED, CLAMPED)
        tl.store(out_ptr + place.to(tl.int64)[:, None] * size_n + n[None, :], y, mask=live[:, None] & inside_n[None, :])
