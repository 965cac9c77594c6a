"""A weight in 8 or 4 bits whose products add up K in one order, for any number of rows: `ordered.py`, but for formats.

Whatever the rows, what is multiplied is scale * (value - zero), computed in float32 and rounded to 16 bits:

    up to 64 rows    the values of a tile become 16 bits in registers, run after run of the weight's columns
    more             W becomes a matrix in a scratch buffer (`dequantize.py`), which is an `OrderedWeight`

So a row has the bits that it has with that matrix, and those do not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, ceil_div, next_power_of_2, require, runs_triton
from overlap_spec_kernels.linear.call import num_columns
from overlap_spec_kernels.linear.dequantize import dequantize
from overlap_spec_kernels.linear.operand import LinearOperand
from overlap_spec_kernels.linear.ordered import OrderedWeight
from overlap_spec_kernels.linear.packing import BIASED, ZERO, Order, Packing, dequantised, in_rows
from overlap_spec_kernels.linear.quantized import QuantizedWeight, Scratch
from overlap_spec_kernels.norm.normed import Normed, normalised

_MOST_CONVERTED = 64  # rows of x; with more, W is written to the scratch buffer first
_BLOCK_N = 32


@dataclass(frozen=True, slots=True)
class OrderedQuantizedWeight(LinearOperand):
    """W [O, I] in row order; a row's results depend on W and the row alone. `scratch`: as of `QuantizedWeight`."""

    data: Tensor  # [O, bytes of a row] u8
    packing: Packing
    dtype: torch.dtype  # the type of x
    scratch: Scratch | None = None

    @classmethod
    def of(cls, weight: QuantizedWeight) -> OrderedQuantizedWeight:
        """The same weight; out of fragment order it is copied."""
        data, packing = weight.data, weight.packing
        if packing.order is Order.FRAGMENTS:
            data, packing = in_rows(data, packing)
        return cls(data.contiguous(), packing, weight.dtype, weight.scratch)

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1] * 8 // self.packing.bits

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, which a forward reads."""
        zeros = self.packing.zeros
        return self.data.nbytes + self.packing.scales.nbytes + (0 if zeros is None else zeros.nbytes)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.data.device

    def rows(self, ids: Tensor | slice) -> OrderedQuantizedWeight:
        """Some rows of W: a view for a slice, a copy for [N] i64."""
        return replace(self, data=self.data[ids], packing=self.packing.rows(ids, self.shape[0]))

    def check(self, x: Tensor) -> None:
        require(self.data.dim() == 2 and self.shape[1] == x.shape[1], "weight", "[O, I]")
        require(self.data.is_contiguous() and self.data.dtype == torch.uint8, "weight", "contiguous bytes")
        require(x.dtype == self.dtype, "weight", "made for the dtype of x")

    def product(self, x: Tensor | Normed) -> Tensor:
        return self._multiplied(normalised(x), False, self.dtype)

    def gated(self, x: Tensor | Normed) -> Tensor:
        return self._multiplied(normalised(x), True, self.dtype)

    def logits(self, x: Tensor | Normed) -> Tensor:
        return self._multiplied(normalised(x), False, torch.float32)

    def _multiplied(self, rows: Tensor, gated: bool, dtype: torch.dtype) -> Tensor:
        if runs_triton(rows) and len(rows) <= _MOST_CONVERTED:
            return multiply_few_bits(rows, self.data, self.packing, gated, dtype)
        dense = OrderedWeight(self._matrix())
        if dtype != rows.dtype:
            return dense.logits(rows)
        return dense.gated(rows) if gated else dense.product(rows)

    def _matrix(self) -> Tensor:
        """W in 16 bits, in the scratch buffer if there is one. The next weight overwrites it, on the same stream."""
        if self.scratch is None:
            return dequantised(self.data, self.packing, torch.float32).to(self.dtype)
        matrix = self.scratch.buffer[: self.shape[0] * self.shape[1]].view(self.shape)
        dequantize(self.data, self.packing, matrix)
        return matrix


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
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        num_warps=4,
        num_stages=4,
        enable_fp_fusion=False,
    )
    return out


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def _ordered_quantized_kernel(
    x_ptr: tl.tensor, data_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, out_ptr: tl.tensor,
    x_stride: int, scale_stride: int, num_rows: int, size_n: tl.tensor, all_rows: int,
    RUNS: tl.constexpr, PART: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr, ZERO_POINT: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
    for run in range(0, RUNS):
        for half in tl.static_range(8 // BITS):
            k = run * PART + half * HALF + byte
            x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :])
            w = _values(
                data_ptr, scales_ptr, zeros_ptr, column, run, byte, k, half, scale_stride, all_rows,
                RUNS * HALF, HALF, BITS, GROUP, SCALE_ROWS, ZEROS, ZERO_POINT, BIAS
            )  # fmt: skip
            acc = tl.dot(x, w.to(x.dtype), acc, input_precision="ieee")
            if GATED:
                w = _values(
                    data_ptr, scales_ptr, zeros_ptr, column + size_n, run, byte, k, half, scale_stride, all_rows,
                    RUNS * HALF, HALF, BITS, GROUP, SCALE_ROWS, ZEROS, ZERO_POINT, BIAS
                )  # fmt: skip
                up = tl.dot(x, w.to(x.dtype), up, input_precision="ieee")
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    places = out_ptr + m.to(tl.int64)[:, None] * size_n + n[None, :]
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < size_n)[None, :])


@TritonKernel
def _values(
    data_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, column: tl.tensor, run: tl.tensor,
    byte: tl.tensor, k: tl.tensor, half: tl.constexpr, scale_stride: int, all_rows: int, ROW_BYTES: tl.constexpr,
    HALF: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    ZERO_POINT: tl.constexpr, BIAS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """scale * (value - zero), as `dequantize` computes it. Shapes: column [N], byte, k [K] -> [K, N] f32."""
    data = tl.load(data_ptr + column.to(tl.int64)[None, :] * ROW_BYTES + (run * HALF + byte)[:, None])
    nibble = (data >> (4 * half)) & 15
    value = data.to(tl.float8e4nv, bitcast=True).to(tl.float32) if BITS == 8 else nibble.to(tl.float32)
    group = (k // GROUP if GROUP > 0 else k * 0)[:, None]
    if ZEROS:
        value -= tl.load(zeros_ptr + group * all_rows + column[None, :]).to(tl.float32) - BIAS
    elif BITS == 4:
        value -= ZERO_POINT
    return value * tl.load(scales_ptr + group * scale_stride + column[None, :] // SCALE_ROWS).to(tl.float32)
