"""The kernel of `tree_attention` for many rows and heads of 16 bits on Hopper.

A program takes 64 or 128 pairs of a request's rows and a KV head's query heads, and all keys that they attend to. A
warpgroup multiplies from shared memory:

    q         [rows and heads, d]           swizzled by 128 bytes, as is the ring
    ring      [stage] | keys, d |           K, and V; zeros where there is no key, because stale shared memory may hold
                                            NaN, and 0 * NaN is NaN
    scores    [rows and heads, keys] -> weights, without leaving the registers

The first block is the tail: the prefix's keys that do not fill a block, and in the last places the extra keys (two
blocks if they do not fit into one). Every row attends to all keys of the other blocks. While a block's weights are
computed, the previous block's values are multiplied and later blocks are loading.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import ampere, barrier, cuda, gl, hopper
from overlap_spec_kernels.launch import GluonKernel, ceil_div, dependent_launch, next_power_of_2, runs_warpgroups
from overlap_spec_kernels.limits import MASK_BITS

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128)
_FEW = 5  # with this many times fewer programs than fit, long prefixes are split instead
_SMALL = 64  # rows times heads of a tile: one warpgroup product
_PAGES = (16, 32, 64)  # page sizes: a block begins at a page, and each thread copies from one page


class Tiles(NamedTuple):
    """How rows and keys are divided, chosen from shapes alone."""

    block_m: int  # rows times query heads of a KV head, one warp for each 16
    keys: int  # keys in a block: 32 or 64, no fewer than there are extra keys or places in a page
    stages: int  # at least 3
    max_registers: int | None = None  # per thread, so that two programs fit into a multiprocessor

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        prefix: Tensor,
        extra_rows: Tensor,
        mask: Tensor,
        scale_log2: float,
    ) -> Tensor:
        """Launch. Shapes: as `tree_attention`; scale_log2 is the scale for powers of two. Sync: never."""
        (num_rows, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q.shape, k_cache.shape
        num_requests, group = page_table.shape[0], num_heads // num_kv_heads
        width, warps = num_rows // num_requests, self.block_m // 16
        tile_rows = min(self.block_m // group, width)
        out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
        tree_attention_gluon_kernel[(ceil_div(width, tile_rows), num_kv_heads, num_requests)](
            *(q, k_cache, v_cache, page_table, prefix, extra_rows, mask, out),
            *(scale_log2, q.stride(0), q.stride(1), page_table.stride(0), page_table.shape[1] * page_size),
            *(width, extra_rows.shape[1]),
            TILE_ROWS=tile_rows,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            HEAD=head_dim,
            PAGE_SIZE=page_size,
            BLOCK_M=self.block_m,
            KEYS=self.keys,
            STAGES=self.stages,
            ALL_ROWS=next_power_of_2(width),
            WARPS=warps,
            num_warps=warps,
            maxnreg=self.max_registers,
            **dependent_launch(q.device, num_rows),
        )
        return out


def tiles_for(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, num_extra: int, scale: float, num_programs: int
) -> Tiles | None:
    """The division for these shapes; None where this kernel does not apply, or splitting the keys is faster.

    The kernel has no sliding window. num_programs: twice the number of multiprocessors. The sizes were chosen on an
    H200 for prefixes of about 400 keys: four stages leave room for one program per multiprocessor (128 columns), three
    for two. Larger tiles read the keys once instead of twice, which is faster with more programs than run at once.
    """
    (num_rows, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q.shape, k_cache.shape
    if q.dtype not in _DTYPES or head_dim not in _HEAD_DIMS or page_size not in _PAGES or not runs_warpgroups(q.device):
        return None
    if k_cache.dtype != q.dtype:
        return None
    if num_extra > MASK_BITS or scale <= 0 or q.stride(0) % 16 or q.stride(1) % 16:
        return None
    if any(tensor.data_ptr() % 16 for tensor in (q, k_cache, v_cache)):
        return None
    num_requests, group = page_table.shape[0], num_heads // num_kv_heads
    width = num_rows // num_requests
    programs = num_requests * num_kv_heads * ceil_div(width, min(_SMALL // group, width))  # with small tiles
    if programs * _FEW < num_programs:
        return None
    if head_dim == 64 or 2 * programs <= num_programs:
        return Tiles(_SMALL, 64, 4)
    if programs <= num_programs or width * group <= _SMALL or max(num_extra, page_size) > 32:
        return Tiles(_SMALL, 64, 3)
    return Tiles(2 * _SMALL, 32, 4, max_registers=128)


@GluonKernel.with_options(do_not_specialize=("num_rows",))
def tree_attention_gluon_kernel(
    q_ptr: gl.tensor, k_cache_ptr: gl.tensor, v_cache_ptr: gl.tensor, page_table_ptr: gl.tensor,
    prefix_ptr: gl.tensor, extra_rows_ptr: gl.tensor, mask_ptr: gl.tensor, out_ptr: gl.tensor,
    scale_log2: float, q_row_stride: int, q_head_stride: int, table_stride: int, capacity: int,
    num_rows: int, num_extra: int,
    TILE_ROWS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr,
    PAGE_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, ALL_ROWS: gl.constexpr,
    WARPS: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """Program (tile of rows, KV head, request); m of a tile is (row, head). num_rows: rows of a request."""
    LANES: gl.constexpr = HEAD // 8
    EACH: gl.constexpr = KEYS * LANES // (32 * WARPS)  # keys of a block that a thread copies, in one page
    copy: gl.constexpr = gl.BlockedLayout([EACH, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    split: gl.constexpr = gl.BlockedLayout([1, EACH, 8], [32 // LANES, 1, LANES], [WARPS, 1, 1], [2, 1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD, 16])
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    q_shared = gl.allocate_shared_memory(dtype, [BLOCK_M, HEAD], shared)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD], shared)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD], shared)
    tile, kv_head, request = gl.program_id(0), gl.program_id(1), gl.program_id(2).to(gl.int64)
    table_row_ptr = page_table_ptr + request * table_stride
    k_ptr, v_ptr = k_cache_ptr + kv_head * HEAD, v_cache_ptr + kv_head * HEAD
    mask_row_ptr = mask_ptr + request * num_rows
    extra_rows_ptr += request * num_extra
    # Loads that depend on no other load come first. The first pages do not depend on the length: one wait less.
    prefix = gl.load(prefix_ptr + request).to(gl.int32)
    pages = [_load_pages(table_row_ptr, 0, capacity, PAGE_SIZE, KEYS, split)]
    for block in gl.static_range(1, STAGES - 1):
        pages = pages + [_load_pages(table_row_ptr, block * KEYS, capacity, PAGE_SIZE, KEYS, split)]
    row = gl.arange(0, ALL_ROWS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    words = gl.load(mask_row_ptr + row, mask=row < num_rows, other=0)
    extra = gl.arange(0, KEYS, gl.SliceLayout(1, copy)) - (KEYS - num_extra)
    extra_row = gl.load(extra_rows_ptr + extra, mask=extra >= 0, other=0)
    q_ptr += request * num_rows * q_row_stride + kv_head * GROUP * q_head_stride
    _ask_for_q(q_shared, q_ptr, tile, num_rows, q_row_stride, q_head_stride, TILE_ROWS, GROUP, copy)
    barrier()  # otherwise the compiler delays the copies until the first of the loads has arrived
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores_layout))
    row = tile * TILE_ROWS + m // GROUP
    word = gl.load(mask_row_ptr + row, mask=(m // GROUP < TILE_ROWS) & (row < num_rows), other=0)
    num_full = prefix // KEYS
    tail = prefix % KEYS
    apart = tail + num_extra > KEYS
    seen = _bits_of_extra(gl.reduce(words, 0, _either), num_extra, KEYS)
    if apart:  # extra keys in stage 0, the prefix's tail in stage 1
        _ask_for_tail(
            k_ring.index(0), v_ring.index(0), k_ptr, v_ptr, table_row_ptr, extra_row, seen, 0, tail * 0,
            NUM_KV_HEADS, PAGE_SIZE
        )  # fmt: skip
        seen = seen & 0
    _ask_for_tail(
        k_ring.index(1), v_ring.index(1), k_ptr, v_ptr, table_row_ptr, extra_row, seen, num_full * KEYS,
        tail, NUM_KV_HEADS, PAGE_SIZE
    )  # fmt: skip
    ampere.async_copy.commit_group()
    for block in gl.static_range(STAGES - 2):
        _ask_for_block(
            k_ring.index(block + 2), v_ring.index(block + 2), k_ptr, v_ptr, pages[block],
            block < num_full, NUM_KV_HEADS, PAGE_SIZE, split, copy
        )  # fmt: skip
        ampere.async_copy.commit_group()
    bits = _bits_of_extra(word, num_extra, KEYS)
    weights, acc, highest, denominator = _attend_to_tail(
        q_shared, k_ring, v_ring, bits, tail, apart, scale_log2, scores_layout, mma
    )  # fmt: skip
    acc, denominator = _attend_to_blocks(
        q_shared, k_ring, v_ring, weights, acc, highest, denominator, k_ptr, v_ptr, table_row_ptr,
        pages[STAGES - 2], prefix, scale_log2, NUM_KV_HEADS, PAGE_SIZE, scores_layout, split, copy
    )  # fmt: skip
    ampere.async_copy.wait_group(0)
    _store(out_ptr, acc, denominator, request, tile, kv_head, num_rows, TILE_ROWS, NUM_KV_HEADS, GROUP, LANES, WARPS)


@GluonKernel
def _attend_to_tail(
    q: gl.shared_memory_descriptor, k_ring: gl.shared_memory_descriptor, v_ring: gl.shared_memory_descriptor,
    bits: gl.tensor, tail: gl.tensor, apart: gl.tensor, scale_log2: float, scores_layout: gl.constexpr,
    mma: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Start the softmax with the blocks in stage 0 (the extra keys, if they have a block of their own) and stage 1.

    Returns the weights of stage 1, whose values are not yet added; the sums so far, already rescaled to match those
    weights; the highest score and the denominator.
    """
    STAGES: gl.constexpr = k_ring.shape[0]
    KEYS: gl.constexpr = k_ring.shape[1]
    HEAD: gl.constexpr = k_ring.shape[2]
    BLOCK_M: gl.constexpr = q.shape[0]
    highest = gl.full([BLOCK_M], -1.0e30, gl.float32, gl.SliceLayout(1, scores_layout))  # finite: no NaN with -inf
    denominator = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, scores_layout))
    acc = gl.zeros([BLOCK_M, HEAD], gl.float32, mma)
    zeros = gl.zeros([BLOCK_M, KEYS], gl.float32, scores_layout)
    ampere.async_copy.wait_group(STAGES - 2)
    hopper.fence_async_shared()
    if apart:
        scores = hopper.warpgroup_mma(q, k_ring.index(0).permute((1, 0)), zeros, use_acc=False)
        scores = _show(scores, bits)
        weights, highest, denominator, _ = _weigh(scores, highest, denominator, scale_log2, q.dtype, mma)
        acc = hopper.warpgroup_mma(weights, v_ring.index(0), acc)
        bits = bits & 0
    scores = hopper.warpgroup_mma(q, k_ring.index(1).permute((1, 0)), zeros, use_acc=False)
    scores = _show(scores, bits | _ones(tail))
    weights, highest, denominator, rescale = _weigh(scores, highest, denominator, scale_log2, q.dtype, mma)
    acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, mma)), 1)
    return weights, acc, highest, denominator


