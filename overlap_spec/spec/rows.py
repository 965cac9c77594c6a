"""Where the rows of a forward stand: positions, cache rows, page tables. Not here: what the rows hold."""

import torch
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch
from overlap_spec.spec.types import SlotBatch


def window_rows(batch: SlotBatch, width: int, page_size: int) -> RowBatch:
    """`width` rows per slot, from its length on. Sync: never."""
    columns = torch.arange(width, device=batch.lengths.device)
    return _uniform_rows(batch, batch.lengths[:, None] + columns, page_size)


def single_rows(batch: SlotBatch, positions: Tensor, page_size: int) -> RowBatch:
    """One row per slot, at `positions` [B] i64. Sync: never."""
    return _uniform_rows(batch, positions[:, None], page_size)


def chunk_rows(
    page_table: Tensor, owners: Tensor, positions: Tensor, row_starts: Tensor, longest: int, page_size: int
) -> RowBatch:
    """The rows of prompt chunks of any lengths. Sync: never.

    Shapes: page_table [B, P] i32; owners, positions [T] i64 (whose row, and where); row_starts [B + 1] i64.
    """
    cache_rows = _cache_rows(page_table[owners, positions // page_size], positions, page_size)
    return RowBatch(positions, cache_rows, page_table, row_starts.int(), longest, False)


def _uniform_rows(batch: SlotBatch, positions: Tensor, page_size: int) -> RowBatch:
    """Shapes: positions [B, R] i64."""
    num_slots, rows = positions.shape
    starts = torch.arange(num_slots + 1, dtype=torch.int32, device=positions.device) * rows
    cache_rows = _cache_rows(batch.page_table.gather(1, positions // page_size), positions, page_size)
    return RowBatch(positions.reshape(-1), cache_rows.reshape(-1), batch.page_table, starts, rows, True)


def _cache_rows(pages: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Shapes: pages i32, positions i64, alike -> i64."""
    return pages.long() * page_size + positions % page_size
