"""The residual on its way into a norm.

An RMSNorm needs a sum over a whole row, which no program of a linear that writes the row has. So its work is divided:
the kernel that writes the residual also writes it times the norm's weight, and sums of its squares; the kernel that
reads it multiplies its own result, which is linear in the row, by the scale

    norm(v) = scale(v) * (v * weight)        scale(v) = 1 / sqrt(mean(v^2) + eps)

Where more than one kernel reads the row (a mixture's router and its experts), one launch applies the scale before them,
or the first of them leaves the scaled row for the others (`Unscaled`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, dependent_launch, next_power_of_2, runs_triton, warps_for


class Norm(NamedTuple):
    """An RMSNorm. Shapes: weight [H]."""

    weight: Tensor
    eps: float


class Normed(NamedTuple):
    """A residual and its norm, which is `weighted` where there are no `squares`."""

    values: Tensor  # [T, H], the residual
    weighted: Tensor  # [T, H], times the norm's weight
    squares: Tensor | None = None  # [parts, T] f32: sums of squares of parts of each row of `values`
    eps: float = 0.0

    def normalised(self) -> Tensor:
        """The norm itself, in the residual's dtype. Shapes: -> [T, H]. Sync: never."""
        if self.squares is None:
            return self.weighted
        return (_normalised_triton if runs_triton(self.weighted) else normalised_reference)(self, self.squares)


class Unscaled(NamedTuple):
    """Rows that the kernel which reads them first will scale, and write."""

    of: Normed  # has `squares`
    rows: Tensor  # [T, H]


def rows_of(x: Tensor | Normed) -> Tensor:
    """What a linear reads of `x`. Shapes: -> [T, H]."""
    return x.weighted if isinstance(x, Normed) else x


def normalised(x: Tensor | Normed) -> Tensor:
    """The rows with the norm's scale applied. Shapes: -> [T, H]."""
    return x.normalised() if isinstance(x, Normed) else x


def normalised_reference(x: Normed, squares: Tensor) -> Tensor:
    scale = torch.rsqrt(squares.sum(0) / x.values.shape[1] + x.eps)
    return (x.weighted * scale[:, None]).to(x.values.dtype)


def _normalised_triton(x: Normed, squares: Tensor) -> Tensor:
    (num_rows, size), num_parts = x.weighted.shape, len(squares)
    out = torch.empty((num_rows, size), dtype=x.values.dtype, device=x.values.device)
    block = next_power_of_2(size)
    _normalised_kernel[(num_rows,)](
        x.weighted,
        squares,
        out,
        x.weighted.stride(0),
        squares.stride(0),
        size,
        num_parts,
        x.eps,
        BLOCK=block,
        BLOCK_P=next_power_of_2(num_parts),
        num_warps=warps_for(block),
        **dependent_launch(x.values.device, num_rows),
    )
    return out


@TritonKernel.with_options(do_not_specialize=("squares_stride", "num_parts"))
def _normalised_kernel(
    weighted_ptr: tl.tensor, squares_ptr: tl.tensor, out_ptr: tl.tensor, x_stride: int, squares_stride: int, size: int,
    num_parts: int, eps: float, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    wait_for_inputs(PDL)
    x = tl.load(weighted_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of_row(squares_ptr + row, squares_stride, num_parts, size, eps, BLOCK_P)
    tl.store(out_ptr + row * size + column, x * scale, mask=inside)


@TritonKernel
def scale_of_row(
    squares_ptr: tl.tensor, stride: int, num_parts: int, size: int, eps: float, BLOCK: tl.constexpr
) -> tl.tensor:
    """From its sums of squares. Programs of as many warps add them in the same order. Shapes: -> []."""
    part = tl.arange(0, BLOCK)
    squares = tl.load(squares_ptr + part * stride, mask=part < num_parts, other=0.0)
    return 1.0 / tl.sqrt(tl.sum(squares, axis=0) / size + eps)
