"""Gathers the slot rows that a decode step on trees reads, in one launch.

slot rows (S)                       the step (B)
length       [S]     --slots-->     positions = length + depth, of every column of the window
window       [S, N]  --slots-->     the first W columns, raw and as tokens to run
parents      [S, N]  --slots-->     the same of them, and what each attends to: a bit mask of ancestors
page_table   [S, P]  --slots-->     as much of a row as the step can follow; cache rows of places length + column
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton
from overlap_spec_kernels.limits import MASK_BITS, MAX_TREE_WIDTH

_PAGES_PER_PROGRAM = 1024


class GatheredTree(NamedTuple):
    """The slot rows of a step."""

    tokens: Tensor  # [B * W] i64, the forward's input: token 0 where there is no guess
    window_tokens: Tensor  # [B, W] i64, root first, -1 where there is no guess
    parents: Tensor  # [B, W] i64, columns
    positions: Tensor  # [B * W] i64
    lengths: Tensor  # [B] i64
    page_table: Tensor  # [B, P] i32; on a GPU only pages of places below length + 2 N are written
    num_proposed: Tensor  # [B] i64, guesses in the window
    extra_rows: Tensor  # [B, W] i64, the cache row of each column
    mask: Tensor  # [B, W, 1] i64, bit i of a column: column i is that column or its ancestor


def gather_tree(
    slots: Tensor, length: Tensor, window: Tensor, parents: Tensor, page_table: Tensor, width: int, page_size: int
) -> GatheredTree:
    """Gather the windows of `slots`, the shape of their trees and their pages.

    A parent's column is less than its child's; the root's own entry is not read. The KV of column j is at place
    length + j, but the column's position is `depth` after the root's. **Entries of the gathered page table for places
    from length + 2 N on are unwritten memory.** A slot may occur more than once.
    Shapes: slots [B] i64, length [S] i64, window, parents [S, N] i64, page_table [S, P] i32, 1 <= width W <= N <= 64.
    Raises: ValueError naming the argument. Sync: never.
    """
    require(slots.dim() == 1 and slots.dtype == torch.int64 and slots.is_contiguous(), "slots", "[B] int64")
    require(length.dim() == 1 and length.dtype == torch.int64 and length.is_contiguous(), "length", "[S] int64")
    require(window.dim() == 2 and window.shape[0] == length.shape[0], "window", "[S, N]")
    require(window.dtype == torch.int64 and window.is_contiguous(), "window", "int64, contiguous")
    require(window.shape[1] <= MAX_TREE_WIDTH, "window", "at most 64 columns")
    require(parents.shape == window.shape and parents.dtype == torch.int64, "parents", "[S, N] int64")
    require(parents.is_contiguous(), "parents", "contiguous")
    require(page_table.dim() == 2 and page_table.shape[0] == length.shape[0], "page_table", "[S, P]")
    require(page_table.dtype == torch.int32 and page_table.stride(1) == 1, "page_table", "int32, contiguous rows")
    require(1 <= width <= window.shape[1], "width", "1 to the columns of window")
    require(page_size >= 1, "page_size", "at least 1")
    run = _gather_tree_triton if runs_triton(slots) else gather_tree_reference
    return run(slots, length, window, parents, page_table, width, page_size)


def gather_tree_reference(
    slots: Tensor, length: Tensor, window: Tensor, parents: Tensor, page_table: Tensor, width: int, page_size: int
) -> GatheredTree:
    lengths, window_tokens, pages = length[slots], window[slots, :width], page_table[slots]
    tree_parents = parents[slots, :width]
    column = torch.arange(width, device=slots.device)
    places = lengths[:, None] + column
    ancestors = [torch.ones_like(slots)]
    for own in range(1, width):
        above = torch.stack(ancestors, 1).gather(1, tree_parents[:, own, None]).squeeze(1)
        ancestors.append(above | (1 << own if own < MASK_BITS - 1 else -1 << own))
    mask = torch.stack(ancestors, 1)
    depths = (mask[:, :, None] >> column & 1).sum(2) - 1
    return GatheredTree(
        tokens=window_tokens.clamp(min=0).reshape(-1),
        window_tokens=window_tokens,
        parents=tree_parents,
        positions=(lengths[:, None] + depths).reshape(-1),
        lengths=lengths,
        page_table=pages,
        num_proposed=(window_tokens[:, 1:] >= 0).sum(1),
        extra_rows=pages.gather(1, places // page_size).long() * page_size + places % page_size,
        mask=mask[:, :, None],
    )


def _gather_tree_triton(
    slots: Tensor, length: Tensor, window: Tensor, parents: Tensor, page_table: Tensor, width: int, page_size: int
) -> GatheredTree:
    num_slots, num_columns = slots.shape[0], page_table.shape[1]
    out = GatheredTree(
        tokens=slots.new_empty(num_slots * width),
        window_tokens=slots.new_empty(num_slots, width),
        parents=slots.new_empty(num_slots, width),
        positions=slots.new_empty(num_slots * width),
        lengths=slots.new_empty(num_slots),
        page_table=page_table.new_empty(num_slots, num_columns),
        num_proposed=slots.new_empty(num_slots),
        extra_rows=slots.new_empty(num_slots, width),
        mask=slots.new_empty(num_slots, width, 1),
    )
    block_p = min(next_power_of_2(num_columns), _PAGES_PER_PROGRAM)
    _gather_tree_kernel[(num_slots, ceil_div(num_columns, block_p))](
        slots,
        length,
        window,
        parents,
        page_table,
        *out,
        window.shape[1],
        page_table.stride(0),
        num_columns,
        width,
        PAGE_SIZE=page_size,
        BLOCK_W=next_power_of_2(width),
        BLOCK_P=block_p,
        num_warps=4,
        **dependent_launch(slots.device),
    )
    return out


@TritonKernel
def _gather_tree_kernel(
    slots_ptr: tl.tensor, length_ptr: tl.tensor, window_ptr: tl.tensor, parents_ptr: tl.tensor,
    page_table_ptr: tl.tensor, tokens_ptr: tl.tensor, window_tokens_ptr: tl.tensor, tree_parents_ptr: tl.tensor,
    positions_ptr: tl.tensor, lengths_ptr: tl.tensor, pages_ptr: tl.tensor, num_proposed_ptr: tl.tensor,
    extra_rows_ptr: tl.tensor, mask_ptr: tl.tensor,
    window_columns: int, table_stride: int, num_columns: int, width: int,
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
        tokens = tl.load(window_ptr + slot * window_columns + column, mask=inside, other=-1)
        row_parents_ptr = parents_ptr + slot * window_columns
        parent = tl.load(row_parents_ptr + column, mask=inside, other=0)
        place = length + column
        page = tl.load(page_table_ptr + slot * table_stride + place // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        # Walk up from all columns at once. With an invalid parent the tree is wrong, but the walk still ends.
        node = tl.where(inside & (column > 0), tl.minimum(parent, column - 1), 0)
        depth = (inside & (column > 0)).to(tl.int64)
        ancestors = (tl.full([BLOCK_W], 1, tl.int64) << column) | 1
        while tl.max(node, axis=0) > 0:
            below = node > 0
            ancestors |= tl.where(below, tl.full([BLOCK_W], 1, tl.int64) << node, 0)
            depth += below.to(tl.int64)
            parent_of_node = tl.load(row_parents_ptr + node, mask=below, other=0)
            node = tl.where(below, tl.minimum(parent_of_node, node - 1), 0)
        out = row * width + column
        tl.store(tokens_ptr + out, tl.maximum(tokens, 0), mask=inside)
        tl.store(window_tokens_ptr + out, tokens, mask=inside)
        tl.store(tree_parents_ptr + out, parent, mask=inside)
        tl.store(positions_ptr + out, length + depth, mask=inside)
        tl.store(extra_rows_ptr + out, page * PAGE_SIZE + place % PAGE_SIZE, mask=inside)
        tl.store(mask_ptr + out, ancestors, mask=inside)
        tl.store(lengths_ptr + row, length)
        proposed = (tokens >= 0) & (column > 0)
        tl.store(num_proposed_ptr + row, tl.sum(proposed.to(tl.int64), axis=0))
    num_pages = tl.minimum(tl.cdiv(length + 2 * window_columns, PAGE_SIZE), num_columns)
    page_column = first_page + tl.arange(0, BLOCK_P)
    needed = page_column < num_pages
    page = tl.load(page_table_ptr + slot * table_stride + page_column, mask=needed, other=0)
    tl.store(pages_ptr + row * num_columns + page_column, page, mask=needed)
