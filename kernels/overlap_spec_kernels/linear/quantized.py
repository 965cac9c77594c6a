"""A weight in 8 or 4 bits, and the choice of the kernel that multiplies by it.

    in row order
    quantized_stream.py   few rows of x: W streams through shared memory, and becomes bfloat16 in registers
    quantized_tiles.py    9 to 128 rows of x, 8 bits, a scale for each row: the same, with products of warpgroups

    in fragment order
    packed_stream.py      up to 16 rows of x, 32 of some W: W streams through shared memory, x stays in registers
    packed_products.py    9 to 128 rows of x, in 8 bits to 2,048: products of warpgroups, W converted meanwhile

    in both
    dequantize.py         more rows: W becomes a bfloat16 matrix in a scratch buffer, which is a `DenseWeight`

All compute the same function up to rounding: activations are never quantised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.launch import require, runs_gluon, runs_triton, runs_warpgroups
from overlap_spec_kernels.linear.call import Addition, call_of
from overlap_spec_kernels.linear.dense import DenseWeight
from overlap_spec_kernels.linear.dequantize import dequantize
from overlap_spec_kernels.linear.operand import LinearOperand
from overlap_spec_kernels.linear.packed_products import PackedProducts, packed_products_for
from overlap_spec_kernels.linear.packed_stream import Beside, PackedStream, packed_stream_for, takes_weight
from overlap_spec_kernels.linear.packing import Order, Packing, dequantised, fits_fragments, in_fragments, in_rows
from overlap_spec_kernels.linear.quantized_stream import QuantizedStream, stream_of
from overlap_spec_kernels.linear.quantized_tiles import QuantizedTiles, tiles_of
from overlap_spec_kernels.norm.add_rms_norm import add_rms_norm
from overlap_spec_kernels.norm.normed import Norm, Normed, normalised, rows_of
from overlap_spec_kernels.norm.silu_mul import silu_mul
from overlap_spec_kernels.nvrtc import runs_hopper

MOST_STREAMED = 64  # rows of x; with more, W is written to the scratch buffer first
_MOST_ADDED = 128  # rows of x; with more, a kernel of its own reads and adds the residual sooner than the linear
_WHOLE_ROWS = 32  # scales of groups are copied 16 bytes at a time, those of gate and up apart


Cut = QuantizedTiles | QuantizedStream | PackedStream | PackedProducts


@dataclass(slots=True)
class Scratch:
    """A buffer for one dequantised weight at a time, which all weights of a model share."""

    buffer: Tensor  # [elements] of the type of x

    def reserve(self, num_elements: int) -> None:
        """Make it as large as this. It grows while weights are loaded, never later."""
        if len(self.buffer) < num_elements:
            self.buffer = self.buffer.new_empty(num_elements)


@dataclass(frozen=True, slots=True)
class PackedWeight(LinearOperand):
    """W [O, I]. `scratch`: on a GPU, a buffer with room for all of it."""

    data: Tensor  # [O, bytes of a row] u8
    packing: Packing
    dtype: torch.dtype  # the type of x
    scratch: Scratch | None = None

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

    def check(self, x: Tensor) -> None:
        data = self.data
        require(data.dim() == 2 and self.shape[1] == x.shape[1], "weight", "[O, I]")
        require(data.is_contiguous() and data.dtype == torch.uint8, "weight", "contiguous bytes")
        require(x.dtype == self.dtype, "weight", "made for the dtype of x")

    def matrix(self, scratch: Scratch, scaled: bool = True) -> Tensor:
        """W in 16 bits, in this buffer, or its values only. The next weight overwrites it, on the same stream."""
        matrix = scratch.buffer[: self.shape[0] * self.shape[1]].view(self.shape)
        dequantize(self.data, self.packing, matrix, scaled)
        return matrix


@dataclass(frozen=True, slots=True)
class QuantizedWeight(PackedWeight):
    """A `PackedWeight` whose number of rows chooses what multiplies."""

    def rows(self, ids: Tensor | slice) -> QuantizedWeight:
        """Some rows of W: a view for a slice, a copy for [N] i64 and in fragment order, where they stay if they fit."""
        if self.packing.order is Order.FRAGMENTS:
            data, packing = in_rows(self.data, self.packing)
            some = replace(self, data=data, packing=packing).rows(ids)
            return some.in_fragments() if fits_fragments(some.shape, some.packing) else some
        return replace(self, data=self.data[ids], packing=self.packing.rows(ids, self.shape[0]))

    def in_fragments(self) -> QuantizedWeight:
        """The same weight in fragment order, which it must fit."""
        data, packing = in_fragments(self.data, self.packing)
        return replace(self, data=data, packing=packing)

    def in_order_of_device(self) -> QuantizedWeight:
        """The same weight in the order of the kernels that multiply by it fastest where it is."""
        if not (self.dtype == torch.bfloat16 and runs_hopper(self.data.device)):
            return self
        fits = fits_fragments(self.shape, self.packing) and takes_weight(self.shape, self.packing)
        return self.in_fragments() if fits else self

    def product(self, x: Tensor | Normed) -> Tensor:
        if out := self._launch(x, False, None, self.dtype):
            return out.values
        return quantized_linear_reference(x, self, False) if self._runs_reference(x) else self._dense().product(x)

    def product_beside(self, x: Tensor | Normed, other: LinearOperand) -> tuple[Tensor, Tensor]:
        cut = self.cut(rows_of(x), False)
        if not (isinstance(cut, PackedStream) and isinstance(other, DenseWeight) and cut.takes_beside(other.matrix)):
            return LinearOperand.product_beside(self, x, other)
        beside = Beside(other.matrix, rows_of(x).new_empty(len(rows_of(x)), len(other.matrix)))
        call = call_of(x, self.data, False, None, self.dtype, cut.block_n)
        cut.run(call, cut.num_programs(self.data, False), self.packing, beside)
        assert call.out is not None
        return call.out, beside.out

    def gated(self, x: Tensor | Normed) -> Tensor:
        if out := self._launch(x, True, None, self.dtype):
            return out.values
        return quantized_linear_reference(x, self, True) if self._runs_reference(x) else self._dense().gated(x)

    def add(self, x: Tensor, residual: Tensor, norm: Norm, take: bool = False) -> Normed:
        cut = self.cut(x, False)
        if cut is None and not self._runs_reference(x):
            return self._dense().add(x, residual, norm, take)
        own_norm = norm.weight.dtype == self.dtype or isinstance(
            cut, PackedStream
        )  # others have norms of their own type
        if len(x) > _MOST_ADDED or not own_norm:
            return LinearOperand.add(self, x, residual, norm)
        if cut is not None:
            return self.launch(cut, x, False, Addition(residual, norm), self.dtype)
        rows, values = add_rms_norm(quantized_linear_reference(x, self, False), residual, norm.weight, norm.eps)
        return Normed(values, rows)

    def logits(self, x: Tensor | Normed) -> Tensor:
        if out := self._launch(x, False, None, torch.float32):
            return out.values
        return quantized_logits_reference(x, self) if self._runs_reference(x) else self._dense().logits(x)

    def cut(self, x: Tensor, gated: bool) -> Cut | None:
        """How a kernel of the weight's order divides the linear; None where none applies."""
        if self.packing.order is Order.FRAGMENTS:
            given = x, self.data, gated, self.packing
            return packed_stream_for(*given) or packed_products_for(*given)
        if x.dtype != torch.bfloat16 or not runs_gluon(x.device) or x.stride(0) % 8:
            return None
        if self.packing.group and self.shape[0] % _WHOLE_ROWS:
            return None
        if runs_warpgroups(x.device) and (tiles := tiles_of(x, self.data, gated, self.packing)):
            return tiles
        return stream_of(x, self.data, gated, self.packing) if x.shape[0] <= MOST_STREAMED else None

    def launch(
        self,
        cut: Cut,
        x: Tensor | Normed,
        gated: bool,
        add: Addition | None,
        dtype: torch.dtype,
    ) -> Normed:
        """Run a kernel."""
        call = call_of(x, self.data, gated, add, dtype, cut.block_n)
        cut.run(call, cut.num_programs(self.data, gated), self.packing)
        assert call.out is not None
        weighted = call.out if call.weighted is None else call.weighted
        return Normed(call.out, weighted, call.sums, add.norm.eps if add else 0)

    def _launch(self, x: Tensor | Normed, gated: bool, add: Addition | None, dtype: torch.dtype) -> Normed | None:
        cut = self.cut(rows_of(x), gated)
        return None if cut is None else self.launch(cut, x, gated, add, dtype)

    def _runs_reference(self, x: Tensor | Normed) -> bool:
        return self.scratch is None or not runs_triton(rows_of(x))

    def _dense(self) -> DenseWeight:
        assert self.scratch is not None
        return DenseWeight(self.matrix(self.scratch))


def quantized_linear_reference(x: Tensor | Normed, weight: QuantizedWeight, gated: bool) -> Tensor:
    y = quantized_logits_reference(x, weight).to(rows_of(x).dtype)
    return silu_mul(y) if gated else y


def quantized_logits_reference(x: Tensor | Normed, weight: QuantizedWeight) -> Tensor:
    rows = normalised(x)
    wide = rows if rows.element_size() > 2 else rows.float()
    return F.linear(wide, dequantised(weight.data, weight.packing, wide.dtype))
