"""`ordered_attention` for the windows of a step, in one launch that also rotates them and writes their keys.

Its programs rotate queries and keys as `rope_kv_write` does, and a program writes the new keys that it attends to. Of
the programs of a request and a KV head, the last to leave its parts merges all of them, in the order of positions. A
program without a part ends at once, without a wait: the kernel has ended when those that have parts have.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from overlap_spec_kernels.attention._decode_attention_kernel import _arrive, empty_softmax
from overlap_spec_kernels.attention.kv_format import NO_SCALES, KVScales, to_cache
from overlap_spec_kernels.attention.ordered_attention import (
    _FEW_PARTS,
    _LARGE_HEAD,
    _LOG2_E,
    _MIN_DOT,
    _ROWS_OF_WARP,
    _STAGES,
    FIRST_PART,
    OrderedTiling,
    _attend,
    _attend_to_block,
    _attend_to_keys,
    _begin_of_part,
    _block_n,
    _largest_tile,
    _merged,
    _part_of,
    ordered_attention_reference,
    ordered_tiling,
)
from overlap_spec_kernels.attention.rope_kv_write import rope_kv_write_reference
from overlap_spec_kernels.language import let_next_begin, tl, wait
from overlap_spec_kernels.launch import TritonKernel, dependent_launch, next_power_of_2, runs_triton, shared_zeros
from overlap_spec_kernels.limits import MAX_CHAIN_WIDTH
from overlap_spec_kernels.linear.call import num_multiprocessors

_SMALL_HEAD, _SHORT = 64, 2048  # columns and keys of what waits in registers: two blocks, and few other parts
_FEW_HEADS, _WARPS_OF_LARGE = 32, 8  # rows times heads of a program of larger heads: four warps would spill registers
_FEW_SPLITS = 5  # with so many, two programs a multiprocessor are faster from 1,500 keys on (H200, head_dim 128)
_COUNTERS = 1024  # units whose parts are taken apart are fewer than multiprocessors


def takes_windows(width: int, group: int, head_dim: int) -> bool:
    """Whether `ordered_windows` takes requests of so many rows, of `group` query heads for a KV head."""
    is_small = width <= MAX_CHAIN_WIDTH and head_dim <= _LARGE_HEAD
    return is_small and next_power_of_2(width * group) <= _largest_tile(head_dim)


def ordered_windows(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    page_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    read_before_wait: bool = False,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
) -> Tensor:
    """`decode_attention` in one order: the bits of `rope_kv_write` and `ordered_attention`, in one launch.

    read_before_wait: as there. `takes_windows` is asked first.
    Shapes: qkv [T, (nq + 2 nkv) d], T / B rows of a request, at consecutive positions; cos_sin [P, d], positions [T]
    i64, page_table [B, P] i32, caches [num_pages, page_size, nkv, d] -> [T, nq d]. Sync: never on CUDA.
    """
    given = (qkv, cos_sin, positions, page_table, k_cache, v_cache)
    if not runs_triton(qkv):
        return ordered_windows_reference(*given, scale, window, scales)
    (_, _, num_kv_heads, head_dim), num_rows = k_cache.shape, len(qkv)
    q = qkv.view(num_rows, -1, head_dim)[:, : -2 * num_kv_heads]
    width = num_rows // len(page_table)
    most = num_multiprocessors(qkv.device)
    tiling = ordered_tiling(q, k_cache, page_table, width, most)
    if _takes_multiprocessors(qkv, k_cache, tiling):
        tiling = tiling._replace(splits=min(tiling.splits, _splits_of_large(len(page_table) * num_kv_heads, most)))
    return attend_to_windows(*given, scale, tiling, read_before_wait, window, scales)


def ordered_windows_reference(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    page_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
) -> Tensor:
    """`rope_kv_write`, then `ordered_attention`. Sync: as that one's reference."""
    (_, page_size, num_kv_heads, head_dim), num_requests = k_cache.shape, len(page_table)
    heads, places = qkv.unflatten(1, (-1, head_dim)), positions.view(num_requests, -1)
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    pages = page_table.gather(1, places // page_size).long()
    cache_rows = (pages * page_size + places % page_size).flatten()
    q = rope_kv_write_reference(q, k, v, cos_sin, positions, cache_rows, k_cache, v_cache, scales)
    row_starts = torch.arange(num_requests + 1, dtype=torch.int32, device=qkv.device) * places.shape[1]
    rows = (q, k_cache, v_cache, page_table, row_starts, positions)
    return ordered_attention_reference(*rows, scale, window, scales).flatten(1)


def attend_to_windows(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    page_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    tiling: OrderedTiling,
    read_before_wait: bool = False,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
) -> Tensor:
    """`ordered_windows` by the kernel, divided by `tiling`. Sync: never."""
    num_rows, num_requests, (_, page_size, num_kv_heads, head_dim) = len(qkv), len(page_table), k_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    assert tiling.num_tiles == 1, "`takes_windows` is asked first"
    out = qkv.new_empty((num_rows, num_heads * head_dim))
    partial, stats, counters = out, out, out
    if tiling.num_parts:
        partial = qkv.new_empty((num_rows, num_heads, tiling.num_parts, head_dim), dtype=torch.float32)
        stats = qkv.new_empty((num_rows, num_heads, tiling.num_parts, 2), dtype=torch.float32)
        counters = _counters(qkv.device)
    width, in_16_bits = num_rows // num_requests, qkv.dtype == k_cache.dtype
    is_large = _takes_multiprocessors(qkv, k_cache, tiling)
    is_short = width == 1 and head_dim <= _SMALL_HEAD and page_table.shape[1] * page_size <= _SHORT
    _ordered_windows_kernel[(num_kv_heads * tiling.splits, num_requests)](
        *(qkv, cos_sin, positions, page_table, k_cache, v_cache, partial, stats, counters, out),
        scale * scales.k * _LOG2_E,
        1.0 / scales.k,
        1.0 / scales.v,
        scales.v,
        qkv.stride(0),
        page_table.stride(0),
        tiling.num_parts,
        tiling.splits,
        WIDTH=width,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        APART=tiling.num_parts > 0,
        WINDOW=window or 0,
        EIGHT_BITS=k_cache.element_size() == 1 and k_cache.is_cuda,
        IN_REGISTERS=tiling.num_parts > 0 and is_short and in_16_bits,
        LATE=is_large,
        READ_BEFORE_WAIT=read_before_wait,
        FIRST_PART=FIRST_PART,
        FEW=_FEW_PARTS,
        BLOCK_M=tiling.block_m,
        BLOCK_N=_block_n(head_dim),
        BLOCK_D=max(next_power_of_2(head_dim), _MIN_DOT),
        BLOCK_W=next_power_of_2(width),
        num_warps=_WARPS_OF_LARGE if is_large else max(tiling.block_m // _ROWS_OF_WARP, 4),
        num_stages=_STAGES,  # a third one waits for page numbers before the first block
        enable_fp_fusion=False,
        **dependent_launch(qkv.device, num_rows),
    )
    return out


def _splits_of_large(num_units: int, multiprocessors: int) -> int:
    """Programs for each request and KV head: one a multiprocessor, or two, where one would have many parts."""
    alone = multiprocessors // num_units
    return alone if alone > _FEW_SPLITS else max(2 * multiprocessors // num_units, 1)


def _takes_multiprocessors(qkv: Tensor, k_cache: Tensor, tiling: OrderedTiling) -> bool:
    """Whether a program takes much of one: of few rows of larger heads, with parts apart.

    The next linear begins late then: what it copies would be ahead of the rows.
    """
    is_few = tiling.block_m <= _FEW_HEADS and tiling.num_parts > 0
    return is_few and k_cache.shape[3] > _SMALL_HEAD and qkv.dtype == k_cache.dtype


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Programs that have left their parts, by request and KV head; zero between launches. Shapes: -> [N] i32."""
    return shared_zeros(_COUNTERS, device)


@TritonKernel.with_options(do_not_specialize=("num_parts", "splits"))
def _ordered_windows_kernel(
    qkv_ptr: tl.tensor, cos_sin_ptr: tl.tensor, positions_ptr: tl.tensor, page_table_ptr: tl.tensor, k_ptr: tl.tensor,
    v_ptr: tl.tensor, partial_ptr: tl.tensor, stats_ptr: tl.tensor, counters_ptr: tl.tensor, out_ptr: tl.tensor,
    scale_log2: float, inverse_k: float, inverse_v: float, v_scale: float, qkv_stride: int, table_stride: int,
    num_parts: int, splits: int,
    WIDTH: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, APART: tl.constexpr, WINDOW: tl.constexpr, EIGHT_BITS: tl.constexpr,
    IN_REGISTERS: tl.constexpr, LATE: tl.constexpr, READ_BEFORE_WAIT: tl.constexpr, FIRST_PART: tl.constexpr,
    FEW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (KV head and split, request); m of a block is (row, head). LATE: the next kernel begins when q is there.

    IN_REGISTERS, of one row: a block of keys is loaded before the row is there, or two, if they are all and parts.
    """
    STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM  # of a cache's rows
    let_next_begin(PDL and not LATE)
    if not READ_BEFORE_WAIT:
        wait(PDL)
    kv_head, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    request = tl.program_id(1).to(tl.int64)
    num_cached = tl.load(positions_ptr + request * WIDTH).to(tl.int32)
    end_key, first_key = num_cached + WIDTH, tl.maximum(num_cached - (WINDOW - 1), 0) if WINDOW else num_cached * 0
    first_block = first_key // BLOCK_N * BLOCK_N
    seen_key = first_block if WINDOW else (num_cached + 1) // BLOCK_N * BLOCK_N
    first_part, end_part = _part_of(first_key, FIRST_PART, FEW), _part_of(end_key - 1, FIRST_PART, FEW) + 1
    active = tl.minimum(end_part - first_part, splits)
    is_pair = (end_part - first_part == 2) & (end_key - first_block <= 2 * BLOCK_N)
    is_pair = is_pair & (_begin_of_part(first_part + 1, FIRST_PART, FEW) == first_block + BLOCK_N)
    active = tl.where(is_pair, 1, active) if IN_REGISTERS else active
    if split < active:
        column, m, new = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_W)
        k_ptr, v_ptr = k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM
        table_row_ptr = page_table_ptr + request * table_stride
        part, begin, end = _keys_of(split, active, first_part, end_part, first_block, end_key, FIRST_PART, FEW, BLOCK_N)
        if IN_REGISTERS:
            key = begin + tl.arange(0, BLOCK_N)
            k, v = _cached(k_ptr, v_ptr, table_row_ptr, key, num_cached, STRIDE, HEAD_DIM, PAGE_SIZE, BLOCK_D)
            next_key, num_next = key + BLOCK_N, tl.where(is_pair, num_cached, 0)
            next_k, next_v = _cached(
                k_ptr, v_ptr, table_row_ptr, next_key, num_next, STRIDE, HEAD_DIM, PAGE_SIZE, BLOCK_D
            )
        elif PDL and READ_BEFORE_WAIT and HEAD_DIM >= 16:
            _ask_for_keys(k_ptr, v_ptr, table_row_ptr, begin, num_cached, STRIDE, HEAD_DIM, PAGE_SIZE, BLOCK_N)
        # Of the new rows those whose part is the program's own, which are then in the cache before it reads them.
        new_key = num_cached + new
        mine = (new < WIDTH) & (new_key >= begin) & (new_key < end)
        page = tl.load(table_row_ptr + new_key // PAGE_SIZE, mask=mine, other=0).to(tl.int64)
        new_cos, new_sin = _angles(cos_sin_ptr, new_key, mine, HEAD_DIM, BLOCK_D)
        row, live = m // GROUP, m // GROUP < WIDTH
        position = tl.where(live, num_cached + row, -1)
        cos, sin = _angles(cos_sin_ptr, position, live, HEAD_DIM, BLOCK_D)
        if READ_BEFORE_WAIT:
            wait(PDL)
        new_row_ptr = qkv_ptr + (request * WIDTH + new) * qkv_stride + (NUM_KV_HEADS * GROUP + kv_head) * HEAD_DIM
        places = (page * PAGE_SIZE + new_key % PAGE_SIZE) * STRIDE
        _write(
            new_row_ptr, new_cos, new_sin, k_ptr + places, v_ptr + places, mine, inverse_k, inverse_v, NUM_KV_HEADS,
            HEAD_DIM, BLOCK_D
        )  # fmt: skip
        mask = live[:, None] & (column < HEAD_DIM)[None, :]
        head, q_ptr = kv_head * GROUP + m % GROUP, qkv_ptr + (request * WIDTH + row) * qkv_stride
        q = _rotated(q_ptr + head * HEAD_DIM, cos, sin, mask, HEAD_DIM, BLOCK_D)
        out_row = (request * WIDTH + row) * (NUM_KV_HEADS * GROUP) + head
        target_ptr = out_ptr + out_row[:, None] * HEAD_DIM + column[None, :]
        if IN_REGISTERS:
            one_k, one_v = _row_alone(new_row_ptr, cos_sin_ptr, num_cached, NUM_KV_HEADS, HEAD_DIM, BLOCK_D)
            is_it, is_next = (key == num_cached)[:, None], (next_key == num_cached)[:, None]
            k, v = tl.where(is_it, one_k, k), tl.where(is_it, one_v, v)
            next_k, next_v = tl.where(is_next, one_k, next_k), tl.where(is_next, one_v, next_v)
        tl.debug_barrier()
        let_next_begin(PDL and LATE)
        if not APART:
            acc, highest, denominator = _attend(
                q, position, first_part, k_ptr, v_ptr, table_row_ptr, first_block, seen_key, end_key, scale_log2,
                STRIDE, HEAD_DIM, PAGE_SIZE, False, WINDOW, EIGHT_BITS, FIRST_PART, FEW, BLOCK_M, BLOCK_N, BLOCK_D
            )  # fmt: skip
            tl.store(target_ptr, acc / tl.where(live, denominator, 1.0)[:, None] * v_scale, mask=mask)
        elif IN_REGISTERS and is_pair:
            acc, denominator = _attend_to_pair(q, position, k, v, key, next_k, next_v, next_key, scale_log2, WINDOW)
            tl.store(target_ptr, acc / tl.where(live, denominator, 1.0)[:, None] * v_scale, mask=mask)
        else:
            if not IN_REGISTERS:
                k, v, key = q, q, position  # not used
            _attend_to_parts(
                q, position, k, v, key, k_ptr, v_ptr, table_row_ptr, first_part, end_part, part, active, begin,
                end, partial_ptr, stats_ptr, counters_ptr + request * NUM_KV_HEADS + kv_head, target_ptr,
                out_row * num_parts, live, mask, scale_log2, v_scale, STRIDE, HEAD_DIM, PAGE_SIZE, WINDOW, EIGHT_BITS,
                IN_REGISTERS, FIRST_PART, FEW, BLOCK_N, BLOCK_D
            )  # fmt: skip


@TritonKernel
def _write(
    row_ptr: tl.tensor, cos: tl.tensor, sin: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, live: tl.tensor,
    inverse_k: float, inverse_v: float, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """New keys, rotated, and values into the cache. Shapes: pointers and live [n]."""
    column = tl.arange(0, BLOCK_D)[None, :]
    kept: tl.constexpr = k_ptr.dtype.element_ty
    mask = live[:, None] & (column < HEAD_DIM)
    v = tl.load(row_ptr[:, None] + NUM_KV_HEADS * HEAD_DIM + column, mask=mask, other=0.0)
    k = _rotated(row_ptr, cos, sin, mask, HEAD_DIM, BLOCK_D)
    tl.store(k_ptr[:, None] + column, to_cache(k, inverse_k, kept), mask=mask)
    tl.store(v_ptr[:, None] + column, to_cache(v, inverse_v, kept), mask=mask)


@TritonKernel
def _row_alone(
    row_ptr: tl.tensor, cos_sin_ptr: tl.tensor, position: tl.tensor, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The new key, rotated, and value of a window of one row. Shapes: a pointer [1] -> [1, BLOCK_D] each."""
    one, column = tl.arange(0, 1), tl.arange(0, BLOCK_D)
    cos, sin = _angles(cos_sin_ptr, position + one, one < 1, HEAD_DIM, BLOCK_D)
    mask = (column < HEAD_DIM)[None, :]
    v = tl.load(row_ptr[:, None] + NUM_KV_HEADS * HEAD_DIM + column[None, :], mask=mask, other=0.0)
    return _rotated(row_ptr, cos, sin, mask, HEAD_DIM, BLOCK_D), v


@TritonKernel
def _attend_to_pair(
    q: tl.tensor, position: tl.tensor, k: tl.tensor, v: tl.tensor, key: tl.tensor, next_k: tl.tensor,
    next_v: tl.tensor, next_key: tl.tensor, scale_log2: float, WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Two parts of a block each, which do not wait for each other. Returns the sum of p V, and that of p."""
    ones = tl.full([k.shape[0], 16], 1.0, q.dtype)
    sums, acc = tl.zeros([q.shape[0], 16], tl.float32), tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    highest, denominator = empty_softmax(q.shape[0])
    next_acc, next_highest, next_sums = _attend_to_keys(
        q, ones, position, acc, highest, sums, tl.trans(next_k), next_v, next_key, scale_log2, True, WINDOW
    )
    acc, highest, sums = _attend_to_keys(
        q, ones, position, acc, highest, sums, tl.trans(k), v, key, scale_log2, True, WINDOW
    )
    acc, highest, denominator = _merged(
        acc, highest, tl.max(sums, axis=1), next_acc, next_highest, tl.max(next_sums, axis=1)
    )
    return acc, denominator


@TritonKernel
def _keys_of(
    split: tl.tensor, active: tl.tensor, first_part: tl.tensor, end_part: tl.tensor, first_block: tl.tensor,
    end_key: tl.tensor, FIRST_PART: tl.constexpr, FEW: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The first part of a split, its first key, and the key at which another split's begin."""
    part = _first_of_split(split, active, first_part, end_part, first_block, end_key, FIRST_PART, FEW, BLOCK_N)
    next_part = _first_of_split(split + 1, active, first_part, end_part, first_block, end_key, FIRST_PART, FEW, BLOCK_N)
    begin, end = _begin_of_part(part, FIRST_PART, FEW), _begin_of_part(next_part, FIRST_PART, FEW)
    return part, tl.maximum(begin, first_block), tl.minimum(end, end_key)


@TritonKernel
def _first_of_split(
    split: tl.tensor, active: tl.tensor, first_part: tl.tensor, end_part: tl.tensor, first_block: tl.tensor,
    end_key: tl.tensor, FIRST_PART: tl.constexpr, FEW: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The first part of a split, where each has parts that follow one another, of about as many blocks."""
    blocks = tl.cdiv(end_key - first_block, BLOCK_N) * split // active
    key = first_block + blocks * BLOCK_N
    half = (FIRST_PART // 2) << tl.maximum(_part_of(key, FIRST_PART, FEW) // FEW - 1, 0)
    part = tl.minimum(_part_of(key + half, FIRST_PART, FEW), end_part)
    return tl.where(split == 0, first_part, tl.where(split == active, end_part, part))


@TritonKernel
def _attend_to_parts(
    q: tl.tensor, position: tl.tensor, k: tl.tensor, v: tl.tensor, key: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor,
    table_row_ptr: tl.tensor, first_part: tl.tensor, end_part: tl.tensor, part: tl.tensor, active: tl.tensor,
    begin: tl.tensor, end: tl.tensor, partial_ptr: tl.tensor, stats_ptr: tl.tensor,
    counter_ptr: tl.tensor, target_ptr: tl.tensor, first_place: tl.tensor, live: tl.tensor, mask: tl.tensor,
    scale_log2: float, v_scale: float, CACHE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, EIGHT_BITS: tl.constexpr, IN_REGISTERS: tl.constexpr, FIRST_PART: tl.constexpr,
    FEW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Parts of keys begin..end - 1, each of which is left in memory, and all by the last program to leave its own.

    One loop has the blocks of all these parts, so that those of the next part are loaded meanwhile. IN_REGISTERS, where
    a part is a block: the first one is given.
    """
    column, ones = tl.arange(0, BLOCK_D)[None, :], tl.full([BLOCK_N, 16], 1.0, q.dtype)
    sums, acc = tl.zeros([q.shape[0], 16], tl.float32), tl.zeros([q.shape[0], BLOCK_D], tl.float32)
    highest, _ = empty_softmax(q.shape[0])
    is_whole = end_part - first_part == 1
    if IN_REGISTERS:
        first_acc, first_highest, first_sums = _attend_to_keys(
            q, ones, position, acc, highest, sums, tl.trans(k), v, key, scale_log2, True, WINDOW
        )
        _leave_part(
            first_acc, first_highest, tl.max(first_sums, axis=1), partial_ptr, stats_ptr, target_ptr,
            first_place + part, is_whole, live, mask, column, v_scale, HEAD_DIM
        )  # fmt: skip
        part += 1
        begin += BLOCK_N
    for block in range(begin, end, BLOCK_N):
        acc, highest, sums = _attend_to_block(
            q, ones, position, acc, highest, sums, k_ptr, v_ptr, table_row_ptr, block, end, scale_log2, CACHE_STRIDE,
            HEAD_DIM, PAGE_SIZE, True, WINDOW, EIGHT_BITS, BLOCK_N, BLOCK_D
        )  # fmt: skip
        ends = block + BLOCK_N >= tl.minimum(_begin_of_part(part + 1, FIRST_PART, FEW), end)
        if ends:
            _leave_part(
                acc, highest, tl.max(sums, axis=1), partial_ptr, stats_ptr, target_ptr, first_place + part, is_whole,
                live, mask, column, v_scale, HEAD_DIM
            )  # fmt: skip
        acc, highest = tl.where(ends, 0.0, acc), tl.where(ends, -1.0e30, highest)  # by which sums are scaled to 0
        part += ends.to(tl.int32)
    if end_part - first_part > 1:  # noqa: SIM102 (`and` would evaluate both, and count an arrival)
        if _arrive(counter_ptr, active):
            acc, denominator = _merged_parts(
                partial_ptr, stats_ptr, first_place, first_part, end_part, live, HEAD_DIM, BLOCK_D
            )
            tl.store(target_ptr, acc / tl.where(live, denominator, 1.0)[:, None] * v_scale, mask=mask)


@TritonKernel
def _leave_part(
    acc: tl.tensor, highest: tl.tensor, denominator: tl.tensor, partial_ptr: tl.tensor, stats_ptr: tl.tensor,
    target_ptr: tl.tensor, at: tl.tensor, is_whole: tl.tensor, live: tl.tensor, mask: tl.tensor, column: tl.tensor,
    v_scale: float, HEAD_DIM: tl.constexpr,
) -> None:  # fmt: skip
    """Write a part's sum of p V, highest score and sum of p; or the result, where it is all."""
    if is_whole:
        tl.store(target_ptr, acc / tl.where(live, denominator, 1.0)[:, None] * v_scale, mask=mask)
    else:
        tl.store(stats_ptr + at * 2, highest, mask=live)
        tl.store(stats_ptr + at * 2 + 1, denominator, mask=live)
        tl.store(partial_ptr + at[:, None] * HEAD_DIM + column, acc, mask=mask)


@TritonKernel
def _ask_for_keys(
    k_ptr: tl.tensor, v_ptr: tl.tensor, table_row_ptr: tl.tensor, begin: tl.tensor, num_cached: tl.tensor,
    CACHE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """Bring a block of cached keys and values to the L2 cache. No program writes these."""
    key = begin + tl.arange(0, BLOCK_N)
    cached = key < num_cached
    page = tl.load(table_row_ptr + key // PAGE_SIZE, mask=cached, other=0).to(tl.int64)
    offset = tl.where(cached, page * PAGE_SIZE + key % PAGE_SIZE, 0) * CACHE_STRIDE
    num_bytes = tl.full([BLOCK_N], HEAD_DIM * k_ptr.dtype.element_ty.primitive_bitwidth // 8 // 16 * 16, tl.int32)
    for cache_ptr in tl.static_range(2):
        at = ((k_ptr if cache_ptr == 0 else v_ptr) + offset).to(tl.int64, bitcast=True) & -16
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r", [at, num_bytes],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@TritonKernel
def _cached(
    k_ptr: tl.tensor, v_ptr: tl.tensor, table_row_ptr: tl.tensor, key: tl.tensor, num_cached: tl.tensor,
    CACHE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Keys and values that no program of this launch writes; zero from num_cached on. Shapes: -> [BLOCK_N, BLOCK_D]."""
    column, there = tl.arange(0, BLOCK_D), key < num_cached
    page = tl.load(table_row_ptr + key // PAGE_SIZE, mask=there, other=0).to(tl.int64)
    places = ((page * PAGE_SIZE + key % PAGE_SIZE) * CACHE_STRIDE)[:, None] + column[None, :]
    mask = there[:, None] & (column < HEAD_DIM)[None, :]
    return tl.load(k_ptr + places, mask=mask, other=0.0), tl.load(v_ptr + places, mask=mask, other=0.0)


@TritonKernel
def _angles(
    cos_sin_ptr: tl.tensor, position: tl.tensor, live: tl.tensor, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Cosines and sines of both halves' columns. Shapes: position, live [n] -> [n, BLOCK_D] f32."""
    column = tl.arange(0, BLOCK_D)
    angle = tl.where(column < HEAD_DIM // 2, column, column - HEAD_DIM // 2)
    places = cos_sin_ptr + (position * HEAD_DIM)[:, None] + angle[None, :]
    mask = live[:, None] & (column < HEAD_DIM)[None, :]
    cos, sin = tl.load(places, mask=mask, other=0.0), tl.load(places + HEAD_DIM // 2, mask=mask, other=0.0)
    return cos.to(tl.float32), sin.to(tl.float32)


@TritonKernel
def _rotated(
    row_ptr: tl.tensor, cos: tl.tensor, sin: tl.tensor, mask: tl.tensor, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """Heads as `rope_kv_write` rotates and rounds them. Shapes: pointers [n], the others [n, BLOCK_D] -> the same."""
    column = tl.arange(0, BLOCK_D)
    is_first = column < HEAD_DIM // 2
    partner = tl.where(is_first, column + HEAD_DIM // 2, column - HEAD_DIM // 2)
    x = tl.load(row_ptr[:, None] + column[None, :], mask=mask, other=0.0)
    product = tl.load(row_ptr[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32) * sin
    return tl.fma(x.to(tl.float32), cos, tl.where(is_first[None, :], -product, product)).to(x.dtype)


@TritonKernel
def _merged_parts(
    partial_ptr: tl.tensor, stats_ptr: tl.tensor, first_place: tl.tensor, first_part: tl.tensor, end_part: tl.tensor,
    live: tl.tensor, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The parts of rows, in order, read past the L1 cache. Shapes: first_place, live [M] -> [M, BLOCK_D], [M]."""
    column = tl.arange(0, BLOCK_D)
    acc = tl.zeros([live.shape[0], BLOCK_D], tl.float32)
    highest, denominator = empty_softmax(live.shape[0])
    for first in range(first_part, end_part, 4):
        for ahead in tl.static_range(4):  # whose loads do not wait for one another
            there = live & (first + ahead < end_part)
            place = first_place + first + ahead
            part_highest = tl.load(stats_ptr + place * 2, mask=there, other=-1.0e30, cache_modifier=".cg")
            part_denominator = tl.load(stats_ptr + place * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            inside = there[:, None] & (column < HEAD_DIM)[None, :]
            places = partial_ptr + place[:, None] * HEAD_DIM + column[None, :]
            part_acc = tl.load(places, mask=inside, other=0.0, cache_modifier=".cg")
            acc, highest, denominator = _merged(acc, highest, denominator, part_acc, part_highest, part_denominator)
    return acc, denominator
