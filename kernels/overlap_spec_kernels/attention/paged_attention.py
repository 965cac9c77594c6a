"""Causal attention of new rows to their own request's K and V, read through a page table.

Each request may have any number of rows, as in prefill and in steps with uneven or many rows. A program takes a tile of
rows of one request and all query heads that share a KV head, so K and V are read once for them:

    tile, 2 rows of a GQA group of 3        keys 0 .. p of the request
      m = 0 1 2 | 3 4 5   (row, head)       |- split 0 -|- split 1 -|- split 2 -|
                                             partial     partial     partial     -> combined per row and head

The launch grid comes from shapes alone (rows, heads, the capacity of a page table). The keys of a request are divided
among its splits on the device, by its length. So the host never waits, and a CUDA graph can capture the launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.attention._decode_attention_kernel import empty_softmax, softmax_of_sinks
from overlap_spec_kernels.attention.dense_attention import dense_attention
from overlap_spec_kernels.attention.kv_format import NO_SCALES, KVScales, fits_cache
from overlap_spec_kernels.attention.paged_chunks import CUT, Chunks, Cut, takes
from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, ceil_div, next_power_of_2, require, runs_triton

_MIN_DOT = 16  # the smallest side of a tensor-core product
_BLOCK_BYTES = 16384  # of K, and of V, in one block: two stages of both fit in the shared memory of any recent GPU
_PROGRAMS_PER_SM = 2  # the split count aims at this many, so that enough loads are in flight
_MAX_SPLITS = 64
_LARGE_TILE = 128  # rows times heads: on Hopper faster for many rows behind many keys
_LONG_CHUNK = 256  # rows
_FEW_REQUESTS = 16
_UNEVEN = 1.2  # of the best load of a multiprocessor: fewer splits have less to combine
_FEW_SPLITS = 8  # combining few splits is a kernel of its own; with more than two, one would be compiled in a step
_HEADS_AT_ONCE = 4  # of a row, whose few splits one program combines
_WIDE_HEAD = 256  # columns; tiles of larger heads (Gemma 4) are half as high, and have twice as many warps
_LOG2_E = 1.4426950408889634


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_starts: Tensor,
    positions: Tensor,
    max_rows: int,
    scale: float,
    uniform: bool,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q K^T * scale) V, where the row at position p attends to keys 0..p of its request.

    With a sliding window it attends to keys max(0, p - window + 1)..p (Beltagy et al. 2020, arXiv:2004.05150). Keys
    before the first row's window are not read.

    Rows row_starts[b]..row_starts[b + 1] - 1 belong to request b, at ascending positions. No request has more than
    max_rows rows; uniform: each has exactly max_rows. Entries of the page table beyond a request's last position
    are never followed. sinks: a logit of each head that takes part in its softmax and adds nothing. Scores, softmax
    and sums are float32 (float64 for float64).
    Shapes: q [T, nq, d], caches [num_pages, page_size, nkv, d], page_table [B, P] i32, row_starts [B + 1] i32,
    positions [T] i64, sinks [nq] -> [T, nq, d]. Raises: ValueError naming the argument. Sync: never on CUDA.
    """
    num_rows, num_heads, head_dim = q.shape
    require(q.stride(2) == 1, "q", "a contiguous last dimension")
    require(k_cache.dim() == 4 and k_cache.is_contiguous(), "k_cache", "[num_pages, page_size, nkv, d], contiguous")
    require(k_cache.shape[3] == head_dim, "k_cache", "the head dimension of q")
    require(fits_cache(q.dtype, k_cache), "k_cache", "the dtype of q, or 8 bits")
    require(v_cache.shape == k_cache.shape and v_cache.is_contiguous(), "v_cache", "the shape of k_cache, contiguous")
    require(v_cache.dtype == k_cache.dtype, "v_cache", "the dtype of k_cache")
    require(num_heads % k_cache.shape[2] == 0, "q", "a multiple of the cache's heads")
    require(page_table.dim() == 2 and page_table.dtype == torch.int32, "page_table", "[B, P] int32")
    require(page_table.stride(1) == 1, "page_table", "a contiguous last dimension")
    num_requests = page_table.shape[0]
    require(row_starts.shape == (num_requests + 1,) and row_starts.dtype == torch.int32, "row_starts", "[B + 1] int32")
    require(positions.shape == (num_rows,) and positions.dtype == torch.int64, "positions", "[T] int64")
    require(max_rows >= 1, "max_rows", "at least 1")
    require(not uniform or num_rows == num_requests * max_rows, "max_rows", "T / B where uniform")
    require(window is None or window >= 1, "window", "at least 1")
    require_sinks(sinks, num_heads)
    rows = (q, k_cache, v_cache, page_table, row_starts, positions)
    if runs_triton(q):
        chunks = Chunks(*rows, max_rows)
        if scales == NO_SCALES and takes(chunks, scale, window, sinks):
            return attend_to_chunks(chunks, scale)
        return _paged_attention_triton(*rows, max_rows, scale, None, window, scales, sinks)
    return paged_attention_reference(*rows, scale, window, scales, sinks)


