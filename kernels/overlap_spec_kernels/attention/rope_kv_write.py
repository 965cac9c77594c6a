"""Rotary position embedding of q and k, and the write of k and v into the paged cache, in one pass.

The halves of a head are rotated against each other (Llama, GPT-NeoX). For each head x of a row at position p:

    (x1, x2) -> (x1 * cos[p] - x2 * sin[p],  x2 * cos[p] + x1 * sin[p])
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.attention.kv_format import NO_SCALES, KVScales, fits_cache, to_cache, write_rows
from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton

_HEADS_PER_PROGRAM = 8


def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: KVScales = NO_SCALES,
) -> Tensor:
    """Rotate q and k, write k and v into their cache rows, return the rotated q.

    q, k and v may be views of one fused projection. Cache row = page * page_size + offset. Caches of 8 bits hold k
    and v divided by their scale and rounded (`kv_format`).
    Shapes: q [T, nq, d], k, v [T, nkv, d], cos_sin [P, d] (cos, then sin; float32 or float64), positions and
    cache_rows [T] i64, caches [num_pages, page_size, nkv, d] -> [T, nq, d].
    Raises: ValueError naming the argument. Sync: never.
    """
    num_rows, _, head_dim = q.shape
    require(head_dim % 2 == 0 and q.stride(2) == 1, "q", "[T, nq, d], d even, with a contiguous last dimension")
    kv_shape = (num_rows, k_cache.shape[2], head_dim)
    require(k.shape == kv_shape and k.stride(2) == 1, "k", "[T, nkv, d] with a contiguous last dimension")
    require(v.shape == kv_shape and v.stride(2) == 1, "v", "[T, nkv, d] with a contiguous last dimension")
    require(cos_sin.dim() == 2 and cos_sin.shape[1] == head_dim and cos_sin.is_contiguous(), "cos_sin", "[P, d]")
    require(positions.shape == (num_rows,) and positions.dtype == torch.int64, "positions", "[T] int64")
    require(cache_rows.shape == (num_rows,) and cache_rows.dtype == torch.int64, "cache_rows", "[T] int64")
    require(k_cache.shape[3] == head_dim and k_cache.is_contiguous(), "k_cache", "[num_pages, page_size, nkv, d]")
    require(v_cache.shape == k_cache.shape and v_cache.is_contiguous(), "v_cache", "the shape of k_cache, contiguous")
    require(fits_cache(q.dtype, k_cache), "k_cache", "the dtype of q, or 8 bits")
    require(v_cache.dtype == k_cache.dtype, "v_cache", "the dtype of k_cache")
    if runs_triton(q):
        return _rope_kv_write_triton(q, k, v, cos_sin, positions, cache_rows, k_cache, v_cache, scales)
    return rope_kv_write_reference(q, k, v, cos_sin, positions, cache_rows, k_cache, v_cache, scales)


def rope_kv_write_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: KVScales = NO_SCALES,
) -> Tensor:
    rotated = rotate_heads(torch.cat((q, k), dim=1), cos_sin, positions)  # one rotation for both
    write_rows(k_cache, cache_rows, rotated[:, q.shape[1] :], scales.k)
    write_rows(v_cache, cache_rows, v, scales.v)
    return rotated[:, : q.shape[1]]


def rotate_heads(heads: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """The rotation alone, in torch. Shapes: heads [T, n, d], cos_sin [P, d], positions [T] i64 -> [T, n, d]."""
    half = heads.shape[2] // 2
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).split(half, dim=-1)
    first, second = heads.split(half, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def _rope_kv_write_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    places: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: KVScales = NO_SCALES,
) -> Tensor:
    """places: cache rows, or the pages [P] i32 of one request that all rows belong to. k and v may have no heads."""
    (num_rows, num_q_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    out = torch.empty((num_rows, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    q_groups = ceil_div(num_q_heads, _HEADS_PER_PROGRAM)
    kv_groups = ceil_div(num_kv_heads, _HEADS_PER_PROGRAM)
    _rope_kv_write_kernel[(num_rows, q_groups + kv_groups)](
        q,
        k,
        v,
        cos_sin,
        positions,
        places,
        out,
        k_cache,
        v_cache,
        1.0 / scales.k,
        1.0 / scales.v,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        num_q_heads,
        num_kv_heads,
        q_groups,
        HALF=head_dim // 2,
        BLOCK_HALF=next_power_of_2(head_dim // 2),
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        PAGE_SIZE=k_cache.shape[1] if places.dtype == torch.int32 else 0,
        num_warps=4,
        **dependent_launch(q.device, num_rows),
    )
    return out


@TritonKernel
def _rope_kv_write_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, cos_sin_ptr: tl.tensor, positions_ptr: tl.tensor,
    places_ptr: tl.tensor, out_ptr: tl.tensor, k_cache_ptr: tl.tensor, v_cache_ptr: tl.tensor,
    inverse_k: float, inverse_v: float, q_row_stride: int, q_head_stride: int, k_row_stride: int, k_head_stride: int,
    v_row_stride: int, v_head_stride: int, num_q_heads: int, num_kv_heads: int, q_groups: int,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row and group of heads: q's groups first, then those of k and v. PAGE_SIZE: places are pages.

    Loads that do not depend on the position are issued before it arrives.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    column = tl.arange(0, BLOCK_HALF)[None, :]
    wait_for_inputs(PDL)
    position = tl.load(positions_ptr + row)
    if PAGE_SIZE:
        cache_row = tl.load(places_ptr + position // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
    else:
        cache_row = tl.load(places_ptr + row)
    is_q = group < q_groups
    head = tl.where(is_q, group, group - q_groups) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    inside = (head < tl.where(is_q, num_q_heads, num_kv_heads)) & (column < HALF)
    if is_q:
        source = q_ptr + row * q_row_stride + head * q_head_stride + column
    else:
        source = k_ptr + row * k_row_stride + head * k_head_stride + column
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    copied = inside & (group >= q_groups)
    v_source = v_ptr + row * v_row_stride + head * v_head_stride + column
    v_first, v_second = tl.load(v_source, mask=copied), tl.load(v_source + HALF, mask=copied)
    angle_ptr = cos_sin_ptr + position * (2 * HALF) + column
    cos = tl.load(angle_ptr, mask=column < HALF, other=0.0).to(tl.float32)
    sin = tl.load(angle_ptr + HALF, mask=column < HALF, other=0.0).to(tl.float32)
    cache_offset = (cache_row * num_kv_heads + head) * (2 * HALF) + column
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    kept: tl.constexpr = k_cache_ptr.dtype.element_ty
    tl.store(v_cache_ptr + cache_offset, to_cache(v_first, inverse_v, kept), mask=copied)
    tl.store(v_cache_ptr + cache_offset + HALF, to_cache(v_second, inverse_v, kept), mask=copied)
    # Fused as they are in `ordered_windows`, whatever the compiler would fuse.
    rotated_first = tl.fma(first, cos, -(second * sin)).to(dtype)
    rotated_second = tl.fma(second, cos, first * sin).to(dtype)
    if is_q:
        target = out_ptr + (row * num_q_heads + head) * (2 * HALF) + column
        tl.store(target, rotated_first, mask=inside)
        tl.store(target + HALF, rotated_second, mask=inside)
    else:
        tl.store(k_cache_ptr + cache_offset, to_cache(rotated_first, inverse_k, kept), mask=inside)
        tl.store(k_cache_ptr + cache_offset + HALF, to_cache(rotated_second, inverse_k, kept), mask=inside)
