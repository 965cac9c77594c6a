"""Products of rows with the matrices of their experts, as `products.py` has them, in 8 and 4 bits.

W's rows are the rows of a product, and rows of x its columns. So W is widened in registers, once in a program however
many rows of x it has, and is an operand of `wgmma` there. Its columns are added up 16 at a time in their order, by
tiles of all sizes. Two values are widened at once: a conversion of each would take longer than memory takes to bring
it. Of gate and up a program has rows in turn, so that tiles of 64 rows, the smallest that `wgmma` takes, are many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.experts.products import (
    Clamp,
    Places,
    Tile,
    gate_of,
    listed_tile,
    tile_of_place,
    wait_for_choice,
)
from overlap_spec_kernels.experts.stacks import QuantizedStack
from overlap_spec_kernels.language import tl, wait
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2

# Rows of x, and of W, of gate and up together: `wgmma` takes 64 or more. A step of the loop is a run of columns.
_WIDE = Tile(16, 32, 128, 4, 2)  # float32
_FEW = {True: Tile(16, 64, 128, 4, 3), False: Tile(16, 64, 128, 4, 3)}  # by `gated`
_SOME, _MANY = Tile(64, 128, 128, 4, 3), Tile(128, 128, 128, 8, 3)
_AVERAGES = {8: {128: _MANY, 32: _SOME}, 4: {32: _SOME}}  # rows of an expert on average from which they are used


def quantized_tile(num_pairs: int, num_experts: int, gated: bool, bits: int, is_wide: bool = False) -> Tile:
    """`bits`: of a weight's value. `is_wide`: x is of float32."""
    if is_wide:
        return _WIDE
    fits = (tile for average, tile in _AVERAGES[bits].items() if num_pairs >= average * num_experts)
    return next(fits, _FEW[gated])


