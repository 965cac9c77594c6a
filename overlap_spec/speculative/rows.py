"""Where the rows of a forward stand: positions, cache rows, page tables.

Of a prefill step, long chunks attend each by itself, neighbouring short ones together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from overlap_spec_kernels import MAX_CHAIN_WIDTH
from torch import Tensor

from overlap_spec.models.interfaces import LongChunk, RowBatch, RowsRead, ShortChunks, StateRows, TreeKeys
from overlap_spec.speculative.interfaces import SlotBatch

LONG_CHUNK = 1536  # rows; shorter ones gain little, and new shapes would hold up requests that decode


class ChunkPlace(NamedTuple):
    """The positions of a prompt chunk."""

    start: int  # position of its first row
    num_rows: int


def chunk_runs(rows: RowBatch, places: Sequence[ChunkPlace]) -> tuple[LongChunk | ShortChunks, ...]:
    """All rows in order: each long chunk, and neighbouring short ones together. () without a long chunk.

    `places`: of all chunks of `rows`, or () if the host does not know them.
    """
    return tuple(_runs(rows, places)) if any(map(_is_long, places)) else ()


def _is_long(place: ChunkPlace) -> bool:
    return place.num_rows >= LONG_CHUNK


def _runs(rows: RowBatch, places: Sequence[ChunkPlace]) -> Iterator[LongChunk | ShortChunks]:
    first_rows = list(accumulate((place.num_rows for place in places), initial=0))
    for is_long, group in groupby(range(len(places)), lambda chunk: _is_long(places[chunk])):
        chunks = list(group)
        if is_long:
            for chunk in chunks:
                begin, end = first_rows[chunk : chunk + 2]
                yield LongChunk(begin, end, places[chunk].start, rows.page_table[chunk])
        else:
            first, last = chunks[0], chunks[-1] + 1
            longest = max(place.num_rows for place in places[first:last])
            yield _short_chunks(rows, slice(first, last + 1), first_rows[first], first_rows[last], longest)


def _short_chunks(rows: RowBatch, starts: slice, begin: int, end: int, longest: int) -> ShortChunks:
    """A forward of these rows alone. `starts`: the entries of `row_starts`, the end's included.

    Clones begin at an aligned address, as tensors otherwise do: a kernel would be compiled anew for others.
    """
    assert rows.row_starts is not None and rows.cache_rows is not None
    of_chunks = RowBatch(
        rows.positions[begin:end].clone(),
        rows.cache_rows[begin:end],
        rows.page_table[starts.start : starts.stop - 1].clone(),
        rows.row_starts[starts] - begin,
        longest,
        False,
    )
    return ShortChunks(begin, end, of_chunks)


def window_rows(batch: SlotBatch, positions: Tensor, page_size: int) -> RowBatch:
    """The rows of windows, at consecutive `positions` [B, W] i64. Sync: never.

    On a GPU the kernel that attends finds their cache rows itself.
    """
    width, state = positions.shape[1], StateRows(batch.slots, are_final=False)
    finds_rows = positions.is_cuda and width <= MAX_CHAIN_WIDTH
    shares = batch.shares if finds_rows else None
    rows = RowBatch(positions.reshape(-1), None, batch.page_table, None, width, True, shares=shares, state=state)
    return rows if finds_rows else rows.placed(page_size)


def tree_rows(batch: SlotBatch, positions: Tensor, cache_rows: Tensor, tree: TreeKeys) -> RowBatch:
    """Rows of trees, whose K/V goes to `cache_rows`. Sync: never. Shapes: positions, cache_rows [B, R] i64."""
    positions, cache_rows = positions.contiguous(), cache_rows.contiguous()
    return RowBatch(positions.view(-1), cache_rows.view(-1), batch.page_table, None, positions.shape[1], True, tree)


def single_rows(batch: SlotBatch, offset: int, page_size: int) -> RowBatch:
    """One row per slot, `offset` after its length. Sync: never."""
    if batch.places is not None and offset < len(batch.places):
        positions = batch.places[offset]
    else:
        positions = batch.lengths + offset if offset else batch.lengths
    return window_rows(batch, positions[:, None], page_size)


def earlier_rows(batch: SlotBatch, counts: Tensor, most: int, page_size: int) -> RowBatch:
    """`most` rows per slot, of which the first `counts` are the ones before its length. Sync: never.

    The rest are idle: they stand at the last position before the length (at 0 without one) and write to the dummy page.
    Shapes: counts [B] i64, 0..most and at most the length.
    """
    columns = torch.arange(most, device=batch.lengths.device)
    offsets = (columns - counts[:, None]).clamp(max=-1)
    positions = (batch.lengths[:, None] + offsets).clamp(min=0).view(-1)
    rows = RowBatch(positions, None, batch.page_table, None, most, True).placed(page_size)
    idle = (columns >= counts[:, None]).reshape(-1)
    assert rows.cache_rows is not None
    return replace(rows, cache_rows=rows.cache_rows.masked_fill(idle, 0))


def reading_last(rows: RowBatch) -> RowBatch:
    """Uniform rows that are there for their K/V: of each request the last one is read, as few as can be."""
    num_requests = len(rows.page_table)
    return reading_only(rows, torch.arange(1, num_requests + 1, device=rows.positions.device) * rows.max_rows - 1)


def last_rows(page_table: Tensor, ends: Tensor, first: Tensor, num_rows: int, page_size: int) -> RowBatch:
    """`num_rows` rows per request, the last one before `ends`. Sync: never.

    Those before `first` are idle: they write to the dummy page, and stand at 0 where there is no place for them.
    Shapes: page_table [B, P] i32; ends, first [B] i64.
    """
    positions = ends[:, None] - num_rows + torch.arange(num_rows, device=ends.device)
    rows = RowBatch(positions.clamp(min=0).reshape(-1), None, page_table, None, num_rows, True).placed(page_size)
    assert rows.cache_rows is not None
    return replace(rows, cache_rows=rows.cache_rows.masked_fill((positions < first[:, None]).reshape(-1), 0))


def chunk_rows(
    page_table: Tensor,
    owners: Tensor,
    positions: Tensor,
    row_starts: Tensor,
    longest: int,
    page_size: int,
    places: Sequence[ChunkPlace] = (),
    state: StateRows | None = None,
) -> RowBatch:
    """The rows of prompt chunks of any lengths. Sync: never.

    `places`: of every chunk, if the host knows them. Long chunks then become runs of their own.
    Shapes: page_table [B, P] i32; owners, positions [T] i64 (whose row, and where); row_starts [B + 1] i64.
    """
    cache_rows = page_table[owners, positions // page_size].long() * page_size + positions % page_size
    rows = RowBatch(positions, cache_rows, page_table, row_starts.int(), longest, False, state=state)
    return replace(rows, runs=chunk_runs(rows, places))


def reading_only(rows: RowBatch, index: Tensor, positions: Tensor | None = None) -> RowBatch:
    """The same rows of which one of each request is read after the last layer. Sync: never.

    `positions`: up to which these attend in it; None: their own. Shapes: index, positions [B] i64.
    """
    assert rows.cache_rows is not None
    starts = torch.arange(len(index) + 1, dtype=torch.int32, device=index.device)
    attended = rows.positions[index] if positions is None else positions
    read = RowBatch(attended, rows.cache_rows[index], rows.page_table, starts, 1, True)
    return replace(rows, read=RowsRead(index, read))


def reading_windows(rows: RowBatch, places: Tensor) -> RowBatch:
    """The same windows, of which one row each is read after the last layer. Sync: never. Shapes: places [B] i64."""
    return replace(rows, read=RowsRead(places, None, of_windows=True))


def concatenated(*parts: RowBatch) -> RowBatch:
    """The rows of several batches, in order, for one forward. Sync: never."""
    positions = torch.cat([part.positions for part in parts])
    longest = max(part.max_rows for part in parts)
    rows = RowBatch(positions, None, parts[0].page_table, None, longest, False, parts=parts)
    if all(part.read is None for part in parts):
        return rows
    firsts = accumulate((len(part.positions) for part in parts), initial=0)
    read = [
        torch.arange(first, first + len(part.positions), device=positions.device)
        if part.read is None
        else part.read.index + first
        for first, part in zip(firsts, parts, strict=False)
    ]
    return replace(rows, read=RowsRead(torch.cat(read), None))
