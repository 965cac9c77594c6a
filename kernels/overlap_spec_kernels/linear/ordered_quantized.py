"""A weight in 8 or 4 bits whose products add up K in one order, for any number of rows: `ordered.py`, but for formats.

Float8 values with a scale for each row of W are exact in 16 bits. Whatever the rows, they are multiplied as they are,
and a row's scale multiplies its sums in float32:

    up to 128 rows   packed_products.py, with all of K in each program, where W lies in fragment order
    more             the values become a matrix in a scratch buffer (`dequantize.py`), which wide_linear.py multiplies

In other formats scale * (value - zero) is multiplied, computed in float32 and rounded to 16 bits:

    up to 64 rows    the values of a tile become 16 bits in registers, run after run of the weight's columns
    more             W becomes a matrix in a scratch buffer, which is an `OrderedWeight`

So a row has the bits that it has with that matrix, and those do not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.language import of_16_bits, tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, runs_triton
from overlap_spec_kernels.linear.call import call_of, num_columns
from overlap_spec_kernels.linear.ordered import OrderedOperand, OrderedWeight, multiply_many
from overlap_spec_kernels.linear.packed_products import parts_in_one_order, products_in_one_order
from overlap_spec_kernels.linear.packing import BIASED, ZERO, Order, Packing, dequantised, in_rows
from overlap_spec_kernels.linear.quantized import PackedWeight, QuantizedWeight
from overlap_spec_kernels.norm.silu_mul import silu_mul

_MOST_CONVERTED = 64  # rows of x; with more, W is written to the scratch buffer first
_BLOCK_N = 32


@dataclass(frozen=True, slots=True)
class OrderedQuantizedWeight(PackedWeight, OrderedOperand):
    """W [O, I]; a row's results depend on W and the row alone."""

    @classmethod
    def of(cls, weight: QuantizedWeight) -> OrderedQuantizedWeight:
        """The same weight. Out of fragment order it is copied, but where a kernel takes it in that order."""
        data, packing = weight.data, weight.packing
        if scales_rows(packing):
            scales = packing.row_scales(weight.shape[0]).float().contiguous()
            packing = replace(packing, scales=scales, scale_rows=1)
        elif packing.order is Order.FRAGMENTS:
            data, packing = in_rows(data, packing)
        return cls(data.contiguous(), packing, weight.dtype, weight.scratch)

    def rows(self, ids: Tensor | slice) -> OrderedQuantizedWeight:
        """Some rows of W: a view for a slice in row order, else a copy."""
        plain = QuantizedWeight(self.data, self.packing, self.dtype, self.scratch)
        return OrderedQuantizedWeight.of(plain.rows(ids))

    def multiplied(self, rows: Tensor, gated: bool, dtype: torch.dtype) -> Tensor:
        if runs_triton(rows):
            if cut := products_in_one_order(rows, self.data, gated, self.packing):
                call = call_of(rows, self.data, gated, None, dtype, cut.block_n)
                cut.run(call, cut.num_programs(self.data, gated), self.packing)
                assert call.out is not None
                return call.out
            if len(rows) <= _MOST_CONVERTED and self.packing.order is Order.ROWS:
                return multiply_few_bits(rows, self.data, self.packing, gated, dtype)
        if not scales_rows(self.packing):
            return OrderedWeight(self._matrix(True)).multiplied(rows, gated, dtype)
        if runs_triton(rows):
            parts = parts_in_one_order(*self.shape, gated) if self.packing.order is Order.FRAGMENTS else 1
            return multiply_many(rows, self._matrix(False), gated, dtype, self.packing.scales[0], parts)
        sums = F.linear(rows.float(), self._matrix(False).float()) * self.packing.scales[0]
        return silu_mul(sums.to(dtype)) if gated else sums.to(dtype)

    def _matrix(self, scaled: bool) -> Tensor:
        """Its values, or all of it, in 16 bits."""
        if self.scratch is not None:
            return self.matrix(self.scratch, scaled)
        return dequantised(self.data, self.packing, torch.float32, scaled).to(self.dtype)


def scales_rows(packing: Packing) -> bool:
    """Whether sums are multiplied by scales: of float8 values, of which each row has one."""
    return packing.bits == 8 and packing.group == 0


