"""Copies the K and V of consecutive places of one request out of their pages, into tensors without gaps."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, ceil_div, next_power_of_2, require, runs_triton, warps_for

_BLOCK = 4096  # elements of K, and of V, that a program copies at once


def gather_keys(
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    first: int,
    end: int,
    num_keys: int,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """K and V of places first..end - 1 of the request with these pages, then zeros up to `num_keys` rows.

    Pages of other places are not followed. dtype: of the results, if not that of the caches; scales are not applied.
    Shapes: caches [num_pages, page_size, nkv, d], pages [P] i32 -> [num_keys, nkv, d] twice. Raises: ValueError naming
    the argument. Sync: never.
    """
    require(k_cache.dim() == 4 and k_cache.is_contiguous(), "k_cache", "[num_pages, page_size, nkv, d], contiguous")
    require(v_cache.shape == k_cache.shape and v_cache.is_contiguous(), "v_cache", "the shape of k_cache, contiguous")
    require(v_cache.dtype == k_cache.dtype, "v_cache", "the dtype of k_cache")
    require(pages.dim() == 1 and pages.dtype == torch.int32 and pages.stride(0) == 1, "pages", "[P] int32, contiguous")
    require(0 <= first <= end <= pages.shape[0] * k_cache.shape[1], "end", "a place that the pages have")
    require(num_keys >= end - first, "num_keys", "at least end - first")
    run = _gather_keys_triton if runs_triton(k_cache) else gather_keys_reference
    return run(k_cache, v_cache, pages, first, end, num_keys, dtype)


def gather_keys_reference(
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    first: int,
    end: int,
    num_keys: int,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    page_size, places = k_cache.shape[1], torch.arange(first, end, device=pages.device)
    rows = pages[places // page_size].long() * page_size + places % page_size
    k, v = (cache.new_zeros((num_keys, *cache.shape[2:]), dtype=dtype) for cache in (k_cache, v_cache))
    for gathered, cache in ((k, k_cache), (v, v_cache)):
        gathered[: end - first] = cache.flatten(0, 1)[rows].to(gathered.dtype)
    return k, v


def _gather_keys_triton(
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    first: int,
    end: int,
    num_keys: int,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    row_size = num_kv_heads * head_dim
    k, v = (cache.new_empty((num_keys, num_kv_heads, head_dim), dtype=dtype) for cache in (k_cache, v_cache))
    block_c = min(next_power_of_2(row_size), _BLOCK)
    block_r = _BLOCK // block_c
    _gather_keys_kernel[(ceil_div(num_keys, block_r), ceil_div(row_size, block_c))](
        k_cache,
        v_cache,
        pages,
        k,
        v,
        first,
        end,
        num_keys,
        ROW_SIZE=row_size,
        PAGE_SIZE=page_size,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=warps_for(_BLOCK),
    )
    return k, v


@TritonKernel.with_options(do_not_specialize=("pages_ptr", "first", "end", "num_keys"))
def _gather_keys_kernel(
    k_cache_ptr: tl.tensor, v_cache_ptr: tl.tensor, pages_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor,
    first: int, end: int, num_keys: int, ROW_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:  # fmt: skip
    """Program (rows, part of a row)."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    place = first + row
    page = tl.load(pages_ptr + place // PAGE_SIZE, mask=place < end, other=0).to(tl.int64)
    source = ((page * PAGE_SIZE + place % PAGE_SIZE) * ROW_SIZE)[:, None] + column[None, :]
    target = (row.to(tl.int64) * ROW_SIZE)[:, None] + column[None, :]
    inside = (column < ROW_SIZE)[None, :]
    live, written = (place < end)[:, None] & inside, (row < num_keys)[:, None] & inside
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    tl.store(k_ptr + target, tl.load(k_cache_ptr + source, mask=live, other=0.0).to(dtype), mask=written)
    tl.store(v_ptr + target, tl.load(v_cache_ptr + source, mask=live, other=0.0).to(dtype), mask=written)
