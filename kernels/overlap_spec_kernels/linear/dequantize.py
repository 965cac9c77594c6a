"""A quantised weight as a matrix of the model's own type, for products with many rows."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, ceil_div, require, runs_triton
from overlap_spec_kernels.linear.fragments import TILE_COLUMNS, TILE_ROWS
from overlap_spec_kernels.linear.packing import BIASED, ZERO, Order, Packing, dequantised

_BLOCK_N = 8
_BLOCK_RUNS = 4
_BLOCK_TILES = 4


def dequantize(data: Tensor, packing: Packing, out: Tensor, scaled: bool = True) -> None:
    """Write scale * (value - zero), computed in float32, to `out`; not `scaled`: value - zero.

    Shapes: data [O, bytes of a row] u8 -> out [O, I]. Raises: ValueError naming the argument. Sync: never.
    """
    size_n, size_k = out.shape
    require(data.is_contiguous() and data.dtype == torch.uint8, "data", "contiguous bytes")
    require(data.shape == (size_n, size_k * packing.bits // 8), "data", "[O, bytes of a row of out]")
    require(out.is_contiguous(), "out", "contiguous")
    if not runs_triton(out):
        out.copy_(dequantize_reference(data, packing, out.dtype, scaled))
        return
    if packing.order is Order.FRAGMENTS:
        _dequantize_tiles(data, packing, out, scaled)
        return
    num_bytes = packing.part * packing.bits // 8
    _dequantize_kernel[(ceil_div(size_n, _BLOCK_N), ceil_div(size_k // packing.part, _BLOCK_RUNS))](
        data,
        packing.scales,
        packing.scales if packing.zeros is None else packing.zeros,
        out,
        size_n,
        size_k // packing.part,
        packing.scales.shape[1],
        BITS=packing.bits,
        GROUP=packing.group,
        PART=packing.part,
        SCALE_ROWS=packing.scale_rows,
        SCALED=scaled,
        ZEROS=packing.zeros is not None,
        ZERO_POINT=ZERO,
        BIAS=BIASED,
        BYTES=num_bytes,
        BLOCK_N=_BLOCK_N,
        BLOCK_RUNS=_BLOCK_RUNS,
        num_warps=4,
    )


def _dequantize_tiles(data: Tensor, packing: Packing, out: Tensor, scaled: bool) -> None:
    """`dequantize` of a weight in fragment order."""
    tiles, columns = out.shape[0] // TILE_ROWS, out.shape[1] // TILE_COLUMNS
    _dequantize_tiles_kernel[(tiles, ceil_div(columns, _BLOCK_TILES))](
        data.view(torch.int16) if packing.bits == 8 else data,
        packing.scales,
        packing.scales if packing.zeros is None else packing.zeros,
        out,
        out.shape[1],
        BITS=packing.bits,
        GROUP=packing.group,
        BLOCKS=packing.scale_rows > 1,
        SCALED=scaled,
        ZEROS=packing.zeros is not None,
        ZERO_POINT=ZERO,
        BIAS=BIASED,
        BLOCK_K=_BLOCK_TILES * TILE_COLUMNS,
        num_warps=4,
    )


def dequantize_reference(data: Tensor, packing: Packing, dtype: torch.dtype, scaled: bool = True) -> Tensor:
    wide = dtype if dtype.itemsize > 2 else torch.float32
    return dequantised(data, packing, wide, scaled).to(dtype)


@TritonKernel
def _dequantize_kernel(
    data_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, out_ptr: tl.tensor, size_n: int, num_runs: int,
    scale_stride: int, BITS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALED: tl.constexpr, ZEROS: tl.constexpr, ZERO_POINT: tl.constexpr, BIAS: tl.constexpr, BYTES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_RUNS: tl.constexpr,
) -> None:  # fmt: skip
    """One program for BLOCK_N rows and BLOCK_RUNS runs of columns."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    at = tl.arange(0, BLOCK_RUNS * BYTES)[None, :]
    run, byte = tl.program_id(1) * BLOCK_RUNS + at // BYTES, at % BYTES
    live = (n < size_n) & (run < num_runs)
    row = n.to(tl.int64)
    data = tl.load(data_ptr + row * (num_runs * BYTES) + run * BYTES + byte, mask=live, other=0)
    for half in tl.static_range(8 // BITS):
        k = run * PART + half * BYTES + byte
        if BITS == 8:
            value = data.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            value = ((data >> (4 * half)) & 15).to(tl.float32)
        group = k // GROUP if GROUP > 0 else k * 0
        if ZEROS:
            zero = tl.load(zeros_ptr + group * size_n + n, mask=live, other=0.0).to(tl.float32) - BIAS
            value -= zero
        elif BITS == 4:
            value -= ZERO_POINT
        if SCALED:
            scales = scales_ptr + group * scale_stride + n // SCALE_ROWS
            value *= tl.load(scales, mask=live, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * (num_runs * PART) + k, value, mask=live)


@TritonKernel
def _dequantize_tiles_kernel(
    data_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, out_ptr: tl.tensor, size_k: int,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr,
    ZERO_POINT: tl.constexpr, BIAS: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """One program for 16 rows and BLOCK_K columns. The names are those of fragments.py."""
    tile = tl.program_id(0)
    row = tl.arange(0, 16)[:, None]
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    live = (k < size_k) & (row < 16)
    i, high, part = row // 8 + k % 16 // 8 * 2, k % 2, k % 64 // 16
    lane = row % 8 * 4 + k % 8 // 2
    begin = tile.to(tl.int64) * (size_k * 16) + k // 64 * 1024  # values
    if BITS == 8:  # halves of words, each of which has the bits of two values
        place = begin // 2 + part // 2 * 256 + lane * 8 + part % 2 * 4 + i // 2 * 2 + high
        half = tl.load(data_ptr + place, mask=live, other=0).to(tl.int32)
        first = (half >> 8 & 0x80) | (half >> 4 & 0x7F)
        second = (half >> 4 & 0x80) | (half >> 8 & 0x70) | (half & 0x0F)
        value = tl.where(i % 2 == 0, first, second).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        data = tl.load(data_ptr + begin // 2 + lane * 16 + part * 4 + high * 2 + i // 2, mask=live, other=0)
        value = ((data >> (i % 2 * 4).to(tl.uint8)) & 15).to(tl.float32)
    n = tile * 16 + row
    place = n + k * 0
    if GROUP > 0:
        group = tile * (size_k // GROUP) + k // GROUP
        place = group * 4 if BLOCKS else group * 16 + row % 8 * 2 + row // 8
        if ZEROS:
            value -= tl.load(zeros_ptr + place, mask=live, other=0.0).to(tl.float32) - BIAS
    if BITS == 4 and not ZEROS:
        value -= ZERO_POINT
    if SCALED:
        value *= tl.load(scales_ptr + place, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + n.to(tl.int64) * size_k + k, value, mask=live)
