"""Rotary position embedding of latent attention, and the write of a token's row into the paged cache, in one pass.

    heads of a row   | n queries, then the row itself |      each: `rank` columns as they are | rotated columns

Halves are rotated against each other, as in `rope_kv_write`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.attention.kv_format import fits_cache, to_cache, write_rows
from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton

_HEADS_PER_PROGRAM = 8


def rope_latent_write(
    heads: Tensor, rank: int, cos_sin: Tensor, positions: Tensor, places: Tensor, cache: Tensor, scale: float = 1.0
) -> Tensor:
    """Rotate queries in place, write each row's last head, rotated, into its cache row. Returns the queries, a view.

    `places`: the cache row of each row; or the pages of B requests that have T / B rows each, in order, whose cache
    rows follow from their positions. A cache of 8 bits holds the row divided by `scale` and rounded (`kv_format`).
    Shapes: heads [T, n + 1, rank + rope], n >= 0, cos_sin [P, rope] (cos, then sin; float32 or float64), positions [T]
    i64, places [T] i64 or [B, P] i32, cache [num_pages, page_size, 1, rank + rope] -> [T, n, rank + rope]. Raises:
    ValueError naming the argument. Sync: never.
    """
    num_rows, _, head_dim = heads.shape
    rope = head_dim - rank
    require(heads.stride(2) == 1 and rope > 0 and rope % 2 == 0, "heads", "[T, n + 1, rank + rope], rope even")
    require(cos_sin.dim() == 2 and cos_sin.shape[1] == rope and cos_sin.is_contiguous(), "cos_sin", "[P, rope]")
    require(positions.shape == (num_rows,) and positions.dtype == torch.int64, "positions", "[T] int64")
    if places.dim() == 2:
        require(places.dtype == torch.int32 and places.stride(1) == 1, "places", "[B, P] int32, dense rows")
        require(len(places) > 0 and num_rows % len(places) == 0, "places", "requests with as many rows each")
    else:
        require(places.shape == (num_rows,) and places.dtype == torch.int64, "places", "[T] int64")
    require(cache.shape[2:] == (1, head_dim) and cache.is_contiguous(), "cache", "[num_pages, page_size, 1, d]")
    require(fits_cache(heads.dtype, cache), "cache", "the dtype of heads, or 8 bits")
    run = _rope_latent_write_triton if runs_triton(heads) else rope_latent_write_reference
    return run(heads, rank, cos_sin, positions, places, cache, scale)


def rope_latent_write_reference(
    heads: Tensor, rank: int, cos_sin: Tensor, positions: Tensor, places: Tensor, cache: Tensor, scale: float = 1.0
) -> Tensor:
    cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
    first, second = heads[:, :, rank:].chunk(2, dim=2)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)
    heads[:, :, rank:] = turned.to(heads.dtype)
    write_rows(cache, _cache_rows(positions, places, cache.shape[1]), heads[:, -1:], scale)
    return heads[:, :-1]


def _cache_rows(positions: Tensor, places: Tensor, page_size: int) -> Tensor:
    """Shapes: -> [T] i64."""
    if places.dim() == 1:
        return places
    pages = places.gather(1, positions.view(len(places), -1) // page_size).long()
    return pages.flatten() * page_size + positions % page_size


def _rope_latent_write_triton(
    heads: Tensor, rank: int, cos_sin: Tensor, positions: Tensor, places: Tensor, cache: Tensor, scale: float = 1.0
) -> Tensor:
    num_rows, num_heads, head_dim = heads.shape
    half = (head_dim - rank) // 2
    _rope_latent_write_kernel[(num_rows, ceil_div(num_heads, _HEADS_PER_PROGRAM))](
        *(heads, cos_sin, positions, places, cache, 1.0 / scale, *heads.stride()[:2], num_heads),
        *(places.stride(0), num_rows // len(places)),
        PAGE_SIZE=cache.shape[1],
        PAGED=places.dim() == 2,
        RANK=rank,
        HALF=half,
        BLOCK_R=next_power_of_2(rank),
        BLOCK_HALF=next_power_of_2(half),
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        num_warps=4,
        **dependent_launch(heads.device, num_rows),
    )
    return heads[:, :-1]


@TritonKernel
def _rope_latent_write_kernel(
    heads_ptr: tl.tensor, cos_sin_ptr: tl.tensor, positions_ptr: tl.tensor, places_ptr: tl.tensor,
    cache_ptr: tl.tensor, inverse_scale: float, row_stride: int, head_stride: int, num_heads: int, table_stride: int,
    width: int, PAGE_SIZE: tl.constexpr, PAGED: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row and group of heads; the last head, in the last group, goes to the cache as well."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_HALF)
    wait_for_inputs(PDL)
    position = tl.load(positions_ptr + row)
    if PAGED:
        page = tl.load(places_ptr + row // width * table_stride + position // PAGE_SIZE).to(tl.int64)
        cache_row = page * PAGE_SIZE + position % PAGE_SIZE
    else:
        cache_row = tl.load(places_ptr + row)
    inside = (head < num_heads)[:, None] & (column < HALF)[None, :]
    source = heads_ptr + row * row_stride + head[:, None] * head_stride + RANK + column[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    angle_ptr = cos_sin_ptr + position * (2 * HALF) + column
    cos = tl.load(angle_ptr, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle_ptr + HALF, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    dtype: tl.constexpr = heads_ptr.dtype.element_ty
    kept: tl.constexpr = cache_ptr.dtype.element_ty
    rotated_first = (first * cos - second * sin).to(dtype)
    rotated_second = (second * cos + first * sin).to(dtype)
    tl.store(source, rotated_first, mask=inside)
    tl.store(source + HALF, rotated_second, mask=inside)
    target_ptr = cache_ptr + cache_row * (RANK + 2 * HALF)
    target = target_ptr + RANK + column[None, :] + tl.zeros([BLOCK_HEADS, 1], tl.int32)
    is_row = inside & (head == num_heads - 1)[:, None]
    tl.store(target, to_cache(rotated_first, inverse_scale, kept), mask=is_row)
    tl.store(target + HALF, to_cache(rotated_second, inverse_scale, kept), mask=is_row)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        latent = tl.arange(0, BLOCK_R)
        x = tl.load(heads_ptr + row * row_stride + (num_heads - 1) * head_stride + latent, mask=latent < RANK)
        tl.store(target_ptr + latent, to_cache(x, inverse_scale, kept), mask=latent < RANK)
