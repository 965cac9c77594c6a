"""Attention of a decode or verify step in one launch: rotates q and k, writes k and v, attends, combines the splits.

Each request has the same W rows at consecutive positions p .. p + W - 1. Blocks of cached keys go to the splits in
turn, so the first keys of a split do not depend on the length. The last active split also takes the new rows, which it
reads from qkv:

    keys 0 .. p - 1 in blocks | 0 | 1 | 2 | 3 | 4 |   new rows p .. p + W - 1
    3 active splits             0   1   2   0   1     2 (rotates k, writes k and v, causal mask)

So no program reads cache rows that another program writes in the same launch. The number of splits comes from shapes
alone; the number of active splits comes from the request's length, on the device. The active split that arrives last at
a counter combines the outputs, in the order of the splits, and resets the counter to zero.

Rows of a layer that attends to another one's keys have queries alone: then k and v of the new rows are read from the
cache, where that layer has written them.

The number of splits is the same for all requests, or from a table that `divide_keys` has made of their lengths. Without
one, a long request among short ones is read by as few programs as each of them.

There are five kernels. On Hopper, for up to 16 (row, head) pairs of a usual head size in 16 bits, keys pass through
shared memory: of 16 bits in `_decode_attention_gluon`, of 8 in `_decode_attention_8bit`; and for few requests with a
page table or a window of up to 2,048 keys in bfloat16, splits combine there too (`short_decode`). One request's heads
of 512 have three launches (`large_heads`). In all other cases, sinks and longer windows included, keys wait in
registers, or in shared memory in some of the largest heads (`_BLOCKS`), whose blocks of keys would fill the registers
(`_decode_attention_kernel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.attention import large_heads
from overlap_spec_kernels.attention._decode_attention_8bit import decode_attention_8bit_kernel
from overlap_spec_kernels.attention._decode_attention_gluon import decode_attention_gluon_kernel
from overlap_spec_kernels.attention._decode_attention_kernel import decode_attention_kernel
from overlap_spec_kernels.attention.decode_shares import Division, decode_shares
from overlap_spec_kernels.attention.kv_format import NO_SCALES, KVScales, fits_cache
from overlap_spec_kernels.attention.paged_attention import paged_attention_reference, require_sinks
from overlap_spec_kernels.attention.rope_kv_write import rope_kv_write_reference, rotate_heads
from overlap_spec_kernels.attention.short_decode import Step, attend, parts_of, takes
from overlap_spec_kernels.launch import ceil_div, dependent_launch, next_power_of_2, require, runs_gluon, runs_triton
from overlap_spec_kernels.limits import MAX_CHAIN_WIDTH, MAX_GROUP
from overlap_spec_kernels.norm.norm_heads import HeadNorms, norm_heads

_MAX_BLOCK_M = 64  # rows times heads of a tile
_BLOCK_BYTES = 16384  # of K, and of V, in one block
_KEYS_PER_SPLIT = 8  # per row of a tile: combining a split costs about as much as reading that many keys
_UNEVEN = 4  # a table pays where one program may get so many of the smallest splits
_COMBINED_AT_ONCE = 8192  # elements of the splits' outputs that a program holds while it combines them
# With so few rows the next kernel begins when all keys are asked for: what it copies would be ahead of them. With more
# rows, an attention's end leaves multiprocessors to it (benchmarks/results/choosing/layers_h200.txt).
_LATE_ROWS = 32
_WIDE_HEAD = 256  # columns; larger heads (Gemma 4) have small tiles: 32 pairs spill registers
_LOG2_E = 1.4426950408889634


class _Ring(NamedTuple):
    """The ring in shared memory that a program's keys pass through: 16-bit heads and few rows only."""

    warps: int
    keys: int  # keys of one warp in a block; a block is no larger than the smallest split
    stages: int  # blocks that are loading at once
    combined: int  # splits whose outputs a program holds at once to combine them


# By head dimension: 64 KB and 96 KB.
_RINGS = {64: _Ring(4, 32, 2, combined=8), 128: _Ring(4, 16, 3, combined=4)}
# 192 KB for one request's full tiles, whose programs have a multiprocessor each: as much is loading as with two
# programs of 96 KB, two programs cannot crowd one multiprocessor, and twice as many warps hide each other's waits.
_DEEP_RINGS = {128: _Ring(8, 16, 3, combined=16)}
# As many bytes of keys of 8 bits: more keys at once, because widening them keeps warps busy. So does a single row.
_RINGS_8BIT = {64: _Ring(4, 32, 4, combined=8), 128: _Ring(4, 32, 3, combined=4)}
_DEEP_RINGS_8BIT = {128: _Ring(8, 32, 3, combined=16)}


