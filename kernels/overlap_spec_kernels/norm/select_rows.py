"""Selects one row of each window, in one launch.

Indexing in torch would first compute a second index tensor, for the batch dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton

_COLUMNS_PER_PROGRAM = 1024


def select_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Return rows[b, index[b]].

    Shapes: rows [B, W, H], maybe columns of wider rows, index [B] i64 in 0..W - 1 -> [B, H].
    Raises: ValueError naming the argument. Sync: never.
    """
    require(rows.dim() == 3 and rows.stride(2) == 1, "rows", "[B, W, H], each contiguous")
    require(index.shape == rows.shape[:1] and index.is_contiguous(), "index", "[B], contiguous")
    require(index.dtype == torch.int64, "index", "int64")
    return _select_rows_triton(rows, index) if runs_triton(rows) else select_rows_reference(rows, index)


def select_rows_reference(rows: Tensor, index: Tensor) -> Tensor:
    return rows.gather(1, index[:, None, None].expand(-1, 1, rows.shape[2])).squeeze(1)


def _select_rows_triton(rows: Tensor, index: Tensor) -> Tensor:
    num_slots, _, size = rows.shape
    out = torch.empty((num_slots, size), dtype=rows.dtype, device=rows.device)
    block = min(next_power_of_2(size), _COLUMNS_PER_PROGRAM)
    _select_rows_kernel[(num_slots, ceil_div(size, block))](
        rows, index, out, rows.stride(0), rows.stride(1), size, BLOCK=block, num_warps=4,
        **dependent_launch(rows.device),
    )  # fmt: skip
    return out


@TritonKernel
def _select_rows_kernel(
    rows_ptr: tl.tensor, index_ptr: tl.tensor, out_ptr: tl.tensor, window_stride: int, row_stride: int, size: int,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row of the batch, part of its columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait_for_inputs(PDL)
    place = row * window_stride + tl.load(index_ptr + row) * row_stride
    selected = tl.load(rows_ptr + place + column, mask=inside)
    tl.store(out_ptr + row * size + column, selected, mask=inside)
