"""Attention of the rows of a tree: to a shared prefix through the page table, and to extra keys by a bit mask.

Every request has R rows and M extra keys:

    keys of a request    | places 0 .. prefix - 1, by page table | extra keys, by their cache rows |
    a row attends to       all (with a window, those near it)      those whose bit is set
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.attention._tree_attention_gluon import tiles_for
from overlap_spec_kernels.attention._tree_attention_kernel import tree_attention_kernel
from overlap_spec_kernels.attention.decode_attention import DecodeScratch
from overlap_spec_kernels.attention.dense_attention import dense_attention
from overlap_spec_kernels.attention.kv_format import NO_SCALES, KVScales, fits_cache
from overlap_spec_kernels.attention.paged_attention import require_sinks
from overlap_spec_kernels.launch import ceil_div, dependent_launch, next_power_of_2, require, runs_triton
from overlap_spec_kernels.limits import MASK_BITS, MAX_GROUP, MAX_TREE_WIDTH

_SHARED_M = 64  # rows times heads of a tile with split keys: the scratch has room for so many
_MAX_BLOCK_M = 128  # the same for a tile that takes all keys
_MIN_BLOCK_M = 32  # the smallest tile, where programs are few
_BLOCK_BYTES = 16384  # of K, and of V, in one block
_MAX_BLOCK_E = 32  # extra keys of a block
_KEYS_PER_SPLIT = 4  # per row of a tile: combining a split costs about as much as reading that many keys
_STAGES = 2  # blocks of the prefix that are loading at once
_COMBINED_AT_ONCE = 8192  # elements of the splits' outputs that a program holds while it combines them
_WIDE_HEAD = 256  # columns; larger heads have the smallest tiles
_LOG2_E = 1.4426950408889634


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    prefix: Tensor,
    extra_rows: Tensor,
    mask: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    scratch: DecodeScratch | None = None,
    scales: KVScales = NO_SCALES,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q K^T * scale) V over places 0..prefix[b] - 1 and those of the M extra keys whose bit is set.

    Row b R + r of q sees extra key j, which lies in cache row extra_rows[b, j], if bit j % 64 of
    mask[b, r, j // 64] is set; bits from M on are not read. With a window, of the prefix it sees the places p with
    positions[b R + r] - p < window; the extra keys are as near as the mask has them. A row that sees nothing is 0.
    sinks: a logit of each head that takes part in its softmax and adds nothing.
    Page-table entries beyond the prefix, and extra rows that no row of a request sees, are never followed. Scores,
    softmax and sums are float32 (float64 for float64). scratch: of `decode_attention`; without it, memory for splits
    of the keys is allocated and cleared.
    Shapes: q [B * R, nq, d], caches [num_pages, page_size, nkv, d], page_table [B, P] i32, prefix [B] i64, extra_rows
    [B, M] i64, mask [B, R, ceil(M / 64)] i64, positions [B * R] i64, sinks [nq] -> [B * R, nq, d]. Raises: ValueError
    naming the argument. Sync: never on CUDA.
    """
    num_rows, num_heads, head_dim = q.shape
    num_requests = page_table.shape[0]
    require(q.stride(2) == 1, "q", "a contiguous last dimension")
    require(k_cache.dim() == 4 and k_cache.is_contiguous(), "k_cache", "[num_pages, page_size, nkv, d], contiguous")
    require(k_cache.shape[3] == head_dim, "k_cache", "the head dimension of q")
    require(fits_cache(q.dtype, k_cache), "k_cache", "the dtype of q, or 8 bits")
    require(v_cache.shape == k_cache.shape and v_cache.is_contiguous(), "v_cache", "the shape of k_cache, contiguous")
    require(v_cache.dtype == k_cache.dtype, "v_cache", "the dtype of k_cache")
    group, rest = divmod(num_heads, k_cache.shape[2])
    require(rest == 0 and 1 <= group <= MAX_GROUP, "q", "1 to 16 query heads for each head of the cache")
    require(page_table.dim() == 2 and page_table.dtype == torch.int32, "page_table", "[B, P] int32")
    require(page_table.stride(1) == 1, "page_table", "a contiguous last dimension")
    width, rest = divmod(num_rows, num_requests)
    require(rest == 0 and 1 <= width <= MAX_TREE_WIDTH, "q", "the same 1 to 64 rows for each row of page_table")
    require(prefix.shape == (num_requests,) and prefix.dtype == torch.int64, "prefix", "[B] int64")
    require(extra_rows.dim() == 2 and extra_rows.shape[0] == num_requests, "extra_rows", "[B, M]")
    num_extra = extra_rows.shape[1]
    require(extra_rows.dtype == torch.int64 and num_extra >= 1, "extra_rows", "int64, at least one column")
    require(mask.shape == (num_requests, width, ceil_div(num_extra, MASK_BITS)), "mask", "[B, R, ceil(M / 64)]")
    require(mask.dtype == torch.int64, "mask", "int64")
    require(positions.shape == (num_rows,) and positions.dtype == torch.int64, "positions", "[B * R] int64")
    for name, value in {"prefix": prefix, "extra_rows": extra_rows, "mask": mask, "positions": positions}.items():
        require(value.is_contiguous(), name, "contiguous")
    require(window is None or window >= 1, "window", "at least 1")
    padded = _padded(head_dim)
    require(scratch is None or scratch.outputs.shape[1] >= padded, "scratch", "room for the head dimension, padded")
    require_sinks(sinks, num_heads)
    rows = (q, k_cache, v_cache, page_table, prefix, extra_rows, mask, positions)
    if runs_triton(q):
        return _tree_attention_triton(*rows, scale, window, scratch, scales, sinks)
    return tree_attention_reference(*rows, scale, window, scales, sinks)


