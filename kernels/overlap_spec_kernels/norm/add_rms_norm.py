"""Residual addition and RMSNorm in one pass; or a norm of what is added, too."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import (
    TritonKernel,
    dependent_launch,
    lets_next_begin,
    next_power_of_2,
    require,
    runs_triton,
    warps_for,
)
from overlap_spec_kernels.norm.normed import Norm
from overlap_spec_kernels.norm.rms_norm import OF_NORMS, fits_norm, rms_norm_reference


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dependent: bool = False
) -> tuple[Tensor, Tensor]:
    """Add a layer's output to the residual and normalise the sum: (y, new_residual).

    The sum is rounded to its dtype before it is normalised, so y is exactly `rms_norm(new_residual)`. `dependent`: it
    may begin while the kernel before it still runs, if rows are few.
    Shapes: x, residual [T, H], weight [H] -> [T, H], [T, H]. Raises: ValueError naming the argument. Sync: never.
    """
    require(x.dim() == 2 and x.stride(1) == 1, "x", "[T, H] with a contiguous last dimension")
    require(residual.shape == x.shape and residual.stride(1) == 1, "residual", "[T, H] as x, contiguous last dimension")
    require(residual.dtype == x.dtype, "residual", "the dtype of x")
    require(weight.shape == x.shape[1:] and weight.is_contiguous(), "weight", "[H], contiguous")
    require(fits_norm(weight, x.dtype), "weight", OF_NORMS)
    if runs_triton(x):
        return _add_rms_norm_triton(x, residual, weight, eps, dependent)
    return add_rms_norm_reference(x, residual, weight, eps)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    new_residual = x + residual
    return rms_norm_reference(new_residual, weight, eps), new_residual


def _add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dependent: bool = False
) -> tuple[Tensor, Tensor]:
    num_rows, size = x.shape
    y = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    new_residual = torch.empty_like(y)
    block = next_power_of_2(size)
    _add_rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        y,
        new_residual,
        x.stride(0),
        residual.stride(0),
        size,
        eps,
        NEXT_BEGINS=lets_next_begin(x.device),
        BLOCK=block,
        num_warps=warps_for(block),
        **(dependent_launch(x.device, num_rows) if dependent else {"PDL": False}),
    )
    return y, new_residual


@TritonKernel
def _add_rms_norm_kernel(
    x_ptr: tl.tensor, residual_ptr: tl.tensor, weight_ptr: tl.tensor, y_ptr: tl.tensor, new_residual_ptr: tl.tensor,
    x_stride: int, residual_stride: int, size: int, eps: float, NEXT_BEGINS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row; the row is read once and stays in registers."""
    if NEXT_BEGINS:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(new_residual_ptr + row * size + column, total, mask=inside)
    total = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, axis=0) / size + eps)
    tl.store(y_ptr + row * size + column, total * scale * weight, mask=inside)


def add_normed(
    x: Tensor, residual: Tensor, inner: Norm, outer: Norm, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of a layer's output added to the residual, and the norm of that: (y, new_residual).

    `factor`: the sum is multiplied by it. Each of these results is rounded to the dtype of x.
    Shapes: x, residual [T, H], norms [H], factor [1] -> [T, H], [T, H]. Raises: ValueError naming the argument.
    Sync: never.
    """
    require(x.dim() == 2 and x.stride(1) == 1, "x", "[T, H] with a contiguous last dimension")
    require(residual.shape == x.shape and residual.stride(1) == 1, "residual", "[T, H] as x, contiguous last dimension")
    require(residual.dtype == x.dtype, "residual", "the dtype of x")
    for name, norm in (("inner", inner), ("outer", outer)):
        require(norm.weight.shape == x.shape[1:] and norm.weight.is_contiguous(), name, "[H], contiguous")
        require(fits_norm(norm.weight, x.dtype), name, OF_NORMS)
    require(factor is None or (factor.shape == (1,) and factor.dtype == x.dtype), "factor", "[1], the dtype of x")
    run = _add_normed_triton if runs_triton(x) else add_normed_reference
    return run(x, residual, inner, outer, factor)


def add_normed_reference(
    x: Tensor, residual: Tensor, inner: Norm, outer: Norm, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    total = residual + rms_norm_reference(x, inner.weight, inner.eps)
    total = total if factor is None else total * factor
    return rms_norm_reference(total, outer.weight, outer.eps), total


def _add_normed_triton(
    x: Tensor, residual: Tensor, inner: Norm, outer: Norm, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    num_rows, size = x.shape
    y = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    total, block = torch.empty_like(y), next_power_of_2(size)
    _add_normed_kernel[(num_rows,)](
        x,
        residual,
        inner.weight,
        outer.weight,
        x if factor is None else factor,
        y,
        total,
        x.stride(0),
        residual.stride(0),
        size,
        inner.eps,
        outer.eps,
        SCALED=factor is not None,
        BLOCK=block,
        num_warps=warps_for(block),
        **dependent_launch(x.device, num_rows),
    )
    return y, total


@TritonKernel
def _add_normed_kernel(
    x_ptr: tl.tensor, residual_ptr: tl.tensor, inner_ptr: tl.tensor, outer_ptr: tl.tensor, factor_ptr: tl.tensor,
    y_ptr: tl.tensor, total_ptr: tl.tensor, x_stride: int, residual_stride: int, size: int, inner_eps: float,
    outer_eps: float, SCALED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row; the row is read once and stays in registers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    inner = tl.load(inner_ptr + column, mask=inside, other=0.0).to(tl.float32)
    outer = tl.load(outer_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    normed = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / size + inner_eps)) * inner
    total = (residual.to(tl.float32) + normed.to(x.dtype).to(tl.float32)).to(x.dtype)
    if SCALED:
        total = (total.to(tl.float32) * tl.load(factor_ptr).to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + row * size + column, total, mask=inside)
    wide = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / size + outer_eps)
    tl.store(y_ptr + row * size + column, wide * scale * outer, mask=inside)
