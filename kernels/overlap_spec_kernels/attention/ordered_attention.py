"""Causal attention through a page table whose bits depend on a row's query, its keys and values, and nothing else.

Keys are divided by their positions into parts that are the same for every request and every number of rows: 128 keys
each at first, and from position 2,048 on an eighth of the power of two before them. Each part is attended to by itself,
block after block, and parts are merged in the order of their positions:

    positions    0 | 128 | 256 | .. | 1920 | 2048 | 2304 | .. | 3840 | 4096 | 4608 | ..
    state        merge(merge(merge(empty, part 0), part 1), part 2) ..

Where rows are few, a program takes a part and leaves it in memory, and a second kernel merges the parts of a row. Where
they are many, a program merges the parts as it goes through them. Either way the same numbers are multiplied and added
in the same order: sums over keys and columns are products of tensor cores, which give a row the same bits in tiles of
any shape (the softmax's denominators too: p times ones), and all else is elementwise, with no multiplication and
addition fused into one operation. A part of which a row sees no key leaves its state as it is, to the bit. A sink of
the row's head is merged after the last part.

The windows of a step take one launch, of `ordered_windows.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.attention._decode_attention_kernel import empty_softmax, softmax_of_sinks
from overlap_spec_kernels.attention.kv_format import NO_SCALES, KVScales
from overlap_spec_kernels.language import let_next_begin, of_16_bits, tl, wait
from overlap_spec_kernels.launch import (
    TritonKernel,
    ceil_div,
    dependent_launch,
    next_power_of_2,
    runs_triton,
)
from overlap_spec_kernels.linear.call import num_multiprocessors

FIRST_PART = 128  # keys; a power of two
_FEW_PARTS = 8  # parts of one length, after which the next are twice as long; the first length has twice as many
_WIDE_HEAD, _LARGE_HEAD = 128, 256  # columns; of the result of a larger head a program has so many
_BLOCK_N = 128  # keys that a program reads at once; half as many of wider heads, a quarter of larger ones
_MIN_DOT = 16  # the smallest side of a tensor-core product
_LARGEST_M = 128  # rows times heads of a tile
_STAGES, _STAGES_APART = 2, 3  # of loops over blocks of keys, all or a part of them
_ROWS_OF_WARP = 16  # of a tile, where it has more than 64
_MOST_SCRATCH = 64 << 20  # bytes of the parts' results
_LOG2_E = 1.4426950408889634


def begin_of_part(part: int) -> int:
    """The first position of a part."""
    if part < _FEW_PARTS:
        return part * FIRST_PART
    return (_FEW_PARTS + part % _FEW_PARTS) * FIRST_PART << (part // _FEW_PARTS - 1)


def part_of(position: int) -> int:
    """The part in which a position lies."""
    blocks = position // FIRST_PART
    shift = max(blocks.bit_length() - _FEW_PARTS.bit_length(), 0)
    return _FEW_PARTS * shift + (blocks >> shift)


class OrderedTiling(NamedTuple):
    """How rows, heads and parts are divided among programs. None of it changes a bit."""

    rows: int  # rows of a tile
    block_m: int  # rows times query heads of a KV head, padded
    num_tiles: int
    num_parts: int  # 0: a program takes all parts of its rows, one after another
    splits: int = 1  # programs that have the parts of the same rows


def ordered_tiling(
    q: Tensor, k_cache: Tensor, page_table: Tensor, max_rows: int, multiprocessors: int
) -> OrderedTiling:
    """Parts are taken apart where programs are too few without, and their results are not too many.

    Shapes: q [T, nq, d], k_cache [num_pages, page_size, nkv, d], page_table [B, P] i32.
    """
    (num_rows, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q.shape, k_cache.shape
    group = num_heads // num_kv_heads
    largest = _largest_tile(head_dim)
    block_m = max(min(next_power_of_2(max_rows * group), largest), next_power_of_2(group), _MIN_DOT)
    rows = block_m // group
    capacity = max(page_table.shape[1] * page_size, 1)
    num_parts = part_of(capacity - 1) + 1
    num_programs = ceil_div(num_rows, min(rows, max_rows)) * num_kv_heads
    num_bytes = num_rows * num_heads * num_parts * (head_dim + 2) * 4
    apart = num_parts > 1 and num_programs < multiprocessors and num_bytes <= _MOST_SCRATCH
    num_tiles = ceil_div(max_rows, rows)
    if not apart:
        return OrderedTiling(rows, block_m, num_tiles, 0)
    return OrderedTiling(
        rows, block_m, num_tiles, num_parts, min(ceil_div(2 * multiprocessors, num_programs), num_parts)
    )


def _largest_tile(head_dim: int) -> int:
    """Rows times heads."""
    return _LARGEST_M if head_dim <= _WIDE_HEAD else _LARGEST_M // 2


def _block_n(head_dim: int) -> int:
    """Keys that a program reads at once."""
    return _BLOCK_N if head_dim <= _WIDE_HEAD else _BLOCK_N // 2 if head_dim <= _LARGE_HEAD else _BLOCK_N // 4


def ordered_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_starts: Tensor,
    positions: Tensor,
    max_rows: int,
    scale: float,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
    read_before_wait: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` in one order. The arguments are its, and have been checked by it where they come from a user.

    read_before_wait: an ordinary launch ran after row_starts and positions were written.
    Shapes: q [T, nq, d], caches [num_pages, page_size, nkv, d], page_table [B, P] i32, row_starts [B + 1] i32,
    positions [T] i64, sinks [nq] -> [T, nq, d]. Sync: never on CUDA.
    """
    given = (q, k_cache, v_cache, page_table, row_starts, positions)
    if not runs_triton(q):
        return ordered_attention_reference(*given, scale, window, scales, sinks)
    tiling = ordered_tiling(q, k_cache, page_table, max_rows, num_multiprocessors(q.device))
    return attend_in_order(*given, scale, tiling, window, scales, read_before_wait, sinks)


