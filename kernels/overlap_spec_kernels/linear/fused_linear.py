"""Linear maps of few rows with what surrounds them in a decoder layer: the scale of a norm, a gate, or an addition.

With few rows a map takes as long as reading its weight, and a launch takes as long as reading a small one. So nothing
else is launched, and the weight is asked for before the kernel that writes the rows has ended:

    fused_linear   y = scale * (x W^T)                 scale from the sums of squares of a `Normed` stream
                   y = silu(gate) * up                 if gated; W holds gate's rows first
    linear_logits  the same, in float32
    linear_add     v = residual + x W^T                and v times the next norm's weight, and its sums of squares

Four kernels: short rows of W wait in registers where those of x are few (here), others stream through shared memory
(`streamed_linear.py`), large weights for more rows in tiles (`warpgroup_linear.py`), and gates of many rows in tiles
that two multiprocessors share (`wide_linear.py`). Where none of them is faster, a BLAS and the row kernels do: the
twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.launch import (
    TritonKernel,
    ceil_div,
    dependent_launch,
    next_power_of_2,
    require,
    runs_triton,
)
from overlap_spec_kernels.linear.streamed_linear import Call, Stream, num_columns, stream_for
from overlap_spec_kernels.linear.warpgroup_linear import Tiles, tiles_for
from overlap_spec_kernels.linear.wide_linear import wide_for
from overlap_spec_kernels.norm.add_rms_norm import add_rms_norm
from overlap_spec_kernels.norm.normed import Norm, Normed, normalised, rows_of
from overlap_spec_kernels.norm.silu_mul import silu_mul

if TYPE_CHECKING:
    import triton.language as tl


def fused_linear(x: Tensor | Normed, weight: Tensor, gated: bool = False) -> Tensor:
    """`x @ weight.T` of the normalised rows; then silu(first half) * second half, if gated. Sums are float32.

    Shapes: x [T, I], weight [O, I] -> [T, O], or [T, O / 2] if gated. Raises: ValueError naming the argument.
    Sync: never.
    """
    rows = rows_of(x)
    require_linear(rows, weight)
    require(not gated or weight.shape[0] % 2 == 0, "weight", "an even number of rows if gated")
    out = _launch(x, weight, gated, None, rows.dtype)
    return fused_linear_reference(x, weight, gated) if out is None else out.values


def linear_logits(x: Tensor | Normed, weight: Tensor) -> Tensor:
    """`x @ weight.T` of the normalised rows, not rounded to 16 bits: logits are compared, and ties would be common.

    Shapes: x [T, I], weight [V, I] -> [T, V], float32 or wider. Raises: ValueError naming the argument. Sync: never.
    """
    require_linear(rows_of(x), weight)
    out = _launch(x, weight, False, None, torch.float32)
    return linear_logits_reference(x, weight) if out is None else out.values


def linear_add(x: Tensor, weight: Tensor, residual: Tensor, norm: Norm) -> Normed:
    """`residual + x @ weight.T`, on its way into the next norm. Sums are float32.

    Shapes: x [T, I], weight [O, I], residual [T, O]. Raises: ValueError naming the argument. Sync: never.
    """
    require_linear(x, weight)
    require(residual.shape == (x.shape[0], weight.shape[0]), "residual", "[T, O]")
    require(residual.stride(1) == 1 and residual.dtype == x.dtype, "residual", "contiguous rows in the dtype of x")
    require(norm.weight.shape == weight.shape[:1] and norm.weight.dtype == x.dtype, "norm", "[O] in the dtype of x")
    require(norm.weight.is_contiguous(), "norm", "contiguous")
    out = _launch(x, weight, False, _Addition(residual, norm), x.dtype)
    return linear_add_reference(x, weight, residual, norm) if out is None else out


def fused_linear_reference(x: Tensor | Normed, weight: Tensor, gated: bool) -> Tensor:
    y = F.linear(normalised(x), weight)
    return silu_mul(y) if gated else y


def linear_logits_reference(x: Tensor | Normed, weight: Tensor) -> Tensor:
    rows = normalised(x)
    if rows.is_cuda and rows.element_size() == 2:
        return torch.mm(rows, weight.t(), out_dtype=torch.float32)
    y = F.linear(rows, weight)
    return y.float() if y.element_size() == 2 else y


def linear_add_reference(x: Tensor, weight: Tensor, residual: Tensor, norm: Norm) -> Normed:
    rows, values = add_rms_norm(F.linear(x, weight), residual, norm.weight, norm.eps)
    return Normed(values, rows)


def require_linear(x: Tensor, weight: Tensor) -> None:
    """Raises: ValueError naming the argument."""
    require(x.dim() == 2 and x.stride(1) == 1, "x", "[T, I] with a contiguous last dimension")
    require(weight.dim() == 2 and weight.shape[1] == x.shape[1], "weight", "[O, I]")
    require(weight.is_contiguous() and weight.dtype == x.dtype, "weight", "contiguous, with the dtype of x")


class _Addition(NamedTuple):
    """What a map's result is added to, and the norm that follows."""

    residual: Tensor
    norm: Norm