def multiply_few_bits(x: Tensor, data: Tensor, packing: Packing, gated: bool, dtype: torch.dtype) -> Tensor:
    """The product, values becoming 16 bits in registers. Sync: never.

    Shapes: x [T, I], data [O, bytes of a row] u8 in row order -> [T, O], or [T, O / 2] if gated.
    """
    num_rows, size_k = x.shape
    size_n = num_columns(data, gated)
    block_m = max(next_power_of_2(min(num_rows, _MOST_CONVERTED)), 16)
    out = x.new_empty((num_rows, size_n), dtype=dtype)
    programs = ceil_div(size_n, _BLOCK_N), ceil_div(num_rows, block_m)
    _ordered_quantized_kernel[programs](
        x,
        data,
        packing.scales,
        packing.scales if packing.zeros is None else packing.zeros,
        out,
        x.stride(0),
        packing.scales.shape[1],
        num_rows,
        size_n,
        data.shape[0],
        RUNS=size_k // packing.part,
        PART=packing.part,
        BITS=packing.bits,
        GROUP=packing.group,
        SCALE_ROWS=packing.scale_rows,
        ZEROS=packing.zeros is not None,
        ZERO_POINT=ZERO,
        BIAS=BIASED,
        GATED=gated,
        COMPILED=x.device.type != "cpu",
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        num_warps=4,
        num_stages=8 if block_m <= 32 else 4,
        enable_fp_fusion=False,
        **dependent_launch(x.device, num_rows),
    )
    return out


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def _ordered_quantized_kernel(
    x_ptr: tl.tensor, data_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, out_ptr: tl.tensor,
    x_stride: int, scale_stride: int, num_rows: int, size_n: tl.tensor, all_rows: int,
    RUNS: tl.constexpr, PART: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr, ZERO_POINT: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, COMPILED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program for a tile of the result, which walks all of K. `all_rows`: of W."""
    HALF: tl.constexpr = PART * BITS // 8  # bytes of a run, each of which holds a value of each half
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(m, num_rows - 1).to(tl.int64)  # rows and columns past the last are computed and not written
    column = tl.minimum(n, size_n - 1)
    byte = tl.arange(0, HALF)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    wait_for_inputs(PDL)
    for run in range(0, RUNS):
        for half in tl.static_range(8 // BITS):
            k = run * PART + half * HALF + byte
            x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :])
            w = _values(
                data_ptr, scales_ptr, zeros_ptr, column, run, byte, half, scale_stride, all_rows,
                RUNS * HALF, HALF, BITS, GROUP, SCALE_ROWS, ZEROS, ZERO_POINT, BIAS
            )  # fmt: skip
            acc = tl.dot(x, of_16_bits(w, x.dtype, COMPILED), acc, input_precision="ieee")
            if GATED:
                w = _values(
                    data_ptr, scales_ptr, zeros_ptr, column + size_n, run, byte, half, scale_stride, all_rows,
                    RUNS * HALF, HALF, BITS, GROUP, SCALE_ROWS, ZEROS, ZERO_POINT, BIAS
                )  # fmt: skip
                up = tl.dot(x, of_16_bits(w, x.dtype, COMPILED), up, input_precision="ieee")
    if BITS == 8 and GROUP == 0:
        acc *= tl.load(scales_ptr + column)[None, :]
        if GATED:
            up *= tl.load(scales_ptr + size_n + column)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    places = out_ptr + m.to(tl.int64)[:, None] * size_n + n[None, :]
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < size_n)[None, :])


@TritonKernel
def _values(
    data_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, column: tl.tensor, run: tl.tensor,
    byte: tl.tensor, half: tl.constexpr, scale_stride: int, all_rows: int, ROW_BYTES: tl.constexpr,
    HALF: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    ZERO_POINT: tl.constexpr, BIAS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """scale * (value - zero), as `dequantize` computes it, or the value where rows have scales.

    Shapes: column [N], byte [HALF] -> [HALF, N] f32.
    """
    data = tl.load(data_ptr + column.to(tl.int64)[None, :] * ROW_BYTES + (run * HALF + byte)[:, None])
    nibble = (data >> (4 * half)) & 15
    value = data.to(tl.float8e4nv, bitcast=True).to(tl.float32) if BITS == 8 else nibble.to(tl.float32)
    if BITS == 8 and GROUP == 0:
        return value
    group = (run * (8 // BITS) + half) * HALF // GROUP if GROUP > 0 else 0  # the columns of a half share one
    if ZEROS:
        value -= (tl.load(zeros_ptr + group * all_rows + column).to(tl.float32) - BIAS)[None, :]
    elif BITS == 4:
        value -= ZERO_POINT
    return value * tl.load(scales_ptr + group * scale_stride + column // SCALE_ROWS).to(tl.float32)[None, :]
