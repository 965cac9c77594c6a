"""Seeded random arguments for the ops that read or write a paged cache.

Tests and the benchmark share them. Pages are shuffled over the pool, page 0 belongs to nobody, and every cache row
that no request owns holds NaN: whoever reads one shows it.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from overlap_spec_kernels.launch import ceil_div
from torch import Tensor


class HeadShape(NamedTuple):
    """Heads of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class AttentionInputs(NamedTuple):
    """Arguments of `paged_attention`, in its order."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    row_starts: Tensor
    positions: Tensor
    max_rows: int
    scale: float
    uniform: bool


class RopeInputs(NamedTuple):
    """Arguments of `rope_kv_write`, in its order; q, k and v are views of one fused projection."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos_sin: Tensor
    positions: Tensor
    cache_rows: Tensor
    k_cache: Tensor
    v_cache: Tensor


class DecodeInputs(NamedTuple):
    """Arguments of `decode_attention` but for its scratch, in its order."""

    qkv: Tensor
    cos_sin: Tensor
    positions: Tensor
    page_table: Tensor
    k_cache: Tensor
    v_cache: Tensor
    scale: float


class TreeInputs(NamedTuple):
    """Arguments of `tree_attention`, in its order, but for the window and scratch."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    prefix: Tensor
    extra_rows: Tensor
    mask: Tensor
    positions: Tensor
    scale: float


def attention_inputs(
    heads: HeadShape, requests: list[tuple[int, int]], page_size: int, dtype: torch.dtype, spare_pages: int = 2
) -> AttentionInputs:
    """Draw one forward's arguments on the CPU.

    `requests` are (first position, rows) pairs; `spare_pages` are page-table columns beyond the longest request.
    """
    lengths = [first + rows for first, rows in requests]
    page_table = _shuffled_page_table(lengths, page_size, spare_pages)
    rows = torch.tensor([rows for _, rows in requests])
    positions = torch.cat([torch.arange(first, first + count) for first, count in requests])
    owned = torch.cat([_cache_rows(page_table[b], torch.arange(n), page_size) for b, n in enumerate(lengths)])
    pool = (int(page_table.max()) + 1, page_size, heads.num_kv_heads, heads.head_dim)
    return AttentionInputs(
        q=torch.randn(len(positions), heads.num_heads, heads.head_dim).to(dtype),
        k_cache=_random_cache(pool, owned, dtype),
        v_cache=_random_cache(pool, owned, dtype),
        page_table=page_table,
        row_starts=torch.cat((torch.zeros(1), rows.cumsum(0))).to(torch.int32),
        positions=positions,
        max_rows=int(rows.max()),
        scale=heads.head_dim**-0.5,
        uniform=len(set(rows.tolist())) == 1,
    )


def rope_inputs(heads: HeadShape, num_rows: int, page_size: int, dtype: torch.dtype) -> RopeInputs:
    """Draw one forward's arguments on the CPU: one request, starting in the middle of its second page."""
    positions = torch.arange(num_rows) + page_size + page_size // 2
    page_table = _shuffled_page_table([int(positions[-1]) + 1], page_size, spare_pages=0)
    pool = (int(page_table.max()) + 1, page_size, heads.num_kv_heads, heads.head_dim)
    counts = heads.num_heads, heads.num_kv_heads, heads.num_kv_heads
    fused = torch.randn(num_rows, sum(counts) * heads.head_dim).to(dtype)
    q, k, v = fused.view(num_rows, sum(counts), heads.head_dim).split(counts, dim=1)
    cos_sin = _random_angles(int(positions[-1]) + 1, heads.head_dim, dtype)
    rows = _cache_rows(page_table[0], positions, page_size)
    return RopeInputs(q, k, v, cos_sin, positions, rows, torch.zeros(pool, dtype=dtype), torch.zeros(pool, dtype=dtype))


