"""Long chunks attend each by itself, and the short ones between them together: the result is one forward's."""

import pytest
import torch
from support.paged_rows import Paged

from overlap_spec.models.interfaces import LongChunk, RowBatch, ShortChunks
from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.layers.attention import AttentionShape, PagedAttention
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.speculative import rows
from overlap_spec.speculative.rows import ChunkPlace, chunk_rows

STARTS, COUNTS = [3, 0, 9, 5, 0], [2, 6, 7, 1, 2]
CPU, F64 = torch.device("cpu"), torch.float64


@pytest.fixture(autouse=True)
def _six_rows_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LONG_CHUNK", 6)


def rows_of(starts: list[int], counts: list[int], known: bool = True) -> RowBatch:
    """Chunks of several requests at those positions, with scattered pages."""
    paged = Paged(len(counts))
    paged.lengths = list(starts)
    rows = paged.rows(counts)
    assert rows.row_starts is not None
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    places = tuple(map(ChunkPlace, starts, counts)) if known else ()
    return chunk_rows(paged.page_table, owners, rows.positions, rows.row_starts, max(counts), paged.page_size, places)


def described(rows: RowBatch) -> list[tuple[object, ...]]:
    return [
        ("long", run.begin, run.end, run.start) if isinstance(run, LongChunk) else (run.begin, run.end)
        for run in rows.runs
    ]


def test_neighbouring_short_chunks_are_one_run() -> None:
    assert described(rows_of(STARTS, COUNTS)) == [(0, 2), ("long", 2, 8, 0), ("long", 8, 15, 9), (15, 18)]
    assert described(rows_of([4, 4], [6, 6])) == [("long", 0, 6, 4), ("long", 6, 12, 4)]
    rows = rows_of(STARTS, COUNTS)
    long, short = rows.runs[1], rows.runs[-1]
    assert isinstance(long, LongChunk) and torch.equal(long.pages, rows.page_table[1])
    assert isinstance(short, ShortChunks) and short.rows.row_starts is not None
    assert short.rows.row_starts.tolist() == [0, 1, 3]
    assert short.rows.positions.tolist() == [5, 0, 1]
    assert torch.equal(short.rows.page_table, rows.page_table[3:])


def test_there_are_no_runs_without_a_long_chunk_or_places() -> None:
    assert rows_of([0, 7], [5, 5]).runs == ()
    assert rows_of(STARTS, COUNTS, known=False).runs == ()


def test_runs_attend_as_all_rows_together_do() -> None:
    """Also where the host did not say what is long, and where a layer has no dense kernel."""
    torch.manual_seed(0)
    shape = AttentionShape(4, 2, 8, 0.3, None, RopeConfig("default", 10000.0, 8, 64, {}))
    paged = Paged(len(COUNTS))
    cache = KVCache.allocate(KVShape(1, 2, 8), paged.num_pages, paged.page_size, F64, CPU)
    attention = PagedAttention([shape], F64, cache, 64, DEFAULT_ATTENTION)
    for tensor in cache.stacked:
        tensor.copy_(torch.randn_like(tensor))
    (layer,), q = attention._layers, torch.randn(sum(COUNTS), 4, 8, dtype=F64)
    assert not layer.long_apart, "a CPU has no dense kernel"
    together = attention._attend(layer, q, rows_of(STARTS, COUNTS, known=False))
    assert torch.equal(attention._attend(layer, q, rows_of(STARTS, COUNTS)), together)
    apart = attention._attend(layer._replace(long_apart=True), q, rows_of(STARTS, COUNTS))
    torch.testing.assert_close(apart, together, rtol=1e-12, atol=1e-13)
