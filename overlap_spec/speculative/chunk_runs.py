"""Divides the rows of a prefill step: long chunks attend each by itself, neighbouring short ones together."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from overlap_spec.models.interfaces import LongChunk, RowBatch, ShortChunks

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
