"""Latent attention under the interpreter, float32. Every cache row that no request owns holds NaN."""

import pytest
import torch
from kernel_cases.inputs import HeadShape, attention_inputs, tree_inputs
from overlap_spec_kernels.attention.kv_format import NO_SCALES, KVScales, stored
from overlap_spec_kernels.attention.latent_attention import (
    LatentScratch,
    _Rows,
    _run,
    _Tree,
    latent_attention_reference,
    latent_tree_attention_reference,
)
from overlap_spec_kernels.attention.latent_heads import (
    _few_head_products,
    _head_products_triton,
    _latent_heads_triton,
    _TokenRows,
    head_products,
    latent_heads_reference,
)
from overlap_spec_kernels.attention.rope_latent_write import _rope_latent_write_triton, rope_latent_write_reference
from support.dots_in_order import dots_in_order
from torch import Tensor

CLOSE = {"rtol": 1e-5, "atol": 2e-6}
CPU = torch.device("cpu")
SIZES = [(16, 8), (24, 10), (40, 16)]  # rank and rotated columns: a block, or a part of one
UNIT = 16  # keys of the first pieces: 300 are 16 of them and two of 32; 1100 are 24 and ten of 64
# Programs, and rows and heads that there is memory for: enough for every piece, or so little that tiles are whole.
MEMORY = {"pieces": (7, 4096), "tiles": (1, 16)}


def run(
    rows: _Rows,
    tree: _Tree | None,
    memory: str,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
    unit: int = UNIT,
) -> Tensor:
    num_programs, num_pairs = MEMORY[memory]
    sizes = (num_pairs * rows.rank, num_pairs * 2)
    scratch = LatentScratch(*(torch.full((size,), torch.nan) for size in sizes), num_programs, unit)
    return _run(rows, tree, 0.3, scratch, window, scales)


def rows_of(
    num_heads: int, size: tuple[int, int], requests: list[tuple[int, int]], page_size: int, uniform: bool
) -> _Rows:
    rank, rope = size
    inputs = attention_inputs(HeadShape(num_heads, 1, rank + rope), requests, page_size, torch.float32)
    starts = None if uniform else inputs.row_starts
    return _Rows(inputs.q, inputs.k_cache, rank, inputs.page_table, starts, inputs.positions)


def check(rows: _Rows, memory: str, window: int | None = None) -> None:
    found = run(rows, None, memory, window)
    torch.testing.assert_close(found, latent_attention_reference(*rows, 0.3, window), **CLOSE)


@pytest.mark.full_but_every(8)
@pytest.mark.slow_but_every(18)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("width", [1, 3, 16])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("size", SIZES)
def test_decode(size: tuple[int, int], page_size: int, width: int, memory: str) -> None:
    """Around the ends of pages and of pieces; 5 heads, so that a tile has a part of a row's."""
    lengths = [70, 0, 15, 1, 17, 16]
    rows = rows_of(5, size, [(length, width) for length in lengths], page_size, True)
    check(rows, memory)


@pytest.mark.full_but_every(8)
@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("num_heads", [1, 16, 20])
def test_other_heads(num_heads: int, memory: str) -> None:
    check(rows_of(num_heads, (24, 8), [(300, 2), (3, 2)], 16, True), memory)


@pytest.mark.full_but_every(8)
@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("requests", [[(27, 5), (0, 14), (16, 1)], [(1090, 5), (0, 3), (40, 30)], [(0, 70)]])
def test_chunks(requests: list[tuple[int, int]], memory: str) -> None:
    check(rows_of(5, (24, 8), requests, 16, False), memory)


@pytest.mark.slow
def test_the_longest_pieces() -> None:
    """From 8192 keys on they have 128."""
    check(rows_of(1, (16, 8), [(8300, 2)], 16, True), "pieces")


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [33, 257])
def test_more_requests_than_lanes(num_requests: int) -> None:
    lengths = [(7 * request) % 40 for request in range(num_requests)]
    check(rows_of(1, (16, 8), [(length, 1) for length in lengths], 16, True), "pieces")


@pytest.mark.parametrize("memory", MEMORY)
def test_a_request_without_rows_and_rows_without_a_request(memory: str) -> None:
    """What a captured step is laid out for."""
    rows = rows_of(3, (16, 8), [(20, 2), (18, 3)], 16, False)
    padded = rows._replace(
        q=torch.cat((rows.q, torch.full((4, 3, 24), torch.nan))),
        positions=torch.cat((rows.positions, torch.zeros(4, dtype=torch.int64))),
        page_table=torch.cat((rows.page_table[:1], torch.zeros_like(rows.page_table[:1]), rows.page_table[1:])),
        row_starts=torch.tensor([0, 2, 2, 5], dtype=torch.int32),
    )
    found = run(padded, None, memory)
    torch.testing.assert_close(found[:5], latent_attention_reference(*rows, 0.3), **CLOSE)


