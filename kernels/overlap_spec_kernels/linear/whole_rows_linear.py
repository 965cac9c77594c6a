"""The kernel of `fused_linear`, `linear_logits` and `linear_add` for short rows of W and few rows of x.

A program loads whole rows of W into registers before x is ready.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, runs_triton
from overlap_spec_kernels.linear.call import Call, num_columns

_BLOCK_M = 16
_FEW_ROWS = 2  # rows of x: with more, streaming is as fast for 16-bit weights
_MOST_COLUMNS, _MOST_IN_16_BITS = 8192, 4096
_SHARED_BYTES = 200 << 10  # shared memory of a program: a little less than a recent GPU has


class WholeRows(NamedTuple):
    """How a linear is divided among programs and warps, chosen from shapes alone."""

    block_n: int  # rows of W (twice as many if gated)
    block_k: int
    parts: int  # parts of K, one per warp

    def num_programs(self, weight: Tensor, gated: bool) -> int:
        """Number of programs for each 16 rows of x."""
        return ceil_div(num_columns(weight, gated), self.block_n)

    def run(self, call: Call, programs: int) -> None:
        """Launch. Sync: never."""
        num_rows, size_k = call.x.shape
        _whole_rows_kernel[(programs, ceil_div(num_rows, _BLOCK_M))](
            *call.tensors(),
            call.given(call.bias),
            *call.sizes(),
            SIZE_K=size_k,
            SCALED=call.squares is not None,
            GATED=call.gated,
            ADD=call.residual is not None,
            BIASED=call.bias is not None,
            BLOCK_M=_BLOCK_M,
            BLOCK_N=self.block_n,
            BLOCK_K=self.block_k,
            PARTS=self.parts,
            BLOCK_U=next_power_of_2(call.num_squares),
            num_warps=self.parts,
            **dependent_launch(call.x.device),
        )


def whole_rows_for(x: Tensor, weight: Tensor, gated: bool) -> WholeRows | None:
    """The division for these shapes; None off a GPU, for many rows of x or long rows of W, and for 16-bit gates.

    The streamed kernel is faster for 16-bit gates.
    """
    num_rows, size_k = x.shape
    whole_k = max(next_power_of_2(size_k), 128)
    if not runs_triton(x) or num_rows > _BLOCK_M or num_columns(weight, gated) > _MOST_COLUMNS:
        return None
    if x.element_size() == 2:
        fits = whole_k <= 1024 and num_columns(weight, gated) <= _MOST_IN_16_BITS
        return WholeRows(16, whole_k, 4) if fits and not gated and num_rows <= _FEW_ROWS else None
    shared = (_BLOCK_M + 8 * (2 if gated else 1)) * whole_k * x.element_size()
    return WholeRows(8, whole_k, 8) if shared <= _SHARED_BYTES else None


@TritonKernel.with_options(do_not_specialize=("num_rows", "num_squares"))
def _whole_rows_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, squares_ptr: tl.tensor, residual_ptr: tl.tensor, norm_ptr: tl.tensor,
    out_ptr: tl.tensor, weighted_ptr: tl.tensor, sums_ptr: tl.tensor, bias_ptr: tl.tensor,
    x_stride: int, residual_stride: int, size_n: tl.tensor, num_rows: int, num_squares: int, eps: float,
    SIZE_K: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIASED: tl.constexpr,
    PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_U: tl.constexpr,
) -> None:  # fmt: skip
    """One program per BLOCK_N columns and BLOCK_M rows of the output. It loads its rows of W before x is ready.

    A block of W is [PARTS, K / PARTS, N]: a batched product gives each warp one part of K, and their sums are added.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PART: tl.constexpr = BLOCK_K // PARTS
    k = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    inside = k < SIZE_K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    live_n = n < size_n
    weight_block = weight_ptr + n.to(tl.int64)[None, None, :] * SIZE_K + k[:, :, None]
    mask = inside[:, :, None] & live_n[None, None, :]
    w = tl.load(weight_block, mask=mask, other=0.0)
    if GATED:
        w_up = tl.load(weight_block + size_n.to(tl.int64) * SIZE_K, mask=mask, other=0.0)
    if BIASED:
        bias = tl.load(bias_ptr + n, mask=live_n, other=0.0).to(tl.float32)
    if ADD:
        norm = tl.load(norm_ptr + n, mask=live_n, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live_m = m < num_rows
    x_block = x_ptr + m[None, :, None] * x_stride + k[:, None, :]
    x = tl.load(x_block, mask=live_m[None, :, None] & inside[:, None, :], other=0.0)
    mask = live_m[:, None] & live_n[None, :]
    if ADD:
        residual = tl.load(residual_ptr + m[:, None] * residual_stride + n[None, :], mask=mask, other=0.0)
    y = tl.sum(tl.dot(x, w, input_precision="ieee"), axis=0)
    if GATED:
        up = tl.sum(tl.dot(x, w_up, input_precision="ieee"), axis=0)
    if SCALED:
        scale = _scale_of_rows(squares_ptr, m, live_m, num_rows, num_squares, eps, SIZE_K, BLOCK_U)
        y = y * scale[:, None]
        if GATED:
            up = up * scale[:, None]
    if BIASED:
        y += bias[None, :]
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * up
    if ADD:
        y = (y + residual.to(tl.float32)).to(residual.dtype)
        wide = y.to(tl.float32)
        tl.store(weighted_ptr + m[:, None] * size_n + n[None, :], wide * norm[None, :], mask=mask)
        tl.store(sums_ptr + tl.program_id(0) * num_rows + m, tl.sum(wide * wide, axis=1), mask=live_m)
    tl.store(out_ptr + m[:, None] * size_n + n[None, :], y, mask=mask)


@TritonKernel
def _scale_of_rows(
    squares_ptr: tl.tensor, m: tl.tensor, live: tl.tensor, num_rows: int, num_squares: int, eps: float,
    SIZE_K: tl.constexpr, BLOCK_U: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The scale of a norm, from the sums of squares of its parts. Shapes: m, live [n] -> [n]."""
    part = tl.arange(0, BLOCK_U)[:, None]
    mask = (part < num_squares) & live[None, :]
    squares = tl.load(squares_ptr + part * num_rows + m[None, :], mask=mask, other=0.0)
    return 1.0 / tl.sqrt(tl.sum(squares, axis=0) / SIZE_K + eps)
