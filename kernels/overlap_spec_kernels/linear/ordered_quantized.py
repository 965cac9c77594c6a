"""A weight in 8 or 4 bits whose products add up K in one order, for any number of rows: `ordered.py`, but for formats.

Float8 values with a scale for each row of W are exact in 16 bits. Whatever the rows, they are multiplied as they are,
and a row's scale multiplies its sums in float32:

    up to 2,048 rows packed_products.py, where W lies in fragment order; up to 512 if K has parts
    more             the values become a matrix in a scratch buffer (`dequantize.py`), which wide_linear.py multiplies

There a norm takes no launch of its own, as without the flag: what is written is the sum with the residual, that times
the norm's weight, and sums of squares of 64 columns, from which a large weight scales its results.

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
from overlap_spec_kernels.linear.call import Addition, call_of, num_columns
from overlap_spec_kernels.linear.ordered import OrderedOperand, OrderedWeight, multiply_many
from overlap_spec_kernels.linear.packed_chain import Layer, Weight, chain_for
from overlap_spec_kernels.linear.packed_products import parts_in_one_order, products_in_one_order
from overlap_spec_kernels.linear.packing import BIASED, ZERO, Order, Packing, dequantised, in_rows
from overlap_spec_kernels.linear.quantized import PackedWeight, QuantizedWeight
from overlap_spec_kernels.norm.normed import Norm, Normed, normalised, rows_of
from overlap_spec_kernels.norm.silu_mul import silu_mul

_MOST_CONVERTED = 64  # rows of x; with more, W is written to the scratch buffer first
_BLOCK_N = 32
_PART = 64  # columns whose squares are added up
_HELPERS = 3  # of packed_products.cu, each of which adds up every third of these sums
_LARGE = 8 << 20  # bytes of a weight in 16 bits that wide_linear.py takes


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

    def product(self, x: Tensor | Normed) -> Tensor:
        return self._normed_times(x, False, self.dtype)

    def gated(self, x: Tensor | Normed) -> Tensor:
        return self._normed_times(x, True, self.dtype)

    def logits(self, x: Tensor | Normed) -> Tensor:
        return self._normed_times(x, False, torch.float32)

    def add(self, x: Tensor, residual: Tensor, norm: Norm, take: bool = False) -> Normed:
        if not self._in_fragments or not runs_triton(x) or self.shape[0] % _PART or norm.weight.dtype != self.dtype:
            return OrderedOperand.add(self, x, residual, norm)
        if added := self._launch(x, False, self.dtype, Addition(residual, norm)):
            return added
        return add_in_parts(self.multiplied(x, False, torch.float32), residual, norm)

    def add_mlp(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Norm,
        gate_up: OrderedQuantizedWeight,
        down: OrderedQuantizedWeight,
        next_norm: Norm,
    ) -> Normed | None:
        """The sum with the residual, and with what a gated MLP makes of it, in one launch; None where none does it."""
        if not runs_triton(x):
            return None
        output, first, last = (Weight(weight.data, weight.packing) for weight in (self, gate_up, down))
        layer = Layer(output, norm, first, last, next_norm)
        chain = chain_for(x, layer)
        return None if chain is None else chain.run(x, residual, layer)

    def _normed_times(self, x: Tensor | Normed, gated: bool, dtype: torch.dtype) -> Tensor:
        """A large weight multiplies rows before their scale, with any number of rows."""
        large = self._in_fragments and 2 * self.shape[0] * self.shape[1] >= _LARGE
        if not large or not isinstance(x, Normed) or x.squares is None:
            return self.multiplied(normalised(x), gated, dtype)
        if product := self._launch(x, gated, dtype):
            return product.values
        matrix, parts = self._matrix(False), parts_in_one_order(*self.shape, gated)
        return multiply_many(x.weighted, matrix, gated, dtype, self.packing.scales[0], parts, scales_of_rows(x))

    @property
    def _in_fragments(self) -> bool:
        return self.packing.order is Order.FRAGMENTS and scales_rows(self.packing) and self.dtype == torch.bfloat16

    def _launch(
        self, x: Tensor | Normed, gated: bool, dtype: torch.dtype, add: Addition | None = None
    ) -> Normed | None:
        """By packed_products.py; None where it does not apply."""
        cut = products_in_one_order(rows_of(x), self.data, gated, self.packing)
        if cut is None:
            return None
        call = call_of(x, self.data, gated, add, dtype, cut.block_n)
        cut.run(call, cut.num_programs(self.data, gated), self.packing)
        assert call.out is not None
        weighted = call.out if call.weighted is None else call.weighted
        return Normed(call.out, weighted, call.sums, add.norm.eps if add else 0)

    def multiplied(self, x: Tensor | Normed, gated: bool, dtype: torch.dtype) -> Tensor:
        rows = normalised(x)
        if runs_triton(rows):
            if product := self._launch(rows, gated, dtype):
                return product.values
            if len(rows) <= _MOST_CONVERTED and self.packing.order is Order.ROWS:
                return multiply_few_bits(rows, self.data, self.packing, gated, dtype)
        if not scales_rows(self.packing):
            return OrderedWeight(self._matrix(True), divided=False).multiplied(rows, gated, dtype)
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


def add_in_parts(y: Tensor, residual: Tensor, norm: Norm) -> Normed:
    """The sum with the residual, prepared for the norm: the bits of packed_products.cu. Sync: never.

    Shapes: y [T, H] f32, residual [T, H], of H a multiple of 64.
    """
    num_rows, size = y.shape
    total = residual.new_empty((num_rows, size))
    weighted, squares = torch.empty_like(total), y.new_empty((size // _PART, num_rows))
    tensors = y, residual, norm.weight, total, weighted, squares
    _add_in_parts_kernel[(num_rows,)](
        *tensors,
        residual.stride(0),
        num_rows,
        size,
        BLOCK=next_power_of_2(size),
        PART=_PART,
        num_warps=8,
        enable_fp_fusion=False,
        **dependent_launch(y.device, num_rows),
    )
    return Normed(total, weighted, squares, norm.eps)


def add_in_parts_reference(y: Tensor, residual: Tensor, norm: Norm) -> Normed:
    total = (y + residual.float()).to(residual.dtype)
    weighted = (total.float() * norm.weight.float()).to(residual.dtype)
    sums = total.float().square().unflatten(1, (-1, _PART))
    while sums.shape[2] > 1:  # neighbours first
        sums = sums[:, :, ::2] + sums[:, :, 1::2]
    return Normed(total, weighted, sums[:, :, 0].t().contiguous(), norm.eps)


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def _add_in_parts_kernel(
    y_ptr: tl.tensor, residual_ptr: tl.tensor, norm_ptr: tl.tensor, total_ptr: tl.tensor, weighted_ptr: tl.tensor,
    squares_ptr: tl.tensor, residual_stride: int, num_rows: int, size: int, BLOCK: tl.constexpr, PART: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    wait_for_inputs(PDL)
    y = tl.load(y_ptr + row * size + column, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
    total = (y + residual.to(tl.float32)).to(residual.dtype)
    tl.store(total_ptr + row * size + column, total, mask=inside)
    total = total.to(tl.float32)
    weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(weighted_ptr + row * size + column, total * weight, mask=inside)
    sums = total * total
    for step in tl.static_range(6):
        even, odd = tl.split(tl.reshape(sums, [BLOCK >> (step + 1), 2]))
        sums = even + odd
    part = tl.arange(0, BLOCK // PART)
    tl.store(squares_ptr + part * num_rows + row, sums, mask=part < size // PART)


def scales_of_rows(x: Normed) -> Tensor:
    """The norm's scales: the bits of packed_products.cu. Shapes: -> [T] f32. Sync: never."""
    assert x.squares is not None
    (num_parts, num_rows), size = x.squares.shape, x.weighted.shape[1]
    out = x.squares.new_empty(num_rows)
    given = dependent_launch(out.device, num_rows)
    _scales_of_rows_kernel[(ceil_div(num_rows, 128),)](
        x.squares, out, num_rows, num_parts, size, x.eps, BLOCK=128, HELPERS=_HELPERS, enable_fp_fusion=False, **given
    )
    return out


def scales_of_rows_reference(x: Normed) -> Tensor:
    assert x.squares is not None
    sums = [sum(x.squares[first::_HELPERS], torch.zeros_like(x.squares[0])) for first in range(_HELPERS)]
    return torch.rsqrt((sums[0] + sums[1] + sums[2]) / x.weighted.shape[1] + x.eps)


@TritonKernel.with_options(do_not_specialize=("num_rows", "num_parts"))
def _scales_of_rows_kernel(
    squares_ptr: tl.tensor, out_ptr: tl.tensor, num_rows: int, num_parts: int, size: int, eps: float,
    BLOCK: tl.constexpr, HELPERS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for helper in tl.static_range(HELPERS):
        sums = tl.zeros([BLOCK], tl.float32)
        for part in range(helper, num_parts, HELPERS):
            sums += tl.load(squares_ptr + part * num_rows + row, mask=row < num_rows, other=0.0)
        total += sums
    mean = tl.div_rn(total, tl.zeros([BLOCK], tl.float32) + size)
    tl.store(out_ptr + row, tl.rsqrt(mean + eps), mask=row < num_rows)


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