@pytest.mark.full_but_every(8)
@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(("window", "width"), [(100, 2), (1, 4), (3, 16), (290, 1)])
def test_window(window: int, width: int, memory: str) -> None:
    """Pages before it may belong to others."""
    rows = rows_of(3, (16, 8), [(400, width), (0, width), (17, width)], 16, True)
    for pages, first in zip(rows.page_table, (400, 0, 17), strict=True):
        piece = max(first - window + 1, 0) // 32 * 32  # keys of a piece are read, and have no weight
        pages[: piece // 16] = 0 if piece < 256 else pages[0]
    check(rows, memory, window)


def trees(
    num_heads: int, size: tuple[int, int], width: int, num_extra: int, prefixes: list[int]
) -> tuple[_Rows, _Tree]:
    inputs = tree_inputs(HeadShape(num_heads, 1, sum(size)), width, num_extra, prefixes, 16, torch.float32)
    rows = _Rows(inputs.q, inputs.k_cache, size[0], inputs.page_table, None, inputs.positions)
    return rows, _Tree(inputs.prefix, inputs.extra_rows, inputs.mask)


@pytest.mark.full_but_every(8)
@pytest.mark.slow_but_every(11)
@pytest.mark.parametrize(("width", "num_extra"), [(7, 9), (16, 40), (4, 130), (1, 1)])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("window", [None, 1, 30])
def test_trees(width: int, num_extra: int, window: int | None, memory: str) -> None:
    """The last row of each sees its prefix alone, and that of an empty one nothing."""
    rows, tree = trees(5, (24, 8), width, num_extra, [120, 0, 17])
    found = run(rows, tree, memory, window)
    expected = latent_tree_attention_reference(*rows[:4], *tree, rows.positions, 0.3, window)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("tree", [False, True])
def test_8_bits(tree: bool, kv_dtype: torch.dtype) -> None:
    scales = KVScales(0.25, 0.25)
    rows, keys = trees(5, (24, 8), 4, 6, [70, 3])
    rows = rows._replace(cache=stored(rows.cache, kv_dtype, scales.k))
    if tree:
        found = run(rows, keys, "pieces", scales=scales)
        expected = latent_tree_attention_reference(*rows[:4], *keys, rows.positions, 0.3, None, scales)
    else:
        rows = rows._replace(positions=(keys.prefix[:, None] - 4 + torch.arange(4)).clamp(min=0).flatten())
        found = run(rows, None, "pieces", scales=scales)
        expected = latent_attention_reference(*rows, 0.3, None, scales)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_16_bits() -> None:
    """What is left is the rounding of weights before they meet values."""
    rows = rows_of(5, (40, 8), [(150, 3), (5, 3)], 16, True)
    rows = rows._replace(q=rows.q.half(), cache=rows.cache.half())
    expected = latent_attention_reference(*rows._replace(q=rows.q.float(), cache=rows.cache.float()), 0.3)
    torch.testing.assert_close(run(rows, None, "pieces", unit=64).float(), expected, rtol=2**-10, atol=1e-3)


@pytest.mark.full_but_every(5)
@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("num_heads", [3, 16, 20])
def test_a_row_has_the_same_bits_in_any_company(num_heads: int, window: int | None) -> None:
    """Alone, in windows of 2 to 4, beside other requests, in a chunk; by pieces, and by tiles."""
    whole = rows_of(num_heads, (24, 8), [(93, 4), (3, 4), (50, 4)], 16, True)  # from 6 pieces to 7
    alone = []
    for row in range(4):
        mine = whole._replace(
            q=whole.q[row : row + 1], positions=whole.positions[row : row + 1], page_table=whole.page_table[:1]
        )
        both = [run(mine, None, memory, window) for memory in MEMORY]
        assert torch.equal(*both)
        alone.append(both[0])
    expected = torch.cat(alone)
    for memory in MEMORY:
        assert torch.equal(run(whole, None, memory, window)[:4], expected)
        for width in (2, 3):
            some = whole._replace(q=whole.q[:width], positions=whole.positions[:width], page_table=whole.page_table[:1])
            assert torch.equal(run(some, None, memory, window), expected[:width])
        starts = torch.tensor([0, 3, 4], dtype=torch.int32)
        pages = whole.page_table[[0, 0]]
        cut = whole._replace(q=whole.q[:4], positions=whole.positions[:4], page_table=pages, row_starts=starts)
        assert torch.equal(run(cut, None, memory, window), expected)


def test_what_other_requests_hold_changes_no_bit() -> None:
    rows, tree = trees(3, (24, 8), 4, 6, [40, 20, 17])
    first = run(rows, tree, "pieces")[:4]
    rows.q[4:] *= 3
    tree.mask[1:] = -1 << 3
    tree.prefix[1:] = 5
    for memory in MEMORY:
        assert torch.equal(run(rows, tree, memory)[:4], first)


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize(("num_heads", "size"), [(3, (16, 6)), (0, (24, 8)), (20, (24, 10))])
def test_rows_are_written(num_heads: int, size: tuple[int, int], paged: bool) -> None:
    rank, rope = size
    heads = torch.randn(6, num_heads + 1, sum(size))
    cos_sin, positions = torch.randn(40, rope), torch.tensor([3, 4, 5, 7, 8, 9])
    places, results = torch.tensor([17, 3, 0, 40, 5, 22]), []
    if paged:  # of two requests
        places = torch.tensor([[7, 4, 0], [0, 9, 2]], dtype=torch.int32)
    for write in (_rope_latent_write_triton, rope_latent_write_reference):
        cache = torch.zeros(11, 4, 1, sum(size))
        queries = write(heads.clone(), rank, cos_sin, positions, places, cache)
        results.append((queries, cache))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    assert torch.equal(results[0][0][..., :rank], heads[:, :-1, :rank])
    written = results[0][1].flatten(0, 1).any(dim=2).flatten().nonzero().flatten().tolist()
    assert written == ([8, 9, 16, 17, 31, 39] if paged else [0, 3, 5, 17, 22, 40])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("num_heads", "size"), [(5, (24, 10)), (20, (16, 8)), (1, (40, 2))])
