"""The smallest format: a weight of 8-bit integers with a scale for each row, and one kernel, not tuned for speed.

    W = scales * values        y = (x values^T) * scales

Integers of 8 bits are exact in every type that x may have, so only the sums are multiplied by a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from overlap_spec_kernels.launch import (
    TritonKernel,
    ceil_div,
    dependent_launch,
    next_power_of_2,
    require,
    runs_triton,
)
from overlap_spec_kernels.linear.operand import LinearOperand
from overlap_spec_kernels.norm.normed import Normed, normalised
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl

_MOST_BLOCK_ROWS = 64
_BLOCK_N = 32
_BLOCK_K = 64


@dataclass(frozen=True, slots=True)
class Int8Weight(LinearOperand):
    """W [O, I], symmetric: `values` are in -127..127."""

    values: Tensor  # [O, I] i8
    scales: Tensor  # [O] f32 (f64 for a float64 model)
    dtype: torch.dtype  # the type of x

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.values.nbytes + self.scales.nbytes

    def rows(self, ids: Tensor | slice) -> Int8Weight:
        """Some rows of W: a view for a slice, a copy for [N] i64."""
        return Int8Weight(self.values[ids], self.scales[ids], self.dtype)

    def check(self, x: Tensor) -> None:
        values, scales = self.values, self.scales
        require(values.dim() == 2 and values.shape[1] == x.shape[1], "weight", "[O, I]")
        require(values.is_contiguous() and values.dtype == torch.int8, "weight", "contiguous int8")
        require(scales.shape == values.shape[:1] and scales.is_contiguous(), "weight", "contiguous scales [O]")
        require(x.dtype == self.dtype, "weight", "made for the dtype of x")

    def product(self, x: Tensor | Normed) -> Tensor:
        return self._multiply(normalised(x), self.dtype)

    def logits(self, x: Tensor | Normed) -> Tensor:
        return self._multiply(normalised(x), torch.float32 if self.dtype.itemsize == 2 else self.dtype)

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if not runs_triton(x):
            return int8_linear_reference(x, self.values, self.scales, dtype)
        (num_rows, size_k), size_n = x.shape, self.values.shape[0]
        block_m = min(max(next_power_of_2(num_rows), 16), _MOST_BLOCK_ROWS)
        out = x.new_empty((num_rows, size_n), dtype=dtype)
        _int8_linear_kernel[(ceil_div(size_n, _BLOCK_N), ceil_div(num_rows, block_m))](
            x,
            self.values,
            self.scales,
            out,
            x.stride(0),
            size_n,
            num_rows,
            SIZE_K=size_k,
            BLOCK_M=block_m,
            BLOCK_N=_BLOCK_N,
            BLOCK_K=_BLOCK_K,
            num_warps=4,
            **dependent_launch(x.device, num_rows),
        )
        return out


def int8_linear_reference(x: Tensor, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    wide = x if x.element_size() > 2 else x.float()
    return (F.linear(wide, values.to(wide.dtype)) * scales).to(dtype)


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def _int8_linear_kernel(
    x_ptr: tl.tensor,
    values_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: int,
    size_n: int,
    num_rows: int,
    SIZE_K: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program for BLOCK_M rows of x and BLOCK_N rows of W, which are converted to x's type in registers."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    live_n, live_m = n < size_n, m < num_rows
    scales = tl.load(scales_ptr + n, mask=live_n, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_rows = x_ptr + m[:, None].to(tl.int64) * x_stride
    w_rows = values_ptr + n[None, :].to(tl.int64) * SIZE_K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, SIZE_K, BLOCK_K):
        at = first + k
        x = tl.load(x_rows + at[None, :], mask=live_m[:, None] & (at < SIZE_K)[None, :], other=0.0)
        w = tl.load(w_rows + at[:, None], mask=(at < SIZE_K)[:, None] & live_n[None, :], other=0)
        acc += tl.dot(x, w.to(x.dtype), input_precision="ieee")
    y = acc * scales[None, :]
    out = out_ptr + m[:, None].to(tl.int64) * size_n + n[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=live_m[:, None] & live_n[None, :])