def ordered_attention_reference(
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
    """Row by row, part by part. Sync: reads row_starts, positions and page_table on the host."""
    wide = torch.promote_types(q.dtype, torch.float32)
    group, page_size = q.shape[1] // k_cache.shape[2], k_cache.shape[1]
    k_rows, v_rows = (cache.flatten(0, 1).to(q.dtype).to(wide) for cache in (k_cache, v_cache))
    starts, out = row_starts.tolist(), torch.empty_like(q)
    for request, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
        for row in range(begin, end):
            last = int(positions[row])
            first = 0 if window is None else max(last - window + 1, 0)
            state = torch.zeros(q.shape[1:], dtype=wide), torch.full((q.shape[1],), -1e30, dtype=wide)
            total = state[0][:, 0]
            for part in range(part_of(first), part_of(last) + 1):
                keys = torch.arange(max(begin_of_part(part), first), min(begin_of_part(part + 1), last + 1))
                places = page_table[request, keys // page_size].long() * page_size + keys % page_size
                k, v = (rows[places].repeat_interleave(group, dim=1) for rows in (k_rows, v_rows))
                scores = torch.einsum("hd,khd->hk", q[row].to(wide), k) * (scale * scales.k)
                highest = torch.maximum(state[1], scores.amax(1))
                p, rescale = (scores - highest[:, None]).exp(), (state[1] - highest).exp()
                total = total * rescale + p.sum(1)
                state = state[0] * rescale[:, None] + torch.einsum("hk,khd->hd", p, v), highest
            if sinks is not None:
                total = total + (sinks.to(wide) - state[1]).exp()
            out[row] = (state[0] / total[:, None] * scales.v).to(q.dtype)
    return out


def attend_in_order(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_starts: Tensor,
    positions: Tensor,
    scale: float,
    tiling: OrderedTiling,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
    read_before_wait: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """`ordered_attention` by the kernels, divided by `tiling`. Sync: never."""
    (num_rows, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q.shape, k_cache.shape
    num_requests, num_parts = page_table.shape[0], tiling.num_parts
    out = q.new_empty((num_rows, num_heads, head_dim))
    partial, stats = out, out
    if num_parts:
        partial = q.new_empty((num_rows, num_heads, num_parts, head_dim), dtype=torch.float32)
        stats = q.new_empty((num_rows, num_heads, num_parts, 2), dtype=torch.float32)
    parts_of_values = ceil_div(head_dim, _LARGE_HEAD)
    assert parts_of_values == 1 or head_dim == 2 * _LARGE_HEAD, "programs have whole parts of a larger head"
    _ordered_attention_kernel[(tiling.num_tiles * parts_of_values, num_kv_heads * tiling.splits, num_requests)](
        *(q, k_cache, v_cache, page_table, row_starts, positions, partial, stats, q if sinks is None else sinks),
        *(scale * scales.k * _LOG2_E, scales.v, *q.stride()[:2], page_table.stride(0), num_parts, tiling.splits),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        TILE_ROWS=tiling.rows,
        APART=num_parts > 0,
        WINDOW=window or 0,
        SINKS=sinks is not None,
        EIGHT_BITS=k_cache.element_size() == 1 and k_cache.is_cuda,
        READ_BEFORE_WAIT=read_before_wait,
        FIRST_PART=FIRST_PART,
        FEW=_FEW_PARTS,
        BLOCK_M=tiling.block_m,
        BLOCK_N=_block_n(head_dim),
        BLOCK_D=max(next_power_of_2(head_dim), _MIN_DOT),
        PARTS_OF_VALUES=parts_of_values,
        num_warps=max(tiling.block_m // _ROWS_OF_WARP, 4 if head_dim <= _WIDE_HEAD else 8),
        num_stages=_STAGES_APART if num_parts else _STAGES,
        enable_fp_fusion=False,
        **dependent_launch(q.device, num_rows),
    )
    if num_parts:
        _merge(partial, stats, positions, out, scales, window, read_before_wait, sinks)
    return out


def _merge(
    partial: Tensor,
    stats: Tensor,
    positions: Tensor,
    out: Tensor,
    scales: KVScales,
    window: int | None,
    read_before_wait: bool,
    sinks: Tensor | None,
) -> None:
    """Add up the parts of each row, in the order of positions. Shapes: partial [T, n, P, d], out [T, n, d]."""
    num_rows, num_heads, num_parts, head_dim = partial.shape
    _merge_kernel[(num_rows, num_heads)](
        partial,
        stats,
        positions,
        out,
        out if sinks is None else sinks,
        scales.v,
        num_parts,
        WINDOW=window or 0,
        SINKS=sinks is not None,
        READ_BEFORE_WAIT=read_before_wait,
        FIRST_PART=FIRST_PART,
        FEW=_FEW_PARTS,
        HEAD_DIM=head_dim,
        BLOCK_D=max(next_power_of_2(head_dim), _MIN_DOT),
        num_warps=1,
        enable_fp_fusion=False,
        **dependent_launch(out.device, num_rows),
    )


@TritonKernel
def _begin_of_part(part: tl.tensor, FIRST_PART: tl.constexpr, FEW: tl.constexpr) -> tl.tensor:
    """`begin_of_part`, on the device."""
    doubled = tl.maximum(part // FEW - 1, 0)
    units = tl.where(part < FEW, part, FEW + part % FEW)
    return (units * FIRST_PART) << doubled


@TritonKernel
def _part_of(position: tl.tensor, FIRST_PART: tl.constexpr, FEW: tl.constexpr) -> tl.tensor:
    """`part_of`, on the device: positions are below 2^24, which float32 holds exactly, exponents included."""
    units = position // FIRST_PART
    exponent = (tl.maximum(units // FEW, 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return FEW * exponent + (units >> exponent)


@TritonKernel
def _merged(
    acc: tl.tensor, highest: tl.tensor, denominator: tl.tensor, part_acc: tl.tensor, part_highest: tl.tensor,
    part_denominator: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The state after one more part. Shapes: [M, D], [M], [M], twice."""
    new_highest = tl.maximum(highest, part_highest)
    before, now = tl.exp2(highest - new_highest), tl.exp2(part_highest - new_highest)
    denominator = denominator * before + part_denominator * now
    acc = acc * before[:, None] + part_acc * now[:, None]
    return acc, new_highest, denominator


@TritonKernel
def _finished(
    acc: tl.tensor, highest: tl.tensor, denominator: tl.tensor, sink_ptrs: tl.tensor, live: tl.tensor, v_scale: float,
    SINKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The results of rows. SINKS: after a logit of each one's head, which adds no value. Shapes: [M, D], [M]."""
    if SINKS:
        sink, one = softmax_of_sinks(sink_ptrs, live)
        acc, _, denominator = _merged(acc, highest, denominator, tl.zeros(acc.shape, tl.float32), sink, one)
    return acc / tl.where(live, denominator, 1.0)[:, None] * v_scale


@TritonKernel.with_options(do_not_specialize=("num_parts", "splits"))
def _ordered_attention_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, page_table_ptr: tl.tensor, row_starts_ptr: tl.tensor,
    positions_ptr: tl.tensor, out_ptr: tl.tensor, stats_ptr: tl.tensor, sinks_ptr: tl.tensor,
    scale_log2: float, v_scale: float, q_row_stride: int, q_head_stride: int, table_stride: int, num_parts: int,
    splits: int,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, APART: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    EIGHT_BITS: tl.constexpr, READ_BEFORE_WAIT: tl.constexpr, FIRST_PART: tl.constexpr, FEW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PARTS_OF_VALUES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (tile and part of the columns of values, KV head and split, request); m of a block is (row, head).

    APART: of the parts it takes every `splits`th, and leaves each in memory; else all.
    """
    BLOCK_V: tl.constexpr = BLOCK_D // PARTS_OF_VALUES
    let_next_begin(PDL)
    if not READ_BEFORE_WAIT:
        wait(PDL)
    kv_head = tl.program_id(1) // splits
    request = tl.program_id(2).to(tl.int64)
    first_row = tl.load(row_starts_ptr + request) + tl.program_id(0) // PARTS_OF_VALUES * TILE_ROWS
    end_row = tl.minimum(tl.load(row_starts_ptr + request + 1), first_row + TILE_ROWS)
    if first_row < end_row:
        m = tl.arange(0, BLOCK_M)
        row = (first_row + m // GROUP).to(tl.int64)
        live = row < end_row
        head = kv_head * GROUP + m % GROUP
        column = tl.arange(0, BLOCK_D)
        mask = live[:, None] & (column < HEAD_DIM)[None, :]
        position = tl.load(positions_ptr + row, mask=live, other=-1).to(tl.int32)
        end_key = tl.load(positions_ptr + end_row - 1).to(tl.int32) + 1
        first_key = end_key * 0
        if WINDOW:
            first_key = tl.maximum(tl.load(positions_ptr + first_row).to(tl.int32) - (WINDOW - 1), 0)
        # Of a window, blocks that no row of the tile sees are left out.
        first_block = first_key // BLOCK_N * BLOCK_N
        seen_key = first_block  # of a window every block is masked
        if WINDOW == 0:
            seen_key = (tl.load(positions_ptr + first_row).to(tl.int32) + 1) // BLOCK_N * BLOCK_N
        if READ_BEFORE_WAIT:
            wait(PDL)
        q_places = q_ptr + (row * q_row_stride + head * q_head_stride)[:, None] + column[None, :]
        q = tl.load(q_places, mask=mask, other=0.0)
        out_row = row * (NUM_KV_HEADS * GROUP) + head
        k_ptr += kv_head * HEAD_DIM
        first_value = tl.program_id(0) % PARTS_OF_VALUES * BLOCK_V
        v_ptr += kv_head * HEAD_DIM + first_value
        value = first_value + tl.arange(0, BLOCK_V)
        shown = live[:, None] & (value < HEAD_DIM)[None, :]
        table_row_ptr = page_table_ptr + request * table_stride
        if APART:
            for part in range(tl.program_id(1) % splits, _part_of(end_key - 1, FIRST_PART, FEW) + 1, splits):
                begin = tl.maximum(_begin_of_part(part, FIRST_PART, FEW), first_block)
                end = tl.minimum(_begin_of_part(part + 1, FIRST_PART, FEW), end_key)
                if begin < end:
                    acc, highest, denominator = _attend(
                        q, position, part, k_ptr, v_ptr, table_row_ptr, begin, begin, end, scale_log2,
                        NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, PAGE_SIZE, APART, WINDOW, EIGHT_BITS, FIRST_PART, FEW,
                        BLOCK_M, BLOCK_N, BLOCK_V
                    )  # fmt: skip
                    at = out_row * num_parts + part
                    tl.store(stats_ptr + at * 2, highest, mask=live)
                    tl.store(stats_ptr + at * 2 + 1, denominator, mask=live)
                    tl.store(out_ptr + at[:, None] * HEAD_DIM + value[None, :], acc, mask=shown)
        else:
            acc, highest, denominator = _attend(
                q, position, _part_of(first_key, FIRST_PART, FEW), k_ptr, v_ptr, table_row_ptr, first_block, seen_key,
                end_key, scale_log2, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, PAGE_SIZE, APART, WINDOW, EIGHT_BITS,
                FIRST_PART, FEW, BLOCK_M, BLOCK_N, BLOCK_V
            )  # fmt: skip
            acc = _finished(acc, highest, denominator, sinks_ptr + head, live, v_scale, SINKS)
            tl.store(out_ptr + out_row[:, None] * HEAD_DIM + value[None, :], acc, mask=shown)
    elif READ_BEFORE_WAIT:
        wait(PDL)


@TritonKernel
def _attend(
    q: tl.tensor, position: tl.tensor, part: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, table_row_ptr: tl.tensor,
    first_key: tl.tensor, seen_key: tl.tensor, end_key: tl.tensor, scale_log2: float,
    CACHE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, APART: tl.constexpr,
    WINDOW: tl.constexpr, EIGHT_BITS: tl.constexpr, FIRST_PART: tl.constexpr, FEW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Keys first_key..end_key - 1, from a block of `part` on. Returns (sum of p V, highest score, sum of p).

    `seen_key`: where blocks end that all rows see whole, which take no mask. Of parts apart, each block takes one.
    """
    part_acc, part_sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32), tl.zeros([BLOCK_M, 16], tl.float32)
    part_highest, denominator = empty_softmax(BLOCK_M)
    acc, highest = part_acc, part_highest
    ones = tl.full([BLOCK_N, 16], 1.0, q.dtype)
    part_end = _begin_of_part(part + 1, FIRST_PART, FEW)
    for masked in tl.static_range(1 if APART else 0, 2):
        begin = first_key if APART or not masked else seen_key
        for block in range(begin, end_key if masked else seen_key, BLOCK_N):
            part_acc, part_highest, part_sums = _attend_to_block(
                q, ones, position, part_acc, part_highest, part_sums, k_ptr, v_ptr, table_row_ptr, block, end_key,
                scale_log2, CACHE_STRIDE, HEAD_DIM, PAGE_SIZE, masked, WINDOW, EIGHT_BITS, BLOCK_N, q.shape[1]
            )  # fmt: skip
            if not APART:  # noqa: SIM102 (the outer condition is the compiler's)
                if block + BLOCK_N >= part_end:
                    acc, highest, denominator = _merged(
                        acc, highest, denominator, part_acc, part_highest, tl.max(part_sums, axis=1)
                    )  # fmt: skip
                    part_acc, part_sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32), tl.zeros([BLOCK_M, 16], tl.float32)
                    part_highest = tl.full([BLOCK_M], -1.0e30, tl.float32)
                    part += 1
                    part_end = _begin_of_part(part + 1, FIRST_PART, FEW)
    if APART:
        return part_acc, part_highest, tl.max(part_sums, axis=1)
    acc, highest, denominator = _merged(
        acc, highest, denominator, part_acc, part_highest, tl.max(part_sums, axis=1)
    )  # fmt: skip
    return acc, highest, denominator


@TritonKernel
def _attend_to_block(
    q: tl.tensor, ones: tl.tensor, position: tl.tensor, acc: tl.tensor, highest: tl.tensor, sums: tl.tensor,
    k_ptr: tl.tensor, v_ptr: tl.tensor, table_row_ptr: tl.tensor, block: tl.tensor, end_key: tl.tensor,
    scale_log2: float,
    CACHE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, EIGHT_BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """One step of a part's online softmax, over keys block..block + BLOCK_N - 1. Not MASKED: all rows see them all.

    The one multiplication that is fused with an addition is written as such, so it is in every tile.
    """
    column, value = tl.arange(0, BLOCK_D), tl.arange(0, acc.shape[1])
    inside = column < HEAD_DIM
    key = block + tl.arange(0, BLOCK_N)
    valid = key < (end_key if MASKED else block + BLOCK_N)
    page = tl.load(table_row_ptr + key // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
    offset = (page * PAGE_SIZE + key % PAGE_SIZE) * CACHE_STRIDE
    k = tl.load(k_ptr + offset[None, :] + column[:, None], mask=inside[:, None] & valid[None, :], other=0.0)
    v = tl.load(v_ptr + offset[:, None] + value[None, :], mask=valid[:, None] & (value < HEAD_DIM)[None, :], other=0.0)
    if EIGHT_BITS:
        k, v = of_16_bits(k, q.dtype, EIGHT_BITS), of_16_bits(v, q.dtype, EIGHT_BITS)
    else:
        k, v = k.to(q.dtype), v.to(q.dtype)
    acc, highest, sums = _attend_to_keys(q, ones, position, acc, highest, sums, k, v, key, scale_log2, MASKED, WINDOW)
    return acc, highest, sums


@TritonKernel
def _attend_to_keys(
    q: tl.tensor, ones: tl.tensor, position: tl.tensor, acc: tl.tensor, highest: tl.tensor, sums: tl.tensor,
    k: tl.tensor, v: tl.tensor, key: tl.tensor, scale_log2: float, MASKED: tl.constexpr, WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The same over keys that are there. Shapes: k [D, N], v [N, D], key [N]."""
    scores = tl.dot(q, k, input_precision="ieee")
    if MASKED:
        seen = key[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1) * scale_log2)
    p = tl.exp2(tl.fma(scores, scale_log2, -new_highest[:, None])).to(q.dtype)
    rescale = tl.exp2(highest - new_highest)[:, None]
    sums = tl.dot(p, ones, sums * rescale, input_precision="ieee")
    acc = tl.dot(p, v, acc * rescale, input_precision="ieee")
    return acc, new_highest, sums


@TritonKernel.with_options(do_not_specialize=("num_parts",))
def _merge_kernel(
    partial_ptr: tl.tensor, stats_ptr: tl.tensor, positions_ptr: tl.tensor, out_ptr: tl.tensor, sinks_ptr: tl.tensor,
    v_scale: float, num_parts: int, WINDOW: tl.constexpr, SINKS: tl.constexpr, READ_BEFORE_WAIT: tl.constexpr,
    FIRST_PART: tl.constexpr, FEW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, head): the parts of which the row sees a key, in order. A program wrote each of them."""
    let_next_begin(PDL)
    if not READ_BEFORE_WAIT:
        wait(PDL)
    position = tl.load(positions_ptr + tl.program_id(0)).to(tl.int32)
    first_key = tl.maximum(position - (WINDOW - 1), 0) if WINDOW else position * 0
    first_part = _part_of(first_key, FIRST_PART, FEW)
    end_part = tl.minimum(_part_of(position, FIRST_PART, FEW) + 1, num_parts)
    out_row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = column < HEAD_DIM
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    highest, denominator = empty_softmax(1)
    one = tl.arange(0, 1)
    if READ_BEFORE_WAIT:
        wait(PDL)
    for part in range(first_part, end_part):
        place = out_row * num_parts + part
        part_acc = tl.load(partial_ptr + place * HEAD_DIM + column, mask=inside, other=0.0)
        part_highest, part_denominator = tl.load(stats_ptr + place * 2 + one), tl.load(stats_ptr + place * 2 + 1 + one)
        acc, highest, denominator = _merged(acc, highest, denominator, part_acc, part_highest, part_denominator)
    acc = _finished(acc, highest, denominator, sinks_ptr + tl.program_id(1) + one, one < 1, v_scale, SINKS)
    tl.store(out_ptr + out_row * HEAD_DIM + column, acc, mask=inside)