class _Block(NamedTuple):
    """How cached keys are read."""

    keys: int  # read at once
    warps: int
    ahead: int  # blocks of keys in shared memory behind the one that is multiplied; 0: one, in registers
    combined: int  # splits whose outputs a program holds at once to combine them


# Of 16 bits, by head dimension, and rows times heads of a tile.
_BLOCKS = {(512, 16): _Block(32, 8, 3, combined=4)}
# Of one request, whose programs have a multiprocessor each.
_BLOCKS_ALONE = {(256, 16): _Block(64, 8, 0, combined=8), (256, 32): _Block(64, 8, 0, combined=4)} | _BLOCKS


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Memory through which the splits of `decode_attention` combine. Launches on one stream may share it.

    P programs, of at most 64 rows and heads each. The counters are zero between launches.
    """

    outputs: Tensor  # [P * 64, d padded] f32, attention over the split's own keys
    weights: Tensor  # [P * 64] f32, log2 of the sum of 2^score over those keys
    counters: Tensor  # [P] i32, splits that have arrived

    @classmethod
    def allocate(cls, head_dim: int, device: torch.device, num_programs: int | None = None) -> DecodeScratch:
        """Scratch for heads up to `head_dim`. By default P is twice a GPU's multiprocessors, and 1 on a CPU.

        A launch has at most P programs: with a smaller P, splits are fewer and longer.
        """
        if num_programs is None and device.type != "cuda":
            num_programs = 1
        elif num_programs is None:
            num_programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        num_rows = num_programs * _MAX_BLOCK_M
        return cls(
            outputs=torch.empty((num_rows, 2 * _padded_half(head_dim)), dtype=torch.float32, device=device),
            weights=torch.empty(num_rows, dtype=torch.float32, device=device),
            counters=torch.zeros(num_programs, dtype=torch.int32, device=device),
        )


def decode_attention(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    page_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scratch: DecodeScratch,
    scale: float,
    read_before_wait: bool = False,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
    shares: Tensor | None = None,
    sinks: Tensor | None = None,
    writes: bool = True,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Write the rows' rotated k and v into their cache rows; softmax(q K^T * scale) V over keys 0..p for each row.

    With a sliding window: over keys max(0, p - window + 1)..p. Earlier keys are not read.

    W = T / B consecutive rows of qkv belong to request b, at consecutive positions, with every earlier key in the
    cache. Cache row = page * page_size + offset; page-table entries beyond a request's last position are never
    followed. q and k are rotated in float32 and rounded; scores and sums are float32 (float64 for float64).
    read_before_wait: an ordinary launch ran after positions, page_table and the earlier keys were written, so these are
    read before the wait for the kernels before this one (PDL); only qkv is read after it. shares: of `divide_keys`, for
    the same requests in the same order, read when positions are. With a window, on a CPU and in short page tables it is
    of no use. sinks: a logit of each head that takes part in its softmax and adds nothing. Without `writes` qkv has
    queries alone, and k and v of the rows are in the cache. They are read after the wait. norms: of q and k, before all
    else (`norm_heads`); qkv may be overwritten.
    Shapes: qkv [T, (nq + 2 nkv) d], cos_sin [positions, d] (cos, then sin; float32 or float64), positions [T] i64,
    page_table [B, P] i32, caches [num_pages, page_size, nkv, d], shares [S] i64, sinks [nq] -> [T, nq * d].
    Raises: ValueError naming the argument. Sync: never on CUDA.
    """
    num_rows, num_requests, (_, _, num_kv_heads, head_dim) = qkv.shape[0], page_table.shape[0], k_cache.shape
    require(k_cache.is_contiguous() and head_dim % 2 == 0, "k_cache", "[num_pages, page_size, nkv, d], contiguous")
    require(v_cache.shape == k_cache.shape and v_cache.is_contiguous(), "v_cache", "the shape of k_cache, contiguous")
    require(fits_cache(qkv.dtype, k_cache), "k_cache", "the dtype of qkv, or 8 bits")
    require(v_cache.dtype == k_cache.dtype, "v_cache", "the dtype of k_cache")
    require(qkv.dim() == 2 and qkv.stride(1) == 1, "qkv", "[T, (nq + 2 nkv) d] with a contiguous last dimension")
    group, rest = divmod(qkv.shape[1] - 2 * writes * num_kv_heads * head_dim, num_kv_heads * head_dim)
    require(rest == 0 and 1 <= group <= MAX_GROUP, "qkv", "1 to 16 query heads for each head of the cache")
    require(cos_sin.dim() == 2 and cos_sin.shape[1] == head_dim and cos_sin.is_contiguous(), "cos_sin", "[P, d]")
    _require_places(positions, page_table, num_rows)
    width, rest = divmod(num_rows, num_requests)
    require(rest == 0 and 1 <= width <= MAX_CHAIN_WIDTH, "page_table", "B requests of the same 1 to 16 rows each")
    require(scratch.outputs.shape[1] >= head_dim, "scratch", "room for the head dimension")
    require(window is None or window >= 1, "window", "at least 1")
    is_table = shares is None or (shares.dtype == torch.int64 and len(shares) > num_requests)
    require(is_table, "shares", "[S] int64, more than requests")
    require_sinks(sinks, group * num_kv_heads)
    inputs = (qkv, cos_sin, positions, page_table, k_cache, v_cache)
    parts = parts_of(Step(*inputs)) if writes and runs_triton(qkv) else ()
    if parts and all(takes(part, window, sinks) for part in parts):
        return attend(parts, scale, read_before_wait, norms, window)
    if norms is not None:
        norm_heads(qkv, norms.query, norms.key, num_kv_heads, norms.eps)
    if not runs_triton(qkv):
        return decode_attention_reference(*inputs, scale, window, scales, sinks, writes)
    return _decode_attention_triton(*inputs, scratch, scale, read_before_wait, window, scales, shares, sinks, writes)


