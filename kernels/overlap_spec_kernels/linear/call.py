"""The arguments and results of one linear, in the form that every kernel for dense weights takes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import ceil_div
from overlap_spec_kernels.norm.normed import Norm, Normed


class Addition(NamedTuple):
    """The residual that a linear's result is added to, and the norm of the sum."""

    residual: Tensor
    norm: Norm


class Call(NamedTuple):
    """One call's arguments and results. For a tensor that is None, kernels get x as a placeholder they never read."""

    x: Tensor  # [T, I]
    weight: Tensor  # [O, I]
    squares: Tensor | None  # [parts, T] f32: sums of squares, from which x is scaled
    eps: float
    gated: bool
    out: Tensor | None = None  # [T, O], any float type
    residual: Tensor | None = None  # [T, O]
    norm: Norm | None = None  # applied to the sum with the residual
    weighted: Tensor | None = None  # [T, O]
    sums: Tensor | None = None  # [ceil(O / block_n), T] f32
    best: Tensor | None = None  # [programs, T] f32: each program's largest result, instead of all results
    best_at: Tensor | None = None  # [programs, T] i32
    bias: Tensor | None = None  # [O], added to the product, of one that is not gated

    @property
    def num_squares(self) -> int:
        """Number of partial sums of squares per row, from which its scale is computed."""
        return 0 if self.squares is None else self.squares.shape[0]

    def given(self, tensor: Tensor | None) -> Tensor:
        """The tensor, or the placeholder if it is None."""
        return self.x if tensor is None else tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """The first arguments of the Triton and Gluon kernels: x, W, squares, residual, norm, out, weighted, sums."""
        norm = None if self.norm is None else self.norm.weight
        optional = (self.squares, self.residual, norm, self.out, self.weighted, self.sums)
        return (self.x, self.weight, *(self.given(tensor) for tensor in optional))

    def sizes(self) -> tuple[float, ...]:
        """The next arguments: row strides of x and residual, columns of the result, rows, `num_squares`, eps."""
        residual_stride = 0 if self.residual is None else self.residual.stride(0)
        columns = num_columns(self.weight, self.gated)
        return self.x.stride(0), residual_stride, columns, self.x.shape[0], self.num_squares, self.eps


def num_columns(weight: Tensor, gated: bool) -> int:
    """Number of columns of the result."""
    return weight.shape[0] // 2 if gated else weight.shape[0]


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def call_of(
    x: Tensor | Normed,
    weight: Tensor,
    gated: bool,
    add: Addition | None,
    dtype: torch.dtype,
    block_n: int,
    bias: Tensor | None = None,
) -> Call:
    """Allocate the results of a kernel whose programs each compute `block_n` columns."""
    rows, squares, eps = (x.weighted, x.squares, x.eps) if isinstance(x, Normed) else (x, None, 0.0)
    num_rows, size_n = rows.shape[0], num_columns(weight, gated)
    out = rows.new_empty((num_rows, size_n), dtype=dtype)
    if add is None:
        return Call(rows, weight, squares, eps, gated, out, bias=bias)
    sums = rows.new_empty((ceil_div(size_n, block_n), num_rows), dtype=torch.float32)
    weighted = torch.empty_like(out)
    return Call(rows, weight, squares, eps, gated, out, add.residual, add.norm, weighted, sums, bias=bias)
