"""A weight matrix in the model's own type, and the choice of the kernel that multiplies by it.

With few rows a linear takes as long as reading its weight, and a launch takes as long as reading a small weight. So
each linear is one launch, and it starts to load its weight before the kernel that writes its rows has ended. The four
kernels:

    whole_rows_linear.py   few rows of x, short rows of W: W waits in registers
    streamed_linear.py     few rows of x: W streams through shared memory
    warpgroup_linear.py    9 to 128 rows of x, large W: tiles of warpgroup products
    wide_linear.py         many rows of x, gated or argmax: tiles that two multiprocessors share

Where none of them is faster than a BLAS followed by the row kernels, those run: the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.launch import require
from overlap_spec_kernels.linear.call import Addition, call_of
from overlap_spec_kernels.linear.linear_argmax import argmax_of_programs
from overlap_spec_kernels.linear.operand import LinearOperand
from overlap_spec_kernels.linear.short_linear import row_linear_for
from overlap_spec_kernels.linear.streamed_linear import Stream, stream_for
from overlap_spec_kernels.linear.warpgroup_linear import Tiles, argmax_tiles_for, tiles_for
from overlap_spec_kernels.linear.whole_rows_linear import whole_rows_for
from overlap_spec_kernels.linear.wide_linear import GATES, Wide, wide_for
from overlap_spec_kernels.logits.columns import largest_columns
from overlap_spec_kernels.norm.add_rms_norm import add_rms_norm
from overlap_spec_kernels.norm.normed import Norm, Normed, normalised, rows_of
from overlap_spec_kernels.norm.rms_norm import rms_norm
from overlap_spec_kernels.norm.silu_mul import silu_mul

_MOST_STREAMED = 8  # rows of x that a large weight is streamed for
_MOST_BIASED = 32  # rows of x: with more, a BLAS and the row kernel take less than tiles with a bias and a residual


@dataclass(frozen=True, slots=True)
class MatrixOperand(LinearOperand):
    """W, unquantised."""

    matrix: Tensor  # [O, I]
    bias: Tensor | None = None  # [O], added to the product in float32

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[0], self.matrix.shape[1]

    def check(self, x: Tensor) -> None:
        weight = self.matrix
        require(weight.dim() == 2 and weight.shape[1] == x.shape[1], "weight", "[O, I]")
        require(weight.is_contiguous() and weight.dtype == x.dtype, "weight", "contiguous, with the dtype of x")
        if (bias := self.bias) is not None:
            require(bias.shape == weight.shape[:1] and bias.is_contiguous(), "bias", "[O], contiguous")
            require(bias.dtype == x.dtype, "bias", "the dtype of x")


@dataclass(frozen=True, slots=True)
class DenseWeight(MatrixOperand):
    """W, whose number of rows of x chooses what multiplies."""

    def product(self, x: Tensor | Normed) -> Tensor:
        out = _launch(x, self, False, None, rows_of(x).dtype)
        return fused_linear_reference(x, self.matrix, False, self.bias) if out is None else out.values

    def gated(self, x: Tensor | Normed) -> Tensor:
        if self.bias is not None:
            return LinearOperand.gated(self, x)
        out = _launch(x, self, True, None, rows_of(x).dtype)
        return fused_linear_reference(x, self.matrix, True) if out is None else out.values

    def add(self, x: Tensor, residual: Tensor, norm: Norm, take: bool = False) -> Normed:
        few = self.bias is None or len(x) <= _MOST_BIASED
        if few and (out := _launch(x, self, False, Addition(residual, norm), x.dtype)) is not None:
            return out
        if not take or self.bias is not None:
            return linear_add_reference(x, self.matrix, residual, norm, self.bias)
        total = residual.addmm_(x, self.matrix.t())  # the BLAS reads and writes it beside its products
        return Normed(total, rms_norm(total, norm.weight, norm.eps))

    def logits(self, x: Tensor | Normed) -> Tensor:
        out = _launch(x, self, False, None, torch.float32)
        return linear_logits_reference(x, self.matrix, self.bias) if out is None else out.values

    def argmax(self, x: Tensor | Normed, ids: Tensor | None) -> Tensor:
        if self.bias is not None:
            return LinearOperand.argmax(self, x, ids)
        rows = rows_of(x)
        few = cut_for(rows, self.matrix, False) or argmax_tiles_for(rows, self.matrix)
        cut = few or _wide_cut(rows, self.matrix, False)
        if cut is None:
            return linear_argmax_reference(x, self.matrix, ids)
        return argmax_of_programs(rows, self.matrix, ids, cut, by_row=isinstance(cut, Wide))


def fused_linear_reference(x: Tensor | Normed, weight: Tensor, gated: bool, bias: Tensor | None = None) -> Tensor:
    y = F.linear(normalised(x), weight, bias)
    return silu_mul(y) if gated else y


def linear_logits_reference(x: Tensor | Normed, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = normalised(x)
    if rows.is_cuda and rows.element_size() == 2:
        sums = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        return sums if bias is None else sums.add_(bias)
    y = F.linear(rows, weight, bias)
    return y.float() if y.element_size() == 2 else y


def linear_add_reference(x: Tensor, weight: Tensor, residual: Tensor, norm: Norm, bias: Tensor | None = None) -> Normed:
    rows, values = add_rms_norm(F.linear(x, weight, bias), residual, norm.weight, norm.eps)
    return Normed(values, rows)


def linear_argmax_reference(x: Tensor | Normed, weight: Tensor, ids: Tensor | None) -> Tensor:
    return largest_columns(linear_logits_reference(x, weight), ids)


def cut_for(x: Tensor, weight: Tensor, gated: bool) -> Stream | Tiles | None:
    """How the streamed or the warpgroup kernel divides a linear; None if neither applies.

    Of 9 to 16 rows both can; tiles are faster (8B's qkv 15.1 us for 19.8, its head 240 for 260).
    """
    tiles = tiles_for(x, weight, gated) if x.shape[0] > _MOST_STREAMED else None
    return tiles or stream_for(x, weight, gated) or tiles_for(x, weight, gated)


def _launch(
    x: Tensor | Normed, operand: DenseWeight, gated: bool, add: Addition | None, dtype: torch.dtype
) -> Normed | None:
    """Run the kernel that applies. Returns None, having run nothing, if none does."""
    rows, weight, bias = rows_of(x), operand.matrix, operand.bias
    row = row_linear_for(x, weight, add, bias)
    if cut := row or whole_rows_for(rows, weight, gated) or cut_for(rows, weight, gated):
        call = call_of(x, weight, gated, add, dtype, cut.block_n, bias)
        cut.run(call, cut.num_programs(weight, gated))
    elif gated and (wide := _wide_cut(rows, weight, gated)):
        call = call_of(normalised(x), weight, gated, add, dtype, wide.block_n)
        wide.run(call, wide.num_programs(weight, gated))
    else:
        return None
    assert call.out is not None
    return Normed(call.out, call.out if call.weighted is None else call.weighted, call.sums, add.norm.eps if add else 0)


def _wide_cut(rows: Tensor, weight: Tensor, gated: bool) -> Wide | None:
    """How the wide kernel divides a linear, if it applies. What other numbers of rows take is loaded by the first."""
    wide = wide_for(rows, weight, gated)
    if wide is None:
        return None
    for each in GATES if gated else (wide,):
        each.kernel(rows.dtype, rows.device, "GATED" if gated else "ARGMAX").load()
    return wide if wide.is_full(rows, weight, gated) else None