@GluonKernel
def _attend_to_blocks(
    q: gl.shared_memory_descriptor, k_ring: gl.shared_memory_descriptor, v_ring: gl.shared_memory_descriptor,
    weights: gl.tensor, acc: gl.tensor, highest: gl.tensor, denominator: gl.tensor, k_ptr: gl.tensor,
    v_ptr: gl.tensor, table_row_ptr: gl.tensor, page: gl.tensor, prefix: gl.tensor, scale_log2: float,
    NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, scores_layout: gl.constexpr, split: gl.constexpr,
    copy: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """Continue with the full blocks of the prefix, unmasked; `page` is that of the first block not yet requested."""
    STAGES: gl.constexpr = k_ring.shape[0]
    KEYS: gl.constexpr = k_ring.shape[1]
    BLOCK_M: gl.constexpr = q.shape[0]
    mma: gl.constexpr = acc.type.layout
    zeros = gl.zeros([BLOCK_M, KEYS], gl.float32, scores_layout)
    num_full = prefix // KEYS
    last, stage, free = 1, 2 % STAGES, 0
    for block in range(0, num_full):
        ampere.async_copy.wait_group(STAGES - 3)
        hopper.fence_async_shared()
        k = k_ring.index(stage).permute((1, 0))
        scores = hopper.warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        acc = hopper.warpgroup_mma(weights, v_ring.index(last), acc, is_async=True)
        # The free stage's products have ended. A branch here would also wait for the running ones, before the weights.
        ahead = block + STAGES - 2
        _ask_for_block(
            k_ring.index(free), v_ring.index(free), k_ptr, v_ptr, page, ahead < num_full, NUM_KV_HEADS, PAGE_SIZE,
            split, copy
        )  # fmt: skip
        page = _load_pages(table_row_ptr, (ahead + 1) * KEYS, prefix, PAGE_SIZE, KEYS, split)
        ampere.async_copy.commit_group()
        scores = hopper.warpgroup_mma_wait(num_outstanding=1, deps=[scores])
        next_weights, highest, denominator, rescale = _weigh(scores, highest, denominator, scale_log2, q.dtype, mma)
        acc, weights = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc, weights])
        weights = next_weights
        acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, mma)), 1)
        free = gl.where(free == STAGES - 1, 0, free + 1)
        last, stage = stage, gl.where(stage == STAGES - 1, 0, stage + 1)
    return hopper.warpgroup_mma(weights, v_ring.index(last), acc), denominator