def decode_inputs(
    heads: HeadShape, width: int, lengths: list[int], page_size: int, dtype: torch.dtype, spare_pages: int = 2
) -> DecodeInputs:
    """Draw one decode step's arguments on the CPU: requests with `lengths` keys in the cache, `width` new rows each.

    The cache rows of the new rows hold NaN too: they may be read only by the program that wrote them.
    """
    attention = attention_inputs(heads, [(length, width) for length in lengths], page_size, dtype, spare_pages)
    starts = attention.row_starts.tolist()
    for request, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
        new = _cache_rows(attention.page_table[request], attention.positions[begin:end], page_size)
        for cache in (attention.k_cache, attention.v_cache):
            cache.flatten(0, 1)[new] = torch.nan
    num_columns = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    return DecodeInputs(
        qkv=torch.randn(len(attention.positions), num_columns).to(dtype),
        cos_sin=_random_angles(max(lengths) + width, heads.head_dim, dtype),
        positions=attention.positions,
        page_table=attention.page_table,
        k_cache=attention.k_cache,
        v_cache=attention.v_cache,
        scale=attention.scale,
    )


def tree_inputs(
    heads: HeadShape,
    width: int,
    num_extra: int,
    prefixes: list[int],
    page_size: int,
    dtype: torch.dtype,
    spare_pages: int = 2,
) -> TreeInputs:
    """Draw the arguments of one layer on the CPU: each row sees about a third of the extra keys, the last row none.

    Extra keys lie after the prefix, in any order; the cache rows of those that no row sees hold NaN.
    """
    attention = attention_inputs(heads, [(prefix, num_extra) for prefix in prefixes], page_size, dtype, spare_pages)
    seen = torch.rand(len(prefixes), width, num_extra) < 1 / 3
    seen[:, -1] = False
    words = F.pad(seen, (0, -num_extra % 64)).unflatten(2, (-1, 64))
    bits = torch.ones(64, dtype=torch.int64) << torch.arange(64)
    rows = [
        _cache_rows(pages, places[torch.randperm(num_extra)], page_size)
        for pages, places in zip(attention.page_table, attention.positions.view(len(prefixes), -1), strict=True)
    ]
    extra_rows = torch.stack(rows)
    for cache in (attention.k_cache, attention.v_cache):
        cache.flatten(0, 1)[extra_rows[~seen.any(1)]] = torch.nan
    depths = torch.randint(0, width, (len(prefixes), width))
    return TreeInputs(
        q=torch.randn(len(prefixes) * width, heads.num_heads, heads.head_dim).to(dtype),
        k_cache=attention.k_cache,
        v_cache=attention.v_cache,
        page_table=attention.page_table,
        prefix=torch.tensor(prefixes),
        extra_rows=extra_rows,
        mask=(words * bits).sum(3),
        positions=(torch.tensor(prefixes)[:, None] + depths).flatten(),
        scale=attention.scale,
    )


def to_device(value: object, device: str) -> object:
    """A tensor moved there; a view keeps its strides. Anything else unchanged."""
    if not isinstance(value, Tensor):
        return value
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return moved.copy_(value)


def _shuffled_page_table(lengths: list[int], page_size: int, spare_pages: int) -> Tensor:
    """Pages 1.. in random order, 0 where a request owns none. Shapes: -> [B, P] i32."""
    counts = [ceil_div(length, page_size) for length in lengths]
    pages = torch.randperm(sum(counts)) + 1
    table = torch.zeros(len(lengths), max(counts) + spare_pages, dtype=torch.int32)
    for row, own in zip(table, pages.split(counts), strict=True):
        row[: len(own)] = own
    return table


def _cache_rows(pages: Tensor, positions: Tensor, page_size: int) -> Tensor:
    return pages[positions // page_size].long() * page_size + positions % page_size


def _random_angles(num_positions: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Cosines, then sines. Shapes: -> [num_positions, d], float32 unless dtype is float64."""
    angles = torch.rand(num_positions, head_dim // 2) * 6.28
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype if dtype == torch.float64 else torch.float32)


def _random_cache(pool: tuple[int, int, int, int], owned: Tensor, dtype: torch.dtype) -> Tensor:
    cache = torch.full(pool, torch.nan, dtype=dtype)
    cache.view(-1, *pool[2:])[owned] = torch.randn(len(owned), *pool[2:]).to(dtype)
    return cache
