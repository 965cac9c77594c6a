"""Writes what requests need into the rows of their slots, in one launch: what a new one brings, and pages.

changes                                               slot rows (S)
slot, first column, pages   -> pages of the slot      page_table  [S, P], of a new request 0 everywhere else
a new request's row         -> columns, one after     rows [S, R], and what features keep: added [S, E]
                               another, of both
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton

CHANGE_FIELDS = 5  # of a slot: itself, first column, number of pages, where they are, where its new row is or -1
_PAGES_PER_PROGRAM = 1024


@dataclass(frozen=True)
class SlotTables:
    """What is kept of S slots. Raises: ValueError naming the field."""

    page_table: Tensor  # [S, P] i32
    rows: Tensor  # [S, R] i64
    added: Tensor  # [at least S, E] i64; E may be 0

    def __post_init__(self) -> None:
        table = self.page_table
        require(table.dim() == 2 and table.dtype == torch.int32 and table.is_contiguous(), "page_table", "[S, P] int32")
        for name in ("rows", "added"):
            value = getattr(self, name)
            require(value.dim() == 2 and value.dtype == torch.int64, name, "[S, n] int64")
            require(value.is_contiguous() and value.shape[0] >= table.shape[0], name, "a row for each slot, contiguous")

    @property
    def reset_width(self) -> int:
        """Integers of a new request's row: those of `rows` and `added`, side by side."""
        return self.rows.shape[1] + self.added.shape[1]


def write_slots(tables: SlotTables, changes: Tensor, count: int) -> None:
    """Write `count` changes into the rows of their slots, in place.

    `changes` begins with `CHANGE_FIELDS` integers for each change; what they point to comes after them, by its place in
    `changes`. Where a slot gets a new row, all of its page table but its pages becomes 0, the page of no request.
    No slot may occur twice. Pages beyond the page table are not written.
    Shapes: changes [n] i64.
    Raises: ValueError naming the argument. Sync: never.
    """
    require(changes.dim() == 1 and changes.dtype == torch.int64 and changes.is_contiguous(), "changes", "[n] int64")
    require(count >= 1 and count * CHANGE_FIELDS <= changes.shape[0], "count", "1 to as many as changes hold")
    run = _write_slots_triton if runs_triton(changes) else write_slots_reference
    run(tables, changes, count)


def write_slots_reference(tables: SlotTables, changes: Tensor, count: int) -> None:
    """On a CPU only. A slice of a tensor costs several times as much as one of an array."""
    values, page_table = changes.numpy(), tables.page_table.numpy()
    of_row = tables.rows.numpy(), tables.added.numpy()
    for slot, first, num_pages, pages_at, reset_at in values[: count * CHANGE_FIELDS].reshape(count, -1).tolist():
        if reset_at >= 0:
            page_table[slot] = 0
            for table in of_row:
                table[slot], reset_at = values[reset_at : reset_at + table.shape[1]], reset_at + table.shape[1]
        pages = page_table[slot, first : first + num_pages]
        pages[:] = values[pages_at : pages_at + len(pages)]


def _write_slots_triton(tables: SlotTables, changes: Tensor, count: int) -> None:
    num_columns = tables.page_table.shape[1]
    block_p = min(next_power_of_2(num_columns), _PAGES_PER_PROGRAM)
    _write_slots_kernel[(count, ceil_div(num_columns, block_p))](
        changes,
        tables.page_table,
        tables.rows,
        tables.added,
        num_columns,
        FIELDS=CHANGE_FIELDS,
        ROW=tables.rows.shape[1],
        ADDED=tables.added.shape[1],
        BLOCK_R=next_power_of_2(tables.reset_width),
        BLOCK_P=block_p,
        num_warps=4,
        **dependent_launch(changes.device),
    )


@TritonKernel
def _write_slots_kernel(
    changes_ptr: tl.tensor, page_table_ptr: tl.tensor, rows_ptr: tl.tensor, added_ptr: tl.tensor, num_columns: int,
    FIELDS: tl.constexpr, ROW: tl.constexpr, ADDED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (change, part of its page table); the first part also writes a new request's row."""
    change_ptr = changes_ptr + tl.program_id(0).to(tl.int64) * FIELDS
    first_page = tl.program_id(1) * BLOCK_P
    wait_for_inputs(PDL)
    slot = tl.load(change_ptr)
    first = tl.load(change_ptr + 1)
    num_pages = tl.load(change_ptr + 2)
    pages_at = tl.load(change_ptr + 3)
    reset_at = tl.load(change_ptr + 4)
    is_reset = reset_at >= 0
    column = first_page + tl.arange(0, BLOCK_P)
    inside = column < num_columns
    is_new = inside & (column >= first) & (column < first + num_pages)
    page = tl.load(changes_ptr + pages_at + column - first, mask=is_new, other=0)
    tl.store(page_table_ptr + slot * num_columns + column, page.to(tl.int32), mask=is_new | (inside & is_reset))
    if first_page == 0:
        place = tl.arange(0, BLOCK_R)
        value = tl.load(changes_ptr + reset_at + place, mask=is_reset & (place < ROW + ADDED), other=0)
        tl.store(rows_ptr + slot * ROW + place, value, mask=is_reset & (place < ROW))
        is_added = (place >= ROW) & (place < ROW + ADDED)
        tl.store(added_ptr + slot * ADDED + place - ROW, value, mask=is_reset & is_added)