class _Tiling(NamedTuple):
    """How a map whose rows wait in registers is cut into programs."""

    block_n: int
    block_k: int
    parts: int  # of K, one per warp


_BLOCK_M = 16
_FEW_ROWS = 2  # with more, streaming is as fast for 16-bit weights
_SHARED_BYTES = 200 << 10  # of a program: a little less than a recent GPU has


def _tiling(x: Tensor, size_n: int, gated: bool) -> _Tiling | None:
    """From shapes alone; None off a GPU, and where rows are too many, or those of W too long.

    16-bit gates are better streamed.
    """
    num_rows, size_k = x.shape
    whole_k = max(next_power_of_2(size_k), 128)
    if not runs_triton(x) or num_rows > _BLOCK_M or size_n > 8192:
        return None
    if x.element_size() == 2:
        return _Tiling(16, whole_k, 4) if whole_k <= 1024 and not gated and num_rows <= _FEW_ROWS else None
    shared = (_BLOCK_M + 8 * (2 if gated else 1)) * whole_k * x.element_size()
    return _Tiling(8, whole_k, 8) if shared <= _SHARED_BYTES else None


def cut_for(x: Tensor, weight: Tensor, gated: bool) -> Stream | Tiles | None:
    """How a map through shared memory is cut up; None where neither kernel applies."""
    return stream_for(x, weight, gated) or tiles_for(x, weight, gated)


def _launch(
    x: Tensor | Normed, weight: Tensor, gated: bool, add: _Addition | None, dtype: torch.dtype
) -> Normed | None:
    """Run one of the kernels, or none: None."""
    rows = rows_of(x)
    if tiling := _tiling(rows, num_columns(weight, gated), gated):
        call = _call(x, weight, gated, add, dtype, tiling.block_n)
        _run_whole_rows(call, tiling)
    elif cut := cut_for(rows, weight, gated):
        call = _call(x, weight, gated, add, dtype, cut.block_n)
        cut.run(call, cut.num_programs(weight, gated))
    elif gated and (wide := wide_for(rows, weight, gated)):
        call = _call(normalised(x), weight, gated, add, dtype, wide.block_n)
        wide.run(call, wide.num_programs(weight, gated))
    else:
        return None
    assert call.out is not None
    return Normed(call.out, call.out if call.weighted is None else call.weighted, call.sums, add.norm.eps if add else 0)


def _call(
    x: Tensor | Normed, weight: Tensor, gated: bool, add: _Addition | None, dtype: torch.dtype, block_n: int
) -> Call:
    rows, squares, eps = (x.weighted, x.squares, x.eps) if isinstance(x, Normed) else (x, None, 0.0)
    num_rows, size_n = rows.shape[0], num_columns(weight, gated)
    out = rows.new_empty((num_rows, size_n), dtype=dtype)
    if add is None:
        return Call(rows, weight, squares, eps, gated, out)
    sums = rows.new_empty((ceil_div(size_n, block_n), num_rows), dtype=torch.float32)
    return Call(rows, weight, squares, eps, gated, out, add.residual, add.norm, torch.empty_like(out), sums)


def _run_whole_rows(call: Call, tiling: _Tiling) -> None:
    num_rows, size_k = call.x.shape
    size_n = num_columns(call.weight, call.gated)
    _whole_rows_kernel[(ceil_div(size_n, tiling.block_n), ceil_div(num_rows, _BLOCK_M))](
        *call.tensors(),
        *call.sizes(),
        SIZE_K=size_k,
        SCALED=call.squares is not None,
        GATED=call.gated,
        ADD=call.residual is not None,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        PARTS=tiling.parts,
        BLOCK_U=next_power_of_2(call.num_squares),
        num_warps=tiling.parts,
        **dependent_launch(call.x.device),
    )


@TritonKernel
def _whole_rows_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, squares_ptr: tl.tensor, residual_ptr: tl.tensor, norm_ptr: tl.tensor,
    out_ptr: tl.tensor, weighted_ptr: tl.tensor, sums_ptr: tl.tensor,
    x_stride: int, residual_stride: int, size_n: tl.tensor, num_rows: int, num_squares: int, eps: float,
    SIZE_K: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, BLOCK_U: tl.constexpr,
) -> None:  # fmt: skip
    """One program per BLOCK_N columns and BLOCK_M rows of the output; its rows of W are there before x is.

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
    squares_ptr: tl.tensor,
    m: tl.tensor,
    live: tl.tensor,
    num_rows: int,
    num_squares: int,
    eps: float,
    SIZE_K: tl.constexpr,
    BLOCK_U: tl.constexpr,
) -> tl.tensor:
    """The scale of a norm, from the sums of squares of its parts. Shapes: m, live [n] -> [n]."""
    part = tl.arange(0, BLOCK_U)[:, None]
    mask = (part < num_squares) & live[None, :]
    squares = tl.load(squares_ptr + part * num_rows + m[None, :], mask=mask, other=0.0)
    return 1.0 / tl.sqrt(tl.sum(squares, axis=0) / SIZE_K + eps)
