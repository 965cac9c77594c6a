"""Latent attention on a GPU against its reference in float32 on the CPU, and bits that no company changes.

Cache rows that no request owns, and extra keys that no row sees, hold NaN. 16, 20 and 128 heads with rows of 512 + 64
columns are those of DeepSeek-V2-Lite, GLM-4.7-Flash and DeepSeek-V3.
"""

from typing import Any

import pytest
import torch
from kernel_cases.inputs import HeadShape, attention_inputs, to_device, tree_inputs
from overlap_spec_kernels.attention.kv_format import NO_SCALES, KVScales, stored
from overlap_spec_kernels.attention.latent_attention import (
    LatentScratch,
    latent_attention,
    latent_attention_reference,
    latent_tree_attention,
    latent_tree_attention_reference,
)
from overlap_spec_kernels.attention.latent_heads import (
    absorbed_heads,
    head_products,
    latent_heads,
    latent_heads_reference,
)
from overlap_spec_kernels.attention.move_cache_rows import move_cache_rows
from overlap_spec_kernels.attention.rope_latent_write import rope_latent_write, rope_latent_write_reference
from support.attention_cases import BFLOAT, CLOSE, FLOAT, HALF
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.eight_bits import E4M3, E5M2, assert_close_in_8_bits
from torch import Tensor

DEVICE = torch.device("cuda", 0)
WHOLE, TINY, ODD = (512, 64), (24, 16), (40, 8)  # latent and rotated columns
LENGTHS = [300, 0, 15, 1, 127, 128, 700]
SCALE = 0.06
LATENT_CLOSE = CLOSE | {FLOAT: {"rtol": 1e-5, "atol": 4e-6}}  # scores are sums of up to 576 products
Rows = tuple[Tensor, Tensor, int, Tensor, Tensor | None, Tensor]  # the first arguments of `latent_attention`


def scratch_of(heads: int, size: tuple[int, int], num_slots: int = 4096) -> LatentScratch:
    scratch = LatentScratch.allocate(heads, size[0], DEVICE, num_slots)
    scratch.sums.fill_(torch.nan)
    scratch.stats.fill_(torch.nan)
    return scratch


def in_tiles(heads: int, size: tuple[int, int]) -> LatentScratch:
    """With so little memory that a program takes whole tiles."""
    return LatentScratch(*(torch.full((64 * each,), torch.nan, device=DEVICE) for each in (size[0], 2)), 1)


def rows_of(
    heads: int, size: tuple[int, int], requests: list[tuple[int, int]], page_size: int, dtype: torch.dtype
) -> Rows:
    """Uniform rows have no `row_starts`."""
    inputs = attention_inputs(HeadShape(heads, 1, sum(size)), requests, page_size, dtype)
    starts = None if inputs.uniform else inputs.row_starts
    return inputs.q, inputs.k_cache, size[0], inputs.page_table, starts, inputs.positions


def on_gpu(rows: Any) -> Any:
    return [to_device(value, "cuda") for value in rows]


def widened(rows: Any) -> list[Any]:
    return [value.float() if isinstance(value, Tensor) and value.is_floating_point() else value for value in rows]


def check(rows: Rows, window: int | None = None, scales: KVScales = NO_SCALES) -> None:
    """By pieces and by tiles, whose bits are equal."""
    heads, size = rows[0].shape[1], (rows[2], rows[0].shape[2] - rows[2])
    expected = latent_attention_reference(*widened(rows), SCALE, window, scales)
    found = [
        latent_attention(*on_gpu(rows), SCALE, scratch, window, scales)
        for scratch in (scratch_of(heads, size), in_tiles(heads, size))
    ]
    torch.testing.assert_close(found[0].cpu().float(), expected, **LATENT_CLOSE[rows[0].dtype])
    assert torch.equal(*found) and found[0].dtype == rows[0].dtype


@pytest.mark.parametrize(("heads", "width", "page_size", "dtype"), [
    (16, 1, 16, BFLOAT), (20, 1, 64, BFLOAT), (128, 1, 16, BFLOAT), (20, 4, 16, BFLOAT), (16, 16, 1, BFLOAT),
    (20, 1, 16, HALF), (20, 3, 16, FLOAT),
])  # fmt: skip
def test_decode(heads: int, width: int, page_size: int, dtype: torch.dtype) -> None:
    check(rows_of(heads, WHOLE, [(length, width) for length in LENGTHS], page_size, dtype))


