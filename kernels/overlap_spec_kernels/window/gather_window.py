"""Gathers the slot rows that a decode step reads, in one launch.

slot rows (S)                       the step (B)
length       [S]     --slots-->     positions = length + column, of every row of the window
window       [S, N]  --slots-->     the first W columns, raw and as tokens to run
page_table   [S, P]  --slots-->     the part of a row that the step can follow
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton

_PAGES_PER_PROGRAM = 1024


class GatheredWindow(NamedTuple):
    """The slot rows of a step."""

    tokens: Tensor  # [B * W] i64, the forward's input: token 0 where there is no guess
    window_tokens: Tensor  # [B, W] i64, root first, -1 where there is no guess
    positions: Tensor  # [B * W] i64
    lengths: Tensor  # [B] i64
    page_table: Tensor  # [B, P] i32; on a GPU only pages of positions below length + 2 N are written
    num_proposed: Tensor  # [B] i64, guesses in the window


def gather_window(
    slots: Tensor, length: Tensor, window: Tensor, page_table: Tensor, width: int, page_size: int
) -> GatheredWindow:
    """Gather the windows of `slots`, their positions and their pages.

    A step verifies rows up to length + W - 1 and then drafts up to W - 1 positions further, so 2 N positions after
    the length are enough. **Later entries of the gathered page table are unwritten memory**: a reader of a page
    must mask by position. A slot may occur more than once.
    Shapes: slots [B] i64, length [S] i64, window [S, N] i64, page_table [S, P] i32, 1 <= width W <= N.
    Raises: ValueError naming the argument. Sync: never.
    """
    require(slots.dim() == 1 and slots.dtype == torch.int64 and slots.is_contiguous(), "slots", "[B] int64")
    require(length.dim() == 1 and length.dtype == torch.int64 and length.is_contiguous(), "length", "[S] int64")
    require(window.dim() == 2 and window.shape[0] == length.shape[0], "window", "[S, N]")
    require(window.dtype == torch.int64 and window.stride(1) == 1, "window", "int64, a contiguous last dimension")
    require(page_table.dim() == 2 and page_table.shape[0] == length.shape[0], "page_table", "[S, P]")
    require(page_table.dtype == torch.int32 and page_table.stride(1) == 1, "page_table", "int32, contiguous rows")
    require(1 <= width <= window.shape[1], "width", "1 to the columns of window")
    require(page_size >= 1, "page_size", "at least 1")
    run = _gather_window_triton if runs_triton(slots) else gather_window_reference
    return run(slots, length, window, page_table, width, page_size)


def gather_window_reference(
    slots: Tensor, length: Tensor, window: Tensor, page_table: Tensor, width: int, page_size: int
) -> GatheredWindow:
    lengths, window_tokens = length[slots], window[slots, :width]
    positions = lengths[:, None] + torch.arange(width, device=slots.device)
    num_proposed = (window_tokens[:, 1:] >= 0).sum(1)
    tokens = window_tokens.clamp(min=0).reshape(-1)
    return GatheredWindow(tokens, window_tokens, positions.reshape(-1), lengths, page_table[slots], num_proposed)


def _gather_window_triton(
    slots: Tensor, length: Tensor, window: Tensor, page_table: Tensor, width: int, page_size: int
) -> GatheredWindow:
    num_slots, num_columns = slots.shape[0], page_table.shape[1]
    out = GatheredWindow(
        tokens=slots.new_empty(num_slots * width),
        window_tokens=slots.new_empty(num_slots, width),
        positions=slots.new_empty(num_slots * width),
        lengths=slots.new_empty(num_slots),
        page_table=page_table.new_empty(num_slots, num_columns),
        num_proposed=slots.new_empty(num_slots),
    )
    block_p = min(next_power_of_2(num_columns), _PAGES_PER_PROGRAM)
    _gather_window_kernel[(num_slots, ceil_div(num_columns, block_p))](
        slots,
        length,
        window,
        page_table,
        *out,
        window.stride(0),
        page_table.stride(0),
        num_columns,
        width,
        2 * window.shape[1],
        PAGE_SIZE=page_size,
        BLOCK_W=next_power_of_2(width),
        BLOCK_P=block_p,
        num_warps=4,
        **dependent_launch(slots.device),
    )
    return out


@TritonKernel
def _gather_window_kernel(
    slots_ptr: tl.tensor, length_ptr: tl.tensor, window_ptr: tl.tensor, page_table_ptr: tl.tensor,
    tokens_ptr: tl.tensor, window_tokens_ptr: tl.tensor, positions_ptr: tl.tensor, lengths_ptr: tl.tensor,
    pages_ptr: tl.tensor, num_proposed_ptr: tl.tensor,
    window_stride: int, table_stride: int, num_columns: int, width: int, lookahead: int,
    PAGE_SIZE: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, part of its page table); the first part of a row also gathers its window."""
    row = tl.program_id(0).to(tl.int64)
    first_page = tl.program_id(1) * BLOCK_P
    column = tl.arange(0, BLOCK_W)
    inside = column < width
    wait_for_inputs(PDL)
    slot = tl.load(slots_ptr + row)
    length = tl.load(length_ptr + slot)
    if first_page == 0:
        tokens = tl.load(window_ptr + slot * window_stride + column, mask=inside, other=-1)
        tl.store(tokens_ptr + row * width + column, tl.maximum(tokens, 0), mask=inside)
        tl.store(window_tokens_ptr + row * width + column, tokens, mask=inside)
        tl.store(positions_ptr + row * width + column, length + column, mask=inside)
        tl.store(lengths_ptr + row, length)
        proposed = (tokens >= 0) & (column > 0)
        tl.store(num_proposed_ptr + row, tl.sum(proposed.to(tl.int64), axis=0))
    num_pages = tl.minimum(tl.cdiv(length + lookahead, PAGE_SIZE), num_columns)
    page_column = first_page + tl.arange(0, BLOCK_P)
    needed = page_column < num_pages
    page = tl.load(page_table_ptr + slot * table_stride + page_column, mask=needed, other=0)
    tl.store(pages_ptr + row * num_columns + page_column, page, mask=needed)