@GluonKernel
def _load_pages(
    table_row_ptr: gl.tensor, first: gl.tensor, end: gl.tensor, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr,
    split: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Pages of a block's keys, one in each thread. Shapes: -> [KEYS / keys of a thread] i32."""
    EACH: gl.constexpr = split.size_per_thread[1]
    key = first + gl.arange(0, KEYS // EACH, gl.SliceLayout(1, gl.SliceLayout(2, split))) * EACH
    return gl.load(table_row_ptr + key // PAGE_SIZE, mask=key < end, other=0)


@GluonKernel
def _ask_for_q(
    q_shared: gl.shared_memory_descriptor, q_ptr: gl.tensor, tile: gl.tensor, num_rows: int, q_row_stride: int,
    q_head_stride: int, TILE_ROWS: gl.constexpr, GROUP: gl.constexpr, copy: gl.constexpr,
) -> None:  # fmt: skip
    """Begin to copy q's rows and heads of a tile, with zeros for padding."""
    m = gl.arange(0, q_shared.shape[0], gl.SliceLayout(1, copy))
    row = tile * TILE_ROWS + m // GROUP
    live = (m // GROUP < TILE_ROWS) & (row < num_rows)
    _ask_for_rows(q_shared, q_ptr, row * q_row_stride + m % GROUP * q_head_stride, live)


@GluonKernel
def _ask_for_tail(
    k: gl.shared_memory_descriptor, v: gl.shared_memory_descriptor, k_ptr: gl.tensor, v_ptr: gl.tensor,
    table_row_ptr: gl.tensor, extra_row: gl.tensor, seen: gl.tensor, begin: gl.tensor, tail: gl.tensor,
    NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
) -> None:  # fmt: skip
    """Begin to copy `tail` keys of the prefix from `begin` on, and the extra keys whose bit in `seen` is set.

    Other extra keys are not read: their memory may be unwritten. Shapes: extra_row [KEYS], seen [] u64.
    """
    t = gl.arange(0, k.shape[0], extra_row.type.layout)
    page = gl.load(table_row_ptr + (begin + t) // PAGE_SIZE, mask=t < tail, other=0).to(gl.int64)
    row = gl.where(t < tail, page * PAGE_SIZE + (begin + t) % PAGE_SIZE, extra_row)
    wanted = ((seen | _ones(tail)) >> t.to(gl.uint64)) & 1
    offset = row * (NUM_KV_HEADS * k.shape[1])
    _ask_for_rows(k, k_ptr, offset, wanted != 0)
    _ask_for_rows(v, v_ptr, offset, wanted != 0)


@GluonKernel
def _bits_of_extra(word: gl.tensor, num_extra: int, KEYS: gl.constexpr) -> gl.tensor:
    """Shift a mask word to the bits of a block, whose last keys are the extra ones. Shapes: any i64 -> u64."""
    bits = word.to(gl.uint64, bitcast=True) << (gl.full([], 64, gl.uint64) - num_extra)
    return bits >> (64 - KEYS)


@GluonKernel
def _ones(count: gl.tensor) -> gl.tensor:
    """An integer whose `count` lowest bits are set, at most 63. Shapes: [] i32 -> [] u64."""
    return (gl.full([], 1, gl.uint64) << count.to(gl.uint64)) - 1


@GluonKernel
def _show(scores: gl.tensor, bits: gl.tensor) -> gl.tensor:
    """Set scores of keys whose bit is clear to -inf. Shapes: scores [rows and heads, KEYS], bits [rows and heads]."""
    t = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout)).to(gl.uint64)
    return gl.where(((gl.expand_dims(bits, 1) >> gl.expand_dims(t, 0)) & 1) != 0, scores, float("-inf"))


@GluonKernel
def _either(left: gl.tensor, right: gl.tensor) -> gl.tensor:
    return left | right


@GluonKernel
def _ask_for_block(
    k: gl.shared_memory_descriptor, v: gl.shared_memory_descriptor, k_ptr: gl.tensor, v_ptr: gl.tensor,
    page: gl.tensor, wanted: gl.tensor, NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, split: gl.constexpr,
    copy: gl.constexpr,
) -> None:  # fmt: skip
    """Begin to copy a block of keys from the given pages, or zeros if it is not wanted."""
    EACH: gl.constexpr = split.size_per_thread[1]
    thread = gl.arange(0, page.shape[0], page.type.layout) * EACH
    base = page.to(gl.int64) * PAGE_SIZE + thread % PAGE_SIZE
    each = gl.arange(0, EACH, gl.SliceLayout(0, gl.SliceLayout(2, split)))
    row = gl.expand_dims(base, 1) + gl.expand_dims(each, 0)
    row = gl.convert_layout(row.reshape([k.shape[0]]), gl.SliceLayout(1, copy), assert_trivial=True)
    offset = row * (NUM_KV_HEADS * k.shape[1])
    wanted = gl.full([k.shape[0]], 0, gl.int1, gl.SliceLayout(1, copy)) | wanted
    _ask_for_rows(k, k_ptr, offset, wanted)
    _ask_for_rows(v, v_ptr, offset, wanted)


@GluonKernel
def _ask_for_rows(shared: gl.shared_memory_descriptor, ptr: gl.tensor, offset: gl.tensor, wanted: gl.tensor) -> None:
    """Begin to copy rows of a head's columns, 16 bytes a thread. Shapes: shared [n, d], offset, wanted [n]."""
    column = gl.expand_dims(gl.arange(0, shared.shape[1], gl.SliceLayout(0, offset.type.layout.parent)), 0)
    ampere.async_copy.async_copy_global_to_shared(
        shared, ptr + (gl.expand_dims(offset, 1) + column), mask=gl.expand_dims(wanted, 1)
    )


@GluonKernel
def _weigh(
    scores: gl.tensor, highest: gl.tensor, denominator: gl.tensor, scale_log2: float, dtype: gl.constexpr,
    mma: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """One step of the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), in powers of two.

    `highest` is unscaled, which is valid because scale_log2 > 0. Returns the weights as the left operand of a product,
    the new highest score and denominator, and the factor that rescales earlier sums.
    """
    new_highest = gl.maximum(highest, gl.max(scores, axis=1))
    p = gl.exp2(scores * scale_log2 - gl.expand_dims(new_highest * scale_log2, 1))
    rescale = gl.exp2((highest - new_highest) * scale_log2)
    weights = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, mma, 2))
    return weights, new_highest, denominator * rescale + gl.sum(p, axis=1), rescale


@GluonKernel
def _store(
    out_ptr: gl.tensor, acc: gl.tensor, denominator: gl.tensor, request: gl.tensor, tile: gl.tensor,
    kv_head: gl.tensor, num_rows: int, TILE_ROWS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    LANES: gl.constexpr, WARPS: gl.constexpr,
) -> None:  # fmt: skip
    """Store the quotients, 16 bytes a thread. Shapes: acc [rows and heads, d], denominator [rows and heads]."""
    denominator = gl.where(denominator > 0.0, denominator, 1.0)  # a row without keys: 0, not NaN
    acc = acc / gl.expand_dims(gl.convert_layout(denominator, gl.SliceLayout(1, acc.type.layout)), 1)
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), copy)
    m = gl.arange(0, acc.shape[0], gl.SliceLayout(1, copy))
    row = tile * TILE_ROWS + m // GROUP
    live = (m // GROUP < TILE_ROWS) & (row < num_rows)
    head = (request * num_rows + row) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP
    column = gl.expand_dims(gl.arange(0, acc.shape[1], gl.SliceLayout(0, copy)), 0)
    gl.store(out_ptr + gl.expand_dims(head * acc.shape[1], 1) + column, out, mask=gl.expand_dims(live, 1))