@pytest.mark.parametrize(("heads", "size", "width", "page_size", "dtype"), [
    (4, TINY, 1, 4, FLOAT), (5, TINY, 7, 1, BFLOAT), (3, ODD, 16, 64, FLOAT), (4, ODD, 1, 1, BFLOAT),
    (5, (128, 64), 7, 16, BFLOAT), (4, (256, 32), 3, 64, BFLOAT), (3, (128, 64), 2, 16, FLOAT),
])  # fmt: skip
def test_other_sizes(heads: int, size: tuple[int, int], width: int, page_size: int, dtype: torch.dtype) -> None:
    check(rows_of(heads, size, [(length, width) for length in LENGTHS], page_size, dtype))


@pytest.mark.parametrize(("heads", "lengths"), [(20, [9000, 3, 2047]), (16, [33000])])
def test_long_contexts(heads: int, lengths: list[int]) -> None:
    check(rows_of(heads, WHOLE, [(length, 2) for length in lengths], 16, BFLOAT))


@pytest.mark.parametrize(("heads", "size", "dtype", "requests"), [
    (20, WHOLE, BFLOAT, [(0, 300), (40, 3), (500, 1)]), (16, WHOLE, HALF, [(3000, 65), (0, 5)]),
    (4, TINY, FLOAT, [(0, 200), (70, 90), (9, 1)]), (20, WHOLE, BFLOAT, [(0, 700)]),
])  # fmt: skip
def test_chunks(heads: int, size: tuple[int, int], dtype: torch.dtype, requests: list[tuple[int, int]]) -> None:
    check(rows_of(heads, size, requests, 16, dtype))


@pytest.mark.parametrize(("heads", "size", "dtype", "window"), [
    (20, WHOLE, BFLOAT, 300), (4, TINY, FLOAT, 1), (4, TINY, FLOAT, 100),
])  # fmt: skip
def test_window(heads: int, size: tuple[int, int], dtype: torch.dtype, window: int) -> None:
    check(rows_of(heads, size, [(length, 4) for length in LENGTHS], 16, dtype), window)


