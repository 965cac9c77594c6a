"""Keeps a row of each request in its slot's ring, in one launch: what a draft absorbs later."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton

_COLUMNS_PER_PROGRAM = 2048


def keep_row(
    kept_rows: Tensor, kept_tokens: Tensor, slots: Tensor, positions: Tensor, rows: Tensor, tokens: Tensor
) -> None:
    """Write row and token of each request at its position modulo N, in place.

    Several requests may have the slot of padding, of which one is kept.
    Shapes: kept_rows [S, N, H], kept_tokens [S, N] i64, slots, positions, tokens [B] i64, rows [B, H].
    Raises: ValueError naming the argument. Sync: never.
    """
    require(kept_rows.dim() == 3 and kept_rows.is_contiguous(), "kept_rows", "[S, N, H], contiguous")
    require(kept_tokens.shape == kept_rows.shape[:2] and kept_tokens.is_contiguous(), "kept_tokens", "[S, N]")
    require(slots.dim() == 1, "slots", "[B]")
    for name, value in {"slots": slots, "positions": positions, "tokens": tokens}.items():
        require(value.shape == slots.shape and value.is_contiguous(), name, "[B], contiguous")
        require(value.dtype == torch.int64, name, "int64")
    require(rows.shape == (len(slots), kept_rows.shape[2]) and rows.stride(1) == 1, "rows", "[B, H]")
    require(rows.dtype == kept_rows.dtype, "rows", "the dtype of kept_rows")
    run = _keep_row_triton if runs_triton(kept_rows) else keep_row_reference
    run(kept_rows, kept_tokens, slots, positions, rows, tokens)


def keep_row_reference(
    kept_rows: Tensor, kept_tokens: Tensor, slots: Tensor, positions: Tensor, rows: Tensor, tokens: Tensor
) -> None:
    places = positions % kept_tokens.shape[1]
    kept_rows[slots, places] = rows
    kept_tokens[slots, places] = tokens


def _keep_row_triton(
    kept_rows: Tensor, kept_tokens: Tensor, slots: Tensor, positions: Tensor, rows: Tensor, tokens: Tensor
) -> None:
    num_requests, size = rows.shape
    block = min(next_power_of_2(size), _COLUMNS_PER_PROGRAM)
    _keep_row_kernel[(num_requests, ceil_div(size, block))](
        kept_rows,
        kept_tokens,
        slots,
        positions,
        rows,
        tokens,
        rows.stride(0),
        kept_tokens.shape[1],
        size,
        BLOCK=block,
        num_warps=4,
        **dependent_launch(rows.device),
    )


@TritonKernel
def _keep_row_kernel(
    kept_rows_ptr: tl.tensor, kept_tokens_ptr: tl.tensor, slots_ptr: tl.tensor, positions_ptr: tl.tensor,
    rows_ptr: tl.tensor, tokens_ptr: tl.tensor, row_stride: int, num_kept: int, size: int, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (request, part of its columns)."""
    request = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait_for_inputs(PDL)
    place = tl.load(slots_ptr + request) * num_kept + tl.load(positions_ptr + request) % num_kept
    row = tl.load(rows_ptr + request * row_stride + column, mask=inside)
    tl.store(kept_rows_ptr + place * size + column, row, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(kept_tokens_ptr + place, tl.load(tokens_ptr + request))