def _require_places(positions: Tensor, page_table: Tensor, num_rows: int) -> None:
    """Raises: ValueError naming the argument."""
    require(page_table.dim() == 2 and page_table.dtype == torch.int32, "page_table", "[B, P] int32")
    require(page_table.stride(1) == 1, "page_table", "a contiguous last dimension")
    require(positions.shape == (num_rows,) and positions.dtype == torch.int64, "positions", "[T] int64")
    require(positions.is_contiguous(), "positions", "contiguous")


def decode_attention_reference(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    page_table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
    sinks: Tensor | None = None,
    writes: bool = True,
) -> Tensor:
    """`rope_kv_write`, then `paged_attention`. Sync: reads positions and page_table on the host."""
    num_requests, (_, page_size, num_kv_heads, head_dim) = page_table.shape[0], k_cache.shape
    heads = qkv.unflatten(1, (-1, head_dim))
    places = positions.view(num_requests, -1)
    if writes:
        q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
        pages = page_table.gather(1, places // page_size).long()
        cache_rows = (pages * page_size + places % page_size).flatten()
        q = rope_kv_write_reference(q, k, v, cos_sin, positions, cache_rows, k_cache, v_cache, scales)
    else:
        q = rotate_heads(heads, cos_sin, positions)
    row_starts = torch.arange(num_requests + 1, dtype=torch.int32, device=qkv.device) * places.shape[1]
    rows = (q, k_cache, v_cache, page_table, row_starts, positions)
    return paged_attention_reference(*rows, scale, window, scales, sinks).flatten(1)


def _padded_half(head_dim: int) -> int:
    """Columns of a padded half head: a power of two, and two halves fill the smallest side of a tensor-core product."""
    return max(next_power_of_2(head_dim // 2), 8)


class _Tiling(NamedTuple):
    """How the rows, heads and keys of a request are divided among programs, chosen from shapes alone."""

    rows: int  # rows of a tile
    block_m: int  # rows times query heads of a KV head, padded
    block: _Block  # of cached keys
    num_tiles: int
    num_splits: int


def _tiling(
    width: int, dtype: torch.dtype, page_table: Tensor, k_cache: Tensor, group: int, num_programs: int,
    window: int | None,
) -> _Tiling:  # fmt: skip
    """Fill tiles with heads first, then rows; then split the keys among as many programs as run at once."""
    num_requests, (_, page_size, num_kv_heads, head_dim) = page_table.shape[0], k_cache.shape
    largest_m = 16 if dtype == torch.float32 or head_dim > _WIDE_HEAD else _MAX_BLOCK_M
    block_m = max(min(next_power_of_2(width * group), largest_m), 16)
    rows = min(block_m // group, width)
    num_tiles = ceil_div(width, rows)
    block = _block_of(dtype, k_cache, block_m, num_requests == 1)
    capacity = page_table.shape[1] * page_size
    most_splits = ceil_div(capacity if window is None else min(capacity, window), _KEYS_PER_SPLIT * block_m)
    if num_requests == 1:
        num_programs = max(num_programs // 2, 1)  # one request has enough splits; idle programs would slow it down
    num_splits = min(num_programs // (num_requests * num_kv_heads * num_tiles), most_splits)
    return _Tiling(rows, block_m, block, num_tiles, max(num_splits, 1))


def _block_of(dtype: torch.dtype, k_cache: Tensor, block_m: int, is_alone: bool) -> _Block:
    head_dim = k_cache.shape[3]
    columns, in_16_bits = 2 * _padded_half(head_dim), dtype.itemsize == 2 == k_cache.element_size()
    if in_16_bits and (known := (_BLOCKS_ALONE if is_alone else _BLOCKS).get((head_dim, block_m))):
        return known
    crowded = block_m == _MAX_BLOCK_M or dtype == torch.float32  # large sums or operands in registers
    block_bytes = _BLOCK_BYTES // 2 if crowded else _BLOCK_BYTES
    keys = min(max(block_bytes // (columns * dtype.itemsize), 16), 128)
    warps = 8 if dtype == torch.float32 or head_dim > _WIDE_HEAD else 4
    return _Block(keys, warps, 0, max(_COMBINED_AT_ONCE // (block_m * columns), 1))


def divide_keys(
    lengths: Tensor, page_table: Tensor, k_cache: Tensor, num_heads: int, width: int, dtype: torch.dtype,
    scratch: DecodeScratch,
) -> Tensor | None:  # fmt: skip
    """The shares of a step whose requests have `lengths` keys in the cache and `width` rows in `dtype` each.

    None where every request may as well get the same: on a CPU, for one request, or in a short page table. A request's
    result depends on its number of splits, by a rounding.
    Shapes: lengths [B] i64, page_table [B, P] i32 -> [S] i64. Sync: never.
    """
    num_requests, (_, page_size, num_kv_heads, _) = page_table.shape[0], k_cache.shape
    if num_requests == 1 or not runs_triton(lengths) or dtype == torch.float64:
        return None
    num_programs = scratch.counters.shape[0]
    tiling = _tiling(width, dtype, page_table, k_cache, num_heads // num_kv_heads, num_programs, None)
    min_keys, at_once = _KEYS_PER_SPLIT * tiling.block_m, num_programs // (num_kv_heads * tiling.num_tiles)
    if page_table.shape[1] * page_size <= _UNEVEN * min_keys * tiling.num_splits or at_once < 2:
        return None
    # Requests of equal length then get what they get without a table, and as many programs work. Where that is one for
    # each, programs are added for longer requests; if they are not needed, they end at once. They take no time where
    # there is room for them beside the others, and little elsewhere.
    equal, room = num_requests * tiling.num_splits, at_once - num_requests
    added = 0 if tiling.num_splits > 1 else room if room > at_once // 4 else at_once // 2
    return decode_shares(lengths, Division(equal + added, at_once, min_keys))


def _most_split(shares: Tensor, num_requests: int) -> int:
    """The table's first entries, of requests with several splits, are at most so many."""
    return min(len(shares), 2 * (len(shares) - num_requests))


def _decode_attention_triton(
    qkv: Tensor, cos_sin: Tensor, positions: Tensor, page_table: Tensor, k_cache: Tensor, v_cache: Tensor,
    scratch: DecodeScratch, scale: float, read_before_wait: bool = False, window: int | None = None,
    scales: KVScales = NO_SCALES, shares: Tensor | None = None, sinks: Tensor | None = None, writes: bool = True,
) -> Tensor:  # fmt: skip
    num_rows, num_requests, (_, page_size, num_kv_heads, head_dim) = qkv.shape[0], page_table.shape[0], k_cache.shape
    width, group = num_rows // num_requests, qkv.shape[1] // (num_kv_heads * head_dim) - 2 * writes
    if large_heads.takes(qkv, page_table, k_cache, v_cache, group, window, sinks):
        rows = (qkv, cos_sin, positions, page_table, k_cache, v_cache)
        return large_heads.attend(*rows, scratch.outputs, scratch.weights, scale * _LOG2_E, group, writes)
    num_programs = scratch.counters.shape[0]
    tiling = _tiling(width, qkv.dtype, page_table, k_cache, group, num_programs, window)
    num_splits, grid = tiling.num_splits, (num_kv_heads * tiling.num_splits, num_requests, tiling.num_tiles)
    places = num_programs // (num_kv_heads * tiling.num_tiles)  # in scratch, for each head and tile
    if shares is None or window is not None or _most_split(shares, num_requests) > places:
        shares = None
    else:
        num_splits, grid = places, (num_kv_heads, len(shares), tiling.num_tiles)
    out = torch.empty((num_rows, num_kv_heads * group * head_dim), dtype=qkv.dtype, device=qkv.device)
    arguments = (
        *(qkv, cos_sin, positions, page_table, k_cache, v_cache, out),
        *(scratch.outputs, scratch.weights, scratch.counters),
        positions if shares is None else shares,
    )
    sizes = qkv.stride(0), page_table.stride(0), page_table.shape[1] * page_size, num_splits
    scale_log2 = scale * scales.k * _LOG2_E
    shared = {"WIDTH": width, "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "PAGE_SIZE": page_size}
    shared |= {"READ_BEFORE_WAIT": read_before_wait, "UNEVEN": shares is not None}
    shared |= {"KEYS_PER_SPLIT": _KEYS_PER_SPLIT * tiling.block_m, **dependent_launch(qkv.device, num_rows)}
    in_ring = window is None and sinks is None and writes
    if in_ring and (ring := _ring_for(qkv, k_cache, v_cache, width * group, num_requests)):
        _in_ring(ring, grid, arguments, scale_log2, scales, sizes, shared)
        return out
    decode_attention_kernel[grid](
        *(*arguments, positions if sinks is None else sinks),
        *(scale_log2, 1.0 / scales.k, 1.0 / scales.v, scales.v, *sizes),
        TILE_ROWS=tiling.rows,
        HALF=head_dim // 2,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block.keys,
        BLOCK_W=MAX_CHAIN_WIDTH,
        BLOCK_HALF=_padded_half(head_dim),
        WINDOW=window or 0,
        SINKS=sinks is not None,
        WRITES=writes,
        COMBINED=tiling.block.combined,
        AHEAD=tiling.block.ahead,
        num_warps=tiling.block.warps,
        num_stages=1,  # the kernel itself reads ahead
        **shared,
    )
    return out


def _ring_for(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, rows: int, num_requests: int) -> _Ring | None:
    """The ring for a tile of `rows` (row, head) pairs; None where the Triton kernel runs."""
    if qkv.dtype not in (torch.bfloat16, torch.float16) or rows > 16 or not runs_gluon(qkv.device):
        return None
    if k_cache.data_ptr() % 16 or v_cache.data_ptr() % 16:  # one thread copies 16 bytes
        return None
    head_dim, in_8_bits = k_cache.shape[3], k_cache.dtype != qkv.dtype
    ring = (_RINGS_8BIT if in_8_bits else _RINGS).get(head_dim)
    deep = _DEEP_RINGS_8BIT if in_8_bits else _DEEP_RINGS
    return deep.get(head_dim, ring) if (in_8_bits or rows == 16) and num_requests == 1 else ring


def _in_ring(
    ring: _Ring,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    scale_log2: float,
    scales: KVScales,
    sizes: tuple[int, ...],
    constants: dict[str, int],
) -> None:
    """Launch the kernel whose keys pass through shared memory: so few rows make one tile."""
    qkv, cos_sin, positions, page_table, k_cache, v_cache, *others = tensors
    constants |= {"WARPS": ring.warps, "KEYS": ring.keys, "STAGES": ring.stages, "COMBINED": ring.combined}
    constants |= {"HEAD": k_cache.shape[3], "num_warps": ring.warps}
    constants["KEYS_PER_SPLIT"] = max(constants["KEYS_PER_SPLIT"], ring.warps * ring.keys)
    constants["LATE"] = len(qkv) <= _LATE_ROWS
    if k_cache.dtype == qkv.dtype:
        decode_attention_gluon_kernel[grid](*tensors, scale_log2, *sizes, **constants)
        return
    pairs = k_cache.view(torch.int16), v_cache.view(torch.int16)
    factors = scale_log2, 1.0 / scales.k, 1.0 / scales.v, scales.v
    constants["E4M3"] = k_cache.dtype == torch.float8_e4m3fn
    decode_attention_8bit_kernel[grid](
        *(qkv, cos_sin, positions, page_table, *pairs, *others, *factors, *sizes), **constants
    )