def test_queries_and_rows_are_put_together(num_heads: int, size: tuple[int, int], interleaved: bool) -> None:
    """Of parts of other tensors, as linears leave them."""
    rank, rope = size
    absorbed = torch.randn(num_heads, 3, rank).transpose(0, 1)
    queries = torch.randn(3, num_heads, 12 + rope)[:, :, 12:]
    rows, weight = torch.randn(3, 7 + rank + rope)[:, 7:], torch.randn(rank)
    found, expected = (
        run(absorbed, queries, rows, weight, 0.1, interleaved) for run in (_latent_heads_triton, latent_heads_reference)
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sizes", [(3, 40, 72), (2, 130, 20)])
def test_products_of_heads(sizes: tuple[int, int, int]) -> None:
    """Of parts of other tensors; a row has the bits that it has alone, in tiles of all sizes."""
    heads, size_k, size_n = sizes
    x, weight = torch.randn(130, heads, size_k + 6)[:, :, 3:-3], torch.randn(heads, size_k, size_n)
    torch.testing.assert_close(_head_products_triton(x, weight), head_products(x, weight), rtol=1e-5, atol=1e-4)
    with dots_in_order():
        whole = _head_products_triton(x, weight)
        for count in (1, 2, 16, 17, 40, 64, 65):
            assert torch.equal(_head_products_triton(x[:count], weight), whole[:count]), count
            if count <= 16:
                assert torch.equal(_few_head_products(x[:count], weight), whole[:count]), count


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("num_rows", "num_heads", "size"), [(3, 5, (24, 10)), (16, 2, (40, 2)), (1, 3, (72, 8))])
def test_queries_are_absorbed_by_one_launch(
    num_rows: int, num_heads: int, size: tuple[int, int], interleaved: bool
) -> None:
    """Beside the token's row, with the bits of two launches; more rows than a head has programs."""
    rank, rope = size
    queries, key = torch.randn(num_rows, num_heads, 40 + rope), torch.randn(num_heads, 40, rank)
    rows, weight = torch.randn(num_rows, 7 + rank + rope)[:, 7:], torch.randn(rank)
    whole, turned = queries[:, :, :40], queries[:, :, 40:]
    with dots_in_order():
        found = _few_head_products(whole, key, _TokenRows(turned, rows, weight, 0.1, interleaved))
        absorbed = _head_products_triton(whole, key)
    assert torch.equal(found, _latent_heads_triton(absorbed, turned, rows, weight, 0.1, interleaved))
