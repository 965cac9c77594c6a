"""Leaves one column of a row: the token that has to be drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, require, runs_triton

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 1024


def force_columns(logits: Tensor, columns: Tensor) -> None:
    """Set a row's column to 0 and all others to -inf, in place; rows whose column is none of theirs stay. Sync: never.

    Shapes: logits [M, N], columns [M] i64. Raises: ValueError naming the argument.
    """
    require(logits.dim() == 2 and logits.is_contiguous(), "logits", "[M, N], contiguous")
    require(columns.shape == logits.shape[:1] and columns.dtype == torch.int64, "columns", "[M] int64")
    run = _force_columns_triton if runs_triton(logits) else force_columns_reference
    run(logits, columns)


def force_columns_reference(logits: Tensor, columns: Tensor) -> None:
    num_columns = logits.shape[1]
    forced = (columns >= 0) & (columns < num_columns)
    is_column = torch.arange(num_columns, device=logits.device) == columns[:, None]
    logits.masked_fill_(is_column, 0.0).masked_fill_(forced[:, None] & ~is_column, -torch.inf)


def _force_columns_triton(logits: Tensor, columns: Tensor) -> None:
    num_rows, num_columns = logits.shape
    if num_rows == 0:
        return
    _force_columns_kernel[(num_rows, ceil_div(num_columns, _BLOCK))](
        logits, columns.contiguous(), num_columns, BLOCK=_BLOCK, num_warps=4, **dependent_launch(logits.device)
    )


@TritonKernel
def _force_columns_kernel(
    logits_ptr: tl.tensor, columns_ptr: tl.tensor, num_columns: int, BLOCK: tl.constexpr, PDL: tl.constexpr
) -> None:
    """One program per row and block of columns; one that forces nothing reads a single number."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = tl.load(columns_ptr + row)
    if (column >= 0) & (column < num_columns):
        here = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.where(here == column, 0.0, float("-inf"))
        tl.store(logits_ptr + row * num_columns + here, value, mask=here < num_columns)