def tree_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    prefix: Tensor,
    extra_rows: Tensor,
    mask: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend request by request. Sync: reads prefix, mask and positions on the host."""
    num_extra, out = extra_rows.shape[1], q.new_empty(*q.shape[:2], v_cache.shape[3])
    bit = torch.arange(num_extra, device=q.device)
    seen = (mask[:, :, bit // MASK_BITS] >> (bit % MASK_BITS) & 1).bool()  # [B, R, M]
    rows = zip(out.chunk(len(prefix)), q.chunk(len(prefix)), positions.chunk(len(prefix)), strict=True)
    for request, (target, queries, at) in enumerate(rows):
        places = _visible_places(int(prefix[request]), at, window)
        pages = page_table[request].long()[places // k_cache.shape[1]]
        read = seen[request].any(0)
        cache_rows = torch.cat((pages * k_cache.shape[1] + places % k_cache.shape[1], extra_rows[request, read]))
        near = torch.ones_like(places, dtype=torch.bool).expand(len(at), -1)
        near = near if window is None else at[:, None] - places < window
        visible = torch.cat((near, seen[request][:, read]), dim=1)
        k, v = (cache.flatten(0, 1)[cache_rows].to(q.dtype) for cache in (k_cache, v_cache))
        attended = _attend(queries, k, v, visible, scale * scales.k, sinks)
        target.copy_(attended if scales.v == 1.0 else attended * scales.v)
    return out


def _visible_places(prefix: int, positions: Tensor, window: int | None) -> Tensor:
    """Places of the prefix that some row attends to. Shapes: positions [R] -> [n] i64."""
    first = 0 if window is None else min(max(int(positions.min()) - window + 1, 0), prefix)
    return torch.arange(first, prefix, device=positions.device)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """Zero for a row that sees nothing. Shapes: q [R, nq, d], k, v [n, nkv, d], visible [R, n] -> [R, nq, d]."""
    if not k.shape[0]:
        return q.new_zeros(*q.shape[:2], v.shape[2])
    return dense_attention(q, k, v, visible, scale, sinks).masked_fill(~visible.any(1)[:, None, None], 0)


def _padded(head_dim: int) -> int:
    """`head_dim` padded to a power of two, no smaller than a side of a tensor-core product."""
    return max(next_power_of_2(head_dim), 16)


class _Tiling(NamedTuple):
    """How the rows, heads and keys of a request are divided among programs, chosen from shapes alone."""

    rows: int  # rows of a tile
    block_m: int  # rows times query heads of a KV head, padded
    block_n: int  # keys of the prefix read at once
    num_tiles: int
    num_splits: int


def _tiling(q: Tensor, k_cache: Tensor, page_table: Tensor, num_programs: int, window: int | None) -> _Tiling:
    """Take the largest tiles that still give the whole GPU programs; then split the keys to fill what is left."""
    num_requests, (_, page_size, num_kv_heads, head_dim) = page_table.shape[0], k_cache.shape
    width, group = q.shape[0] // num_requests, q.shape[1] // num_kv_heads
    full_m = max(next_power_of_2(width * group), 16)

    def tiles(block_m: int) -> tuple[int, int]:
        rows = min(block_m // group, width)
        return rows, ceil_div(width, rows)

    def units(block_m: int) -> int:
        return num_requests * num_kv_heads * tiles(block_m)[1]

    if q.dtype == torch.float32 or head_dim > _WIDE_HEAD:
        block_m = 16
    else:
        block_m = min(full_m, _SHARED_M)
        while block_m > _MIN_BLOCK_M and units(block_m) < num_programs // 8:
            block_m //= 2
        if full_m >= _MAX_BLOCK_M and units(block_m) > num_programs:
            block_m = _MAX_BLOCK_M
    block_bytes = _BLOCK_BYTES // 2 if q.dtype == torch.float32 else _BLOCK_BYTES
    block_n = min(max(block_bytes // (_padded(head_dim) * q.element_size()), 16), 64)
    capacity = page_table.shape[1] * page_size
    most_splits = ceil_div(capacity if window is None else min(capacity, window + width), _KEYS_PER_SPLIT * block_m)
    if num_requests == 1:
        num_programs = max(num_programs // 2, 1)  # one request has enough splits; idle programs would slow it down
    num_splits = min(num_programs // units(block_m), most_splits) if block_m <= _SHARED_M else 1
    return _Tiling(tiles(block_m)[0], block_m, block_n, tiles(block_m)[1], max(num_splits, 1))


def _tree_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    prefix: Tensor,
    extra_rows: Tensor,
    mask: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    scratch: DecodeScratch | None = None,
    scales: KVScales = NO_SCALES,
    sinks: Tensor | None = None,
) -> Tensor:
    (num_rows, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q.shape, k_cache.shape
    num_requests, block_d = page_table.shape[0], _padded(head_dim)
    scratch = scratch or DecodeScratch.allocate(block_d, q.device)
    num_programs = scratch.counters.shape[0]
    tiles = None
    if window is None and sinks is None:
        tiles = tiles_for(q, k_cache, v_cache, page_table, extra_rows.shape[1], scale, num_programs)
    if tiles is not None:
        return tiles.run(q, k_cache, v_cache, page_table, prefix, extra_rows, mask, scale * _LOG2_E)
    tiling = _tiling(q, k_cache, page_table, num_programs, window)
    out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    tree_attention_kernel[(num_kv_heads * tiling.num_splits, num_requests, tiling.num_tiles)](
        *(q, k_cache, v_cache, page_table, prefix, extra_rows, mask, positions, out),
        *(scratch.outputs, scratch.weights, scratch.counters, positions if sinks is None else sinks),
        *(scale * scales.k * _LOG2_E, scales.v, q.stride(0), q.stride(1), page_table.stride(0)),
        *(num_rows // num_requests, extra_rows.shape[1], tiling.num_splits),
        TILE_ROWS=tiling.rows,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_E=min(tiling.block_n, _MAX_BLOCK_E),
        BLOCK_D=block_d,
        KEYS_PER_SPLIT=_KEYS_PER_SPLIT * tiling.block_m,
        COMBINED=max(_COMBINED_AT_ONCE // (tiling.block_m * block_d), 1),
        WINDOW=window or 0,
        SINKS=sinks is not None,
        num_warps=8 if q.dtype == torch.float32 or tiling.block_m > _SHARED_M or head_dim > _WIDE_HEAD else 4,
        num_stages=1 if q.dtype == torch.float32 and head_dim > _WIDE_HEAD else _STAGES,
        **dependent_launch(q.device, num_rows),
    )
    return out