def multiply_quantized(
    x: Tensor, weight: QuantizedStack, bias: Tensor | None, places: Places, first: bool, gated: bool,
    clamp: Clamp | None,
) -> Tensor:  # fmt: skip
    """See `products.multiply`."""
    (num_experts, rows, size_k), pairs, packing = weight.shape, places.experts.numel(), weight.packing
    (num_rows, top_k), size_n = places.experts.shape, rows // 2 if gated else rows
    tile = quantized_tile(pairs, num_experts, gated, packing.bits, x.element_size() > 2)
    out = torch.empty((pairs, size_n), dtype=x.dtype, device=x.device)
    tiles = min(pairs, pairs // tile.rows + num_experts) if places.are_listed else pairs
    multiply_quantized_kernel[(ceil_div(rows, tile.columns), tiles)](
        x,
        weight.data,
        packing.scales,
        packing.scales if packing.zeros is None else packing.zeros,
        packing.scales.shape[2],
        x if bias is None else bias,
        out,
        *places,
        x.stride(0),
        size_n,
        num_rows,
        top_k if first else 1,
        *(clamp or (1.0, 0.0)),
        SIZE_K=size_k,
        EXPERTS=num_experts,
        TOP_K=top_k,
        BITS=packing.bits,
        GROUP=packing.group,
        SCALE_ROWS=packing.scale_rows,
        ZEROS=packing.zeros is not None,
        PART=packing.part,
        LISTED=places.are_listed,
        FIRST=first,
        GATED=gated,
        BIASED=bias is not None,
        CLAMPED=clamp is not None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_T=next_power_of_2(top_k),
        STAGES=tile.stages,
        num_warps=tile.warps,
        **dependent_launch(x.device, num_rows),
    )
    return out


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def multiply_quantized_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, scale_stride: int,
    bias_ptr: tl.tensor, out_ptr: tl.tensor, experts_ptr: tl.tensor,
    counts_ptr: tl.tensor, places_ptr: tl.tensor, x_stride: int, size_n: tl.tensor, num_rows: int, shared: int,
    alpha: float, limit: float, SIZE_K: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr, PART: tl.constexpr, LISTED: tl.constexpr,
    FIRST: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per BLOCK_N rows of W and tile of BLOCK_M rows of x of one expert.

    A step of the loop is a run of PART columns, whose bytes hold a value each, or two, of columns that are PART / 2
    apart (`linear/packing.py`).
    """
    wait_for_choice(PDL, FIRST)
    if LISTED:
        expert, place, live, runs = listed_tile(counts_ptr, places_ptr, num_rows, EXPERTS, BLOCK_M, BLOCK_E)
    else:
        expert, place, live, runs = tile_of_place(experts_ptr, num_rows, TOP_K, BLOCK_M, BLOCK_T)
    if not FIRST:
        wait(PDL)
    if runs:
        rows = size_n.to(tl.int64) * (2 if GATED else 1)  # of an expert's matrix
        row = tl.minimum(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), rows - 1)  # none is behind the last
        n = row
        if GATED:  # gate's and up's in turn
            n = row // 2 + row % 2 * size_n
        first = expert.to(tl.int64) * rows
        HALVES: tl.constexpr = 8 // BITS
        WIDTH: tl.constexpr = PART // HALVES  # columns of a product
        GROUPS: tl.constexpr = SIZE_K // GROUP if GROUP > 0 else 1
        matrix = weight_ptr + (first + n)[:, None] * (SIZE_K // HALVES) + tl.arange(0, WIDTH)[None, :]
        x_rows = x_ptr + (place // shared).to(tl.int64)[None, :] * x_stride + tl.arange(0, WIDTH)[:, None]
        scales = scales_ptr + expert.to(tl.int64) * GROUPS * scale_stride + n // SCALE_ROWS
        zeros = zeros_ptr + first * GROUPS + n
        is_read = live[None, :] | (BLOCK_M > 16)  # a large tile reads the row of place 0 instead of others
        y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for run in tl.range(0, SIZE_K // PART, num_stages=STAGES):
            w = tl.load(matrix + run * WIDTH)
            part = y
            if GROUP > 0:
                part = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for half in tl.static_range(HALVES):
                k = run * PART + half * WIDTH
                x = tl.load(x_rows + k, mask=is_read, other=0.0)
                group = k // GROUP if GROUP > 0 else 0
                values = widened(w, half, zeros + group * rows, x.dtype, BITS, ZEROS)
                part = tl.dot(values, x, part, input_precision="ieee")
                if GROUP > 0 and (half == HALVES - 1 or GROUP < PART):
                    y += part * tl.load(scales + group * scale_stride)[:, None]
                    part = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            if GROUP == 0:
                y = part
        if GROUP == 0:
            y *= tl.load(scales)[:, None]
        if BIASED:
            y += tl.load(bias_ptr + first + n).to(tl.float32)[:, None]
        OUT: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
        result = y
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(y, (OUT, 2, BLOCK_M)), (0, 2, 1)))
            result = gate_of(gate, up, alpha, limit, GATED, CLAMPED)
        column = tl.program_id(0) * OUT + tl.arange(0, OUT)
        to = out_ptr + place.to(tl.int64)[None, :] * size_n + column[:, None]
        tl.store(to, result, mask=live[None, :] & (column < size_n)[:, None])


@TritonKernel
def widened(
    w: tl.tensor, half: tl.constexpr, zeros: tl.tensor, TYPE: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr
) -> tl.tensor:
    """Values less their zero points, of 4 bits those of the low or high half. Shapes: w [N, K] u8, zeros [N]."""
    if BITS == 8:
        values = of_8_bits(w, TYPE)
    else:
        values = of_4_bits(w, half, TYPE)
        if ZEROS:
            values -= tl.load(zeros)[:, None].to(TYPE)
        else:
            values -= 136
    return values


@TritonKernel
def of_8_bits(w: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Values of float8 e4m3. In bfloat16 two at a time, whose exponents are 120 too small at first; NaN becomes 480."""
    if tl.bfloat16 == TYPE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, f, z;
            mov.b32 f, 0x7b807b80;
            mov.b32 z, 0x80008000;
            prmt.b32 a, $1, 0, 0x1804;
            shr.s32 a, a, 4;
            and.b32 a, a, 0x87f087f0;
            fma.rn.bf16x2 $0, a, f, z;
            }""",
            "=r,r",
            [w],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return w.to(tl.float8e4nv, bitcast=True).to(TYPE)


@TritonKernel
def of_4_bits(w: tl.tensor, half: tl.constexpr, TYPE: tl.constexpr) -> tl.tensor:
    """128 + the low or high 4 bits, as zero points have it. In bfloat16 two at a time: 0x4300 + v is 128 + v."""
    if tl.bfloat16 == TYPE and half == 0:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, e;
            mov.b32 e, 0x43004300;
            prmt.b32 a, $1, 0, 0x4140;
            lop3.b32 $0, a, 0x000f000f, e, 0xea;
            }""",
            "=r,r",
            [w],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    if tl.bfloat16 == TYPE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, e;
            mov.b32 e, 0x43004300;
            prmt.b32 a, $1, 0, 0x4140;
            shr.b32 a, a, 4;
            lop3.b32 $0, a, 0x000f000f, e, 0xea;
            }""",
            "=r,r",
            [w],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return ((w >> (4 * half)) & 15).to(TYPE) + 128