def require_sinks(sinks: Tensor | None, num_heads: int) -> None:
    """Raises: ValueError if there are sinks, but not one of each head."""
    fits = sinks is None or (sinks.shape == (num_heads,) and sinks.is_floating_point() and sinks.is_contiguous())
    require(fits, "sinks", "[nq] floats, contiguous")


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_starts: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend request by request. Sync: reads row_starts, positions and page_table on the host."""
    starts = row_starts.tolist()
    outputs = []
    for request, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if begin == end:
            continue
        rows = positions[begin:end]
        first_key, num_keys = 0 if window is None else max(int(rows[0]) - window + 1, 0), int(rows[-1]) + 1
        first_page, offset = divmod(first_key, k_cache.shape[1])
        pages = page_table[request, first_page : ceil_div(num_keys, k_cache.shape[1])]
        k, v = _read_pages((k_cache, v_cache), pages, offset, offset + num_keys - first_key)
        seen = _seen(rows - first_key, k.shape[0], window)
        out = dense_attention(q[begin:end], k.to(q.dtype), v.to(q.dtype), seen, scale * scales.k, sinks)
        outputs.append(out if scales.v == 1.0 else out * scales.v)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs) if outputs else torch.empty_like(q)


def _read_pages(caches: tuple[Tensor, Tensor], pages: Tensor, begin: int, end: int) -> list[Tensor]:
    """Rows begin..end - 1 of the given pages; a view if the pages are consecutive."""
    first, count, page_size = int(pages[0]), pages.shape[0], caches[0].shape[1]
    if torch.equal(pages, torch.arange(first, first + count, dtype=pages.dtype, device=pages.device)):
        start = first * page_size
        return [cache.view(-1, *cache.shape[2:])[start + begin : start + end] for cache in caches]
    return [cache.index_select(0, pages).view(-1, *cache.shape[2:])[begin:end] for cache in caches]


def _seen(positions: Tensor, num_keys: int, window: int | None) -> Tensor | None:
    """The keys that each row attends to; positions count from the first one. Shapes: positions [n] -> [n, keys]."""
    if len(positions) == 1:
        return None  # every key that was read
    key = torch.arange(num_keys, device=positions.device)
    seen = key <= positions[:, None]
    return seen if window is None else seen & (key > positions[:, None] - window)


class _Tiling(NamedTuple):
    """How the rows, heads and keys of a request are divided among programs, chosen from shapes alone."""

    rows: int  # rows of a tile
    block_m: int  # rows times query heads of a KV head, padded
    block_n: int  # keys read at once
    block_d: int
    num_tiles: int
    num_splits: int
    num_warps: int
    num_stages: int


def _tiling(
    q: Tensor, k_cache: Tensor, page_table: Tensor, max_rows: int, num_splits: int | None, window: int | None
) -> _Tiling:
    """Fill tiles with heads first, then rows; then split the keys until the programs fill the GPU."""
    num_kv_heads = k_cache.shape[2]
    group = q.shape[1] // num_kv_heads
    is_large = _in_large_tiles(q, k_cache, page_table)
    largest_m, is_wide = 32 if q.dtype == torch.float32 else _LARGE_TILE if is_large else 64, q.shape[2] > _WIDE_HEAD
    largest_m //= 2 if is_wide else 1
    block_m = max(min(next_power_of_2(max_rows * group), largest_m), next_power_of_2(group), _MIN_DOT)
    block_d = max(next_power_of_2(q.shape[2]), _MIN_DOT)
    block_n = min(max(_BLOCK_BYTES // (block_d * q.element_size()), _MIN_DOT), 128)
    rows = block_m // group
    num_tiles = ceil_div(max_rows, rows)
    if num_splits is None:
        num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        # Of a captured step, which is laid out for more requests, one request may have all rows.
        num_programs = ceil_div(q.shape[0], min(rows, max_rows)) * num_kv_heads
        capacity = page_table.shape[1] * k_cache.shape[1]
        capacity = capacity if window is None else min(capacity, window + rows)
        at_once = max(_PROGRAMS_PER_SM * num_sms // num_programs, 1)  # a second round would be the longer one
        wanted = _even_splits(num_programs, num_sms) if is_large else at_once
        num_splits = min(wanted, ceil_div(capacity, block_n), _MAX_SPLITS)
    warps, stages = (8, 1 if q.dtype == torch.float32 else 2) if is_wide else (4, 2)
    return _Tiling(rows, block_m, block_n, block_d, num_tiles, num_splits, warps, stages)


def _in_large_tiles(q: Tensor, k_cache: Tensor, page_table: Tensor) -> bool:
    """Whether a few requests have so many rows that large tiles fill the GPU as well, and read keys half as often."""
    is_long = q.shape[0] >= _LONG_CHUNK and page_table.shape[0] <= _FEW_REQUESTS
    fits = q.shape[2] <= 128 and q.dtype.itemsize == k_cache.dtype.itemsize == 2
    return is_long and fits and q.is_cuda and torch.cuda.get_device_capability(q.device) >= (9, 0)


def _even_splits(num_programs: int, num_sms: int) -> int:
    """The fewest splits that share long programs evenly among multiprocessors, each of which has more than one."""
    loads = {splits: ceil_div(num_programs * splits, num_sms) / splits for splits in (1, 2, 4, 8)}
    best = min(loads.values())
    for splits, load in loads.items():
        if 2 * num_programs * splits >= 3 * num_sms and load <= _UNEVEN * best:
            return splits
    return max(loads)


def _paged_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_starts: Tensor,
    positions: Tensor,
    max_rows: int,
    scale: float,
    num_splits: int | None = None,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
    sinks: Tensor | None = None,
) -> Tensor:
    (num_rows, num_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[2]
    tiling = _tiling(q, k_cache, page_table, max_rows, num_splits, window)
    split = tiling.num_splits > 1
    out = stats = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if split:
        out = out.new_empty((num_rows, num_heads, tiling.num_splits, head_dim), dtype=torch.float32)
        stats = out.new_empty((num_rows, num_heads, tiling.num_splits, 2))
    _paged_attention_kernel[(tiling.num_tiles, num_kv_heads * tiling.num_splits, page_table.shape[0])](
        q,
        k_cache,
        v_cache,
        page_table,
        row_starts,
        positions,
        out,
        stats,
        positions if sinks is None else sinks,
        scale * scales.k * _LOG2_E,
        scales.v,
        *q.stride()[:2],
        page_table.stride(0),
        tiling.num_splits,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=k_cache.shape[1],
        TILE_ROWS=tiling.rows,
        SPLIT=split,
        WINDOW=window or 0,
        SINKS=sinks is not None,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_D=tiling.block_d,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return _combine(out, stats, q.new_empty((num_rows, num_heads, head_dim))) if split else out


def attend_to_chunks(chunks: Chunks, scale: float, cut: Cut = CUT) -> Tensor:
    """By the kernel in CUDA C++, where `takes` allows it. Sync: never."""
    out, sums = cut.attend(chunks, scale)
    return out if sums is None else _combine(*sums, out)


def _combine(partial: Tensor, stats: Tensor, out: Tensor) -> Tensor:
    """Reduce the splits of each row and head that has some. Shapes: [T, nq, splits, d], [.., 2] into [T, nq, d]."""
    num_rows, num_heads, num_splits, head_dim = partial.shape
    few = num_splits <= _FEW_SPLITS
    block_h = min(_HEADS_AT_ONCE, next_power_of_2(num_heads)) if few else 1
    _combine_kernel[(num_rows, ceil_div(num_heads, block_h))](
        partial,
        stats,
        out,
        num_splits,
        num_heads,
        HEAD_DIM=head_dim,
        BLOCK_H=block_h,
        BLOCK_S=_FEW_SPLITS if few else _MAX_SPLITS,
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=8 if head_dim > _WIDE_HEAD else 4,
    )
    return out


@TritonKernel.with_options(do_not_specialize=("num_splits",))
def _paged_attention_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, page_table_ptr: tl.tensor, row_starts_ptr: tl.tensor,
    positions_ptr: tl.tensor, out_ptr: tl.tensor, stats_ptr: tl.tensor, sinks_ptr: tl.tensor,
    scale_log2: float, v_scale: float, q_row_stride: int, q_head_stride: int, table_stride: int, num_splits: int,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Program (tile, KV head and split, request); m of a block is (row, head).

    With SPLIT it writes sums before the division by the denominator, and stats. WINDOW is 0 without a sliding window.
    The first split, which has keys of every tile, takes the sinks.
    """
    kv_head = tl.program_id(1) // num_splits
    split = tl.program_id(1) % num_splits
    request = tl.program_id(2).to(tl.int64)
    first_row = tl.load(row_starts_ptr + request) + tl.program_id(0) * TILE_ROWS
    end_row = tl.minimum(tl.load(row_starts_ptr + request + 1), first_row + TILE_ROWS)
    if first_row < end_row:
        m = tl.arange(0, BLOCK_M)
        row = (first_row + m // GROUP).to(tl.int64)
        head = kv_head * GROUP + m % GROUP
        live = row < end_row
        column = tl.arange(0, BLOCK_D)
        mask = live[:, None] & (column < HEAD_DIM)[None, :]
        q_head_ptr = q_ptr + row * q_row_stride + head * q_head_stride
        q = tl.load(q_head_ptr[:, None] + column[None, :], mask=mask, other=0.0)
        position = tl.load(positions_ptr + row, mask=live, other=-1)
        # This split's share, in whole blocks, of the keys that some row attends to; the last splits may have none.
        num_keys = tl.load(positions_ptr + end_row - 1).to(tl.int32) + 1
        lowest_position = tl.load(positions_ptr + first_row).to(tl.int32)
        lowest_key = 0
        if WINDOW:
            lowest_key = tl.maximum(lowest_position - (WINDOW - 1), 0)
        share = tl.cdiv(tl.cdiv(num_keys - lowest_key, num_splits), BLOCK_N) * BLOCK_N
        first_key = lowest_key + split * share
        end_key = tl.minimum(num_keys, first_key + share)
        highest, denominator = empty_softmax(BLOCK_M)
        if SINKS:
            highest, denominator = softmax_of_sinks(sinks_ptr + head, live & (split == 0))
        acc, highest, denominator = _attend_to_keys(
            q, position, lowest_position, highest, denominator, k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM,
            page_table_ptr + request * table_stride, first_key, end_key, scale_log2,
            NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, PAGE_SIZE, WINDOW, BLOCK_M, BLOCK_N, BLOCK_D
        )  # fmt: skip
        acc = acc * v_scale
        out_row = row * (NUM_KV_HEADS * GROUP) + head
        if SPLIT:
            out_row = out_row * num_splits + split
            tl.store(stats_ptr + out_row * 2, highest, mask=live)
            tl.store(stats_ptr + out_row * 2 + 1, denominator, mask=live)
            mask = mask & (first_key < end_key)
        else:
            acc = acc / tl.where(live, denominator, 1.0)[:, None]
        tl.store(out_ptr + out_row[:, None] * HEAD_DIM + column[None, :], acc, mask=mask)


@TritonKernel
def _attend_to_keys(
    q: tl.tensor, position: tl.tensor, lowest_position: tl.tensor, highest: tl.tensor, denominator: tl.tensor,
    k_ptr: tl.tensor, v_ptr: tl.tensor, table_row_ptr: tl.tensor, first_key: tl.tensor, end_key: tl.tensor,
    scale_log2: float,
    CACHE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Continue an online softmax over keys first_key..end_key - 1. Returns (sum of p V, highest score, sum of p).

    Blocks that every row sees whole, those up to the tile's lowest position, come first and without a mask. The lowest
    score is finite: a row whose keys so far are all masked subtracts it without a NaN.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    masked_from = first_key
    if WINDOW == 0:
        num_seen = tl.minimum(end_key, lowest_position + 1) - first_key
        masked_from = first_key + tl.maximum(num_seen, 0) // BLOCK_N * BLOCK_N
        for block in range(first_key, masked_from, BLOCK_N):
            acc, highest, denominator = _attend_to_block(
                q, position, acc, highest, denominator, k_ptr, v_ptr, table_row_ptr, block, end_key, scale_log2,
                CACHE_STRIDE, HEAD_DIM, PAGE_SIZE, WINDOW, BLOCK_N, BLOCK_D, False
            )  # fmt: skip
    for block in range(masked_from, end_key, BLOCK_N):
        acc, highest, denominator = _attend_to_block(
            q, position, acc, highest, denominator, k_ptr, v_ptr, table_row_ptr, block, end_key, scale_log2,
            CACHE_STRIDE, HEAD_DIM, PAGE_SIZE, WINDOW, BLOCK_N, BLOCK_D, True
        )  # fmt: skip
    return acc, highest, denominator


@TritonKernel
def _attend_to_block(
    q: tl.tensor, position: tl.tensor, acc: tl.tensor, highest: tl.tensor, denominator: tl.tensor, k_ptr: tl.tensor,
    v_ptr: tl.tensor, table_row_ptr: tl.tensor, block: tl.tensor, end_key: tl.tensor,
    scale_log2: float,
    CACHE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """One step of the online softmax, over keys block..block + BLOCK_N - 1."""
    column = tl.arange(0, BLOCK_D)
    inside = column < HEAD_DIM
    key = block + tl.arange(0, BLOCK_N)
    valid = key < end_key if MASKED else key >= 0
    page = tl.load(table_row_ptr + key // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
    offset = (page * PAGE_SIZE + key % PAGE_SIZE) * CACHE_STRIDE
    k_places, v_places = k_ptr + offset[None, :] + column[:, None], v_ptr + offset[:, None] + column[None, :]
    if MASKED or BLOCK_D > HEAD_DIM:
        k = tl.load(k_places, mask=inside[:, None] & valid[None, :], other=0.0)
        v = tl.load(v_places, mask=valid[:, None] & inside[None, :], other=0.0)
    else:
        k, v = tl.load(k_places), tl.load(v_places)
    k, v = k.to(q.dtype), v.to(q.dtype)
    scores = tl.dot(q, k, input_precision="ieee") * scale_log2
    if MASKED:
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    if WINDOW:
        scores = tl.where(key[None, :] > position[:, None] - WINDOW, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    p = tl.exp2(scores - new_highest[:, None])
    rescale = tl.exp2(highest - new_highest)
    denominator = denominator * rescale + tl.sum(p, axis=1)
    acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return acc, new_highest, denominator


@TritonKernel.with_options(do_not_specialize=("num_splits", "num_heads"))
def _combine_kernel(
    partial_ptr: tl.tensor, stats_ptr: tl.tensor, out_ptr: tl.tensor, num_splits: int, num_heads: int,
    HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, heads) adds the weighted sums. A split without keys has denominator 0 and wrote no sum.

    Where the first denominator of a row is negative, `out` has the row already (WHOLE of paged_chunks.cu).
    """
    first_head = tl.program_id(1) * BLOCK_H
    first_out = tl.program_id(0).to(tl.int64) * num_heads
    if tl.load(stats_ptr + (first_out + first_head) * num_splits * 2 + 1) < 0.0:
        return
    head = tl.minimum(first_head + tl.arange(0, BLOCK_H), num_heads - 1)  # the last one again, if too many
    split = tl.arange(0, BLOCK_S)
    column = tl.arange(0, BLOCK_D)
    inside = column < HEAD_DIM
    there = (split < num_splits)[None, :]
    partial_row = (first_out + head)[:, None] * num_splits + split[None, :]
    highest = tl.load(stats_ptr + partial_row * 2, mask=there, other=-1.0e30)
    denominator = tl.load(stats_ptr + partial_row * 2 + 1, mask=there, other=0.0)
    weight = tl.exp2(highest - tl.max(highest, axis=1)[:, None])
    mask = (denominator > 0.0)[:, :, None] & inside[None, None, :]
    places = partial_row[:, :, None] * HEAD_DIM + column[None, None, :]
    partial = tl.load(partial_ptr + places, mask=mask, other=0.0)
    out = tl.sum(partial * weight[:, :, None], axis=1) / tl.sum(denominator * weight, axis=1)[:, None]
    out_places = (first_out + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(out_ptr + out_places, out, mask=inside[None, :])