@pytest.mark.parametrize(("heads", "width", "size", "dtype", "kv_dtype"), [
    (20, 1, WHOLE, BFLOAT, E4M3), (20, 4, WHOLE, BFLOAT, E5M2), (16, 1, WHOLE, HALF, E4M3), (4, 3, TINY, FLOAT, E5M2),
])  # fmt: skip
def test_8_bits(heads: int, width: int, size: tuple[int, int], dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    q, cache, *others = rows_of(heads, size, [(length, width) for length in LENGTHS], 16, dtype)
    check((q, stored(cache, kv_dtype, 0.04), *others), scales=KVScales(0.04, 0.04))


@pytest.mark.parametrize(("heads", "size", "dtype", "width", "num_extra", "window"), [
    (20, WHOLE, BFLOAT, 8, 9, None), (16, WHOLE, BFLOAT, 16, 40, None), (128, WHOLE, HALF, 2, 130, None),
    (4, TINY, FLOAT, 7, 9, None), (4, TINY, FLOAT, 7, 9, 30), (5, ODD, BFLOAT, 1, 1, None),
])  # fmt: skip
def test_trees(
    heads: int, size: tuple[int, int], dtype: torch.dtype, width: int, num_extra: int, window: int | None
) -> None:
    """The last row of each sees its prefix alone, and that of an empty one nothing."""
    inputs = tree_inputs(HeadShape(heads, 1, sum(size)), width, num_extra, [300, 0, 17, 1000], 16, dtype)
    keys = (inputs.page_table, inputs.prefix, inputs.extra_rows, inputs.mask, inputs.positions)
    rows = (inputs.q, inputs.k_cache, size[0], *keys)
    expected = latent_tree_attention_reference(*widened(rows), SCALE, window)
    found = [
        latent_tree_attention(*on_gpu(rows), SCALE, scratch, window)
        for scratch in (scratch_of(heads, size), in_tiles(heads, size))
    ]
    torch.testing.assert_close(found[0].cpu().float(), expected, **CLOSE[dtype])
    assert torch.equal(*found)


@pytest.mark.parametrize(("heads", "size", "dtype"), [
    (20, WHOLE, BFLOAT), (16, WHOLE, HALF), (4, TINY, FLOAT), (20, WHOLE, FLOAT),
])  # fmt: skip
def test_a_row_has_the_same_bits_in_any_company(heads: int, size: tuple[int, int], dtype: torch.dtype) -> None:
    """Alone, in windows of 2 to 16, among 1 to 48 other requests of any length, in a chunk."""
    width, lengths = 16, torch.randint(1, 1500, (49,)).tolist()
    lengths[0] = 1020  # from the end of a piece into the next
    q, cache, rank, table, _, positions = on_gpu(rows_of(heads, size, [(n, width) for n in lengths], 16, dtype))
    scratch = scratch_of(heads, size)

    def run(q: Tensor, table: Tensor, starts: Tensor | None, positions: Tensor) -> Tensor:
        return latent_attention(q, cache, rank, table, starts, positions, SCALE, scratch)

    alone = torch.cat([run(q[i : i + 1], table[:1], None, positions[i : i + 1]) for i in range(width)])
    for rows in (2, 3, 4, 8, 16):
        assert torch.equal(run(q[:rows], table[:1], None, positions[:rows]), alone[:rows]), rows
    for requests in (2, 3, 7, 17, 33, 49):
        count = requests * width
        assert torch.equal(run(q[:count], table[:requests], None, positions[:count])[:width], alone), requests
    starts = torch.tensor([0, 5, width], dtype=torch.int32, device=DEVICE)
    assert torch.equal(run(q[:width], table[[0, 0]], starts, positions[:width]), alone)


@pytest.mark.parametrize(("heads", "size", "dtype", "kv_dtype"), [
    (0, WHOLE, BFLOAT, None), (20, WHOLE, BFLOAT, None), (128, WHOLE, FLOAT, E4M3), (5, ODD, FLOAT, None),
    (20, WHOLE, BFLOAT, E5M2),
])  # fmt: skip
def test_rows_are_written(heads: int, size: tuple[int, int], dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Where cache rows say, and where the pages of two requests do."""
    rank, rope = size
    rows, cos_sin = torch.randn(40, heads + 1, sum(size)).to(dtype), torch.randn(60, rope)
    positions = torch.cat((torch.arange(33, 53), torch.arange(20)))
    for places in (torch.randperm(64)[:40], torch.randperm(32).to(torch.int32).view(2, 16)):
        cache = torch.zeros(32, 4, 1, sum(size), dtype=kv_dtype or dtype)
        given = (rows, rank, cos_sin, positions, places, cache)
        found = rope_latent_write(*(moved := [to_device(value, "cuda") for value in given]), 0.5)
        queries = rope_latent_write_reference(rows.clone(), *given[1:], 0.5)
        torch.testing.assert_close(found.cpu(), queries, **CLOSE[dtype])
        written = moved[-1].cpu()
        if kv_dtype is not None:
            assert_close_in_8_bits(written, cache)
        else:
            torch.testing.assert_close(written, cache, **CLOSE[dtype])


@pytest.mark.parametrize(("heads", "size", "dtype", "interleaved"), [
    (20, WHOLE, BFLOAT, True), (128, WHOLE, BFLOAT, False), (5, ODD, FLOAT, True),
])  # fmt: skip
def test_queries_and_rows_are_put_together(
    heads: int, size: tuple[int, int], dtype: torch.dtype, interleaved: bool
) -> None:
    """Of parts of other tensors, as linears leave them; and a row has the same bits alone."""
    (rank, rope), rows = size, 70
    absorbed = torch.randn(heads, rows, rank).to(dtype).transpose(0, 1)
    queries = torch.randn(rows, heads, 12 + rope).to(dtype)[:, :, 12:]
    tokens, weight = torch.randn(rows, 7 + rank + rope).to(dtype)[:, 7:], torch.randn(rank).to(dtype)
    expected = latent_heads_reference(absorbed, queries, tokens, weight, 1e-6, interleaved)
    moved = on_gpu((absorbed, queries, tokens, weight))
    found = latent_heads(*moved, 1e-6, interleaved)
    torch.testing.assert_close(found.cpu(), expected, **CLOSE[dtype])
    alone = torch.cat(
        [latent_heads(*(each[i : i + 1] for each in moved[:3]), moved[3], 1e-6, interleaved) for i in range(9)]
    )
    assert torch.equal(found[:9], alone)


@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 16, 17])
@pytest.mark.parametrize("sizes", [(20, 192, 512, 64), (16, 128, 512, 64), (3, 24, 40, 10)])
def test_queries_are_absorbed(sizes: tuple[int, int, int, int], rows: int, dtype: torch.dtype) -> None:
    """By one launch for few rows, with the bits of products in one order and a launch after them."""
    heads, size, rank, rope = sizes
    queries = torch.randn(rows, heads, size + rope, device="cuda").to(dtype)
    key = (torch.randn(heads, size, rank, device="cuda") * size**-0.5).to(dtype)
    tokens, weight = (
        torch.randn(rows, 8 + rank + rope, device="cuda").to(dtype)[:, 8:],
        torch.rand(rank).to("cuda", dtype),
    )
    found = absorbed_heads(queries, key, tokens, weight, 1e-6, True, True)
    absorbed = head_products(queries[:, :, :size], key)
    assert torch.equal(found, latent_heads(absorbed, queries[:, :, size:], tokens, weight, 1e-6, True))
    exact = torch.einsum("tnk,nko->tno", queries[:, :, :size].double(), key.double())
    assert float((absorbed.double() - exact).norm() / exact.norm()) < (4e-3 if dtype == BFLOAT else 6e-4)


@pytest.mark.parametrize("kv_dtype", [BFLOAT, E4M3])
def test_paths_of_trees_are_moved(kv_dtype: torch.dtype) -> None:
    """One tensor holds keys and values."""
    cache = torch.randn(3, 5, 4, 1, 576).to(kv_dtype)
    source, target = torch.tensor([[4, 6, 7], [12, 13, 14]]), torch.tensor([[4, 5, 6], [12, 13, 14]])
    moved = cache.to(DEVICE)
    move_cache_rows(moved, None, source.to(DEVICE), target.to(DEVICE))
    move_cache_rows(cache, None, source, target)
    assert torch.equal(moved.cpu().view(torch.uint8), cache.view(torch.uint8))


@pytest.mark.parametrize("lengths", [[2500], [900, 30, 1500] * 16])
def test_100_launches_agree_bit_by_bit(lengths: list[int]) -> None:
    rows, scratch = on_gpu(rows_of(20, WHOLE, [(n, 4) for n in lengths], 16, BFLOAT)), scratch_of(20, WHOLE)
    first = latent_attention(*rows, SCALE, scratch)
    for _ in range(100):
        assert torch.equal(latent_attention(*rows, SCALE, scratch), first)
    assert bool(first.isfinite().all())


@pytest.mark.parametrize("width", [1, 4])
def test_queries_and_own_keys_are_read_after_the_wait(width: int) -> None:
    """Which the kernel before writes: until then the cache holds NaN there."""
    q, cache, rank, table, _, positions = on_gpu(rows_of(20, WHOLE, [(n, width) for n in (1020, 63, 0)], 16, BFLOAT))
    heads, cos_sin = torch.randn(len(q), 21, 576, device=DEVICE).to(BFLOAT), torch.randn(1100, 64, device=DEVICE)
    scratch, kind, before = scratch_of(20, WHOLE), (None, positions, SCALE), cache.clone()
    own = table.gather(1, positions.view(3, width) // 16).long().flatten() * 16 + positions % 16
    before.flatten(0, 2)[own] = torch.nan
    written = rope_latent_write(heads.clone(), rank, cos_sin, positions, table, cache)
    expected = latent_attention(written, cache, rank, table, *kind, scratch)
    for _ in range(20):
        cache.copy_(before)
        given = heads.clone()
        torch.cuda.synchronize()
        written = rope_latent_write(given, rank, cos_sin, positions, table, cache)
        found = latent_attention(written, cache, rank, table, *kind, scratch, None, NO_SCALES, True)
        assert torch.equal(found, expected)


@sync_mode_warns
@pytest.mark.parametrize("width", [1, 4])
def test_it_is_captured_and_asks_nothing_of_the_host(width: int) -> None:
    """A replay follows new positions: from tiles of one piece to tiles of many."""
    rows, scratch = on_gpu(rows_of(20, WHOLE, [(n, width) for n in (2900, 700)], 16, BFLOAT)), scratch_of(20, WHOLE)
    wanted, positions = latent_attention(*rows, SCALE, scratch), rows[5].clone()
    torch.cuda.synchronize()
    with synchronization_is_an_error():
        latent_attention(*rows, SCALE, scratch)
    rows[5].copy_(positions % 50)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = latent_attention(*rows, SCALE, scratch)
    rows[5].copy_(positions)
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)
