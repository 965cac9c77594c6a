"""RMSNorm over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import (
    TritonKernel,
    dependent_launch,
    next_power_of_2,
    require,
    runs_triton,
    warps_for,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root mean square, then by `weight` (Zhang and Sennrich 2019, arXiv:1910.07467).

    Accumulates in float32 where x is 16-bit, in x's own type otherwise, and rounds once.
    Shapes: x [T, H], weight [H] -> [T, H]. Raises: ValueError naming the argument. Sync: never.
    """
    require(x.dim() == 2 and x.stride(1) == 1, "x", "[T, H] with a contiguous last dimension")
    require(weight.shape == x.shape[1:] and weight.is_contiguous(), "weight", "[H], contiguous")
    require(fits_norm(weight, x.dtype), "weight", OF_NORMS)
    return _rms_norm_triton(x, weight, eps) if runs_triton(x) else rms_norm_reference(x, weight, eps)


OF_NORMS = "the dtype of x, or float32 beside 16 bits"


def fits_norm(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels take the weight of a norm of rows in `dtype`."""
    return weight.dtype == dtype or (weight.dtype == torch.float32 and dtype.itemsize == 2)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def _rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    num_rows, size = x.shape
    y = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    block = next_power_of_2(size)
    options = {"num_warps": warps_for(block), **dependent_launch(x.device, num_rows)}
    _rms_norm_kernel[(num_rows,)](x, weight, y, x.stride(0), size, eps, BLOCK=block, **options)
    return y


@TritonKernel
def _rms_norm_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, y_ptr: tl.tensor, x_stride: int, size: int, eps: float,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row; the row is read once and stays in registers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    tl.store(y_ptr + row * size + column, x * scale * weight, mask=inside)
