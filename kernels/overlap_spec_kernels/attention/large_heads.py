"""Decode attention of one request's heads of 512 columns on Hopper (Gemma 4's full layers), in three launches.

    rope_kv_write        rotates q and k, writes k and v into the cache
    large_heads_kernel   a program takes a part of the keys, and up to 64 pairs of a row and a query head of its KV head
    sum_parts_kernel     a program takes some columns of one row and head

Keys are read once for all rows. Registers hold 16 pairs of q at most, and tiles of 16 would read all keys once each.
Here two warpgroups multiply from shared memory, 64 KB each, swizzled by 128 bytes:

    q         [pairs, 512]
    k, v      [keys, 512]                   zeros where there is no key
    scores    [pairs, keys] -> weights      a warpgroup has half of the keys, and then half of the columns

Keys of the next block come while weights are computed and values are multiplied, its values while keys are. Blocks go
to the parts in turn, as in `decode_attention`. How many parts there are follows from shapes, how many of them have keys
from the length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.attention._tree_attention_gluon import _ask_for_rows, _weigh
from overlap_spec_kernels.attention.rope_kv_write import _rope_kv_write_triton
from overlap_spec_kernels.language import ampere, barrier, cuda, gl, hopper, tl, wait_for_inputs
from overlap_spec_kernels.launch import (
    GluonKernel,
    TritonKernel,
    ceil_div,
    dependent_launch,
    next_power_of_2,
    runs_warpgroups,
)

_HEAD = 512
_PAIRS = 64  # of a row and a head, in a tile
_KEYS = 64  # of a block
_WARPS = 8
_SUMMED = 8192  # numbers of all parts that a program of the sum holds


def takes(
    qkv: Tensor, page_table: Tensor, k_cache: Tensor, v_cache: Tensor, group: int, window: int | None,
    sinks: Tensor | None,
) -> bool:  # fmt: skip
    """Whether these shapes are for this kernel."""
    in_16_bits = qkv.dtype in (torch.bfloat16, torch.float16) and k_cache.dtype == qkv.dtype
    is_one = len(page_table) == 1 and window is None and sinks is None
    fits = k_cache.shape[3] == _HEAD and len(qkv) * group <= _PAIRS
    aligned = k_cache.data_ptr() % 16 == 0 == v_cache.data_ptr() % 16
    return in_16_bits and is_one and fits and aligned and runs_warpgroups(qkv.device)


def attend(
    qkv: Tensor, cos_sin: Tensor, positions: Tensor, page_table: Tensor, k_cache: Tensor, v_cache: Tensor,
    outputs: Tensor, weights: Tensor, scale_log2: float, group: int, writes: bool,
) -> Tensor:  # fmt: skip
    """See `decode_attention`. outputs, weights: its scratch, of twice as many programs as there are multiprocessors.

    scale_log2: the scale for powers of two. Sync: never.
    """
    (_, page_size, num_kv_heads, _), num_rows, device = k_cache.shape, len(qkv), qkv.device
    num_heads = group * num_kv_heads
    q, k, v = qkv.unflatten(1, (-1, _HEAD)).split((num_heads, *2 * (num_kv_heads * writes,)), dim=1)
    q = _rope_kv_write_triton(q, k, v, cos_sin, positions, page_table[0], k_cache, v_cache)
    multiprocessors, blocks = len(weights) // (2 * _PAIRS), ceil_div(page_table.shape[1] * page_size, _KEYS)
    num_parts = max(min(multiprocessors // num_kv_heads, blocks), 1)
    padded = next_power_of_2(num_parts)
    columns = min(_SUMMED // padded, _HEAD)
    sizes = {"WIDTH": num_rows, "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "HEAD": _HEAD, "PAIRS": _PAIRS}
    sizes |= {"KEYS": _KEYS, **dependent_launch(device, num_rows)}
    large_heads_kernel[(num_kv_heads, num_parts)](
        *(q, positions, page_table, k_cache, v_cache, outputs, weights, scale_log2, num_parts),
        PAGE_SIZE=page_size,
        WARPS=_WARPS,
        num_warps=_WARPS,
        **sizes,
    )
    out = torch.empty((num_rows, num_heads * _HEAD), dtype=qkv.dtype, device=device)
    sum_parts_kernel[(num_rows * num_heads, _HEAD // columns)](
        *(outputs, weights, positions, out, num_parts),
        PARTS=padded,
        COLUMNS=columns,
        num_warps=4,
        **sizes,
    )
    return out


@GluonKernel.with_options(do_not_specialize=("num_parts",))
def large_heads_kernel(
    q_ptr: gl.tensor, positions_ptr: gl.tensor, page_table_ptr: gl.tensor, k_cache_ptr: gl.tensor,
    v_cache_ptr: gl.tensor, outputs_ptr: gl.tensor, weights_ptr: gl.tensor, scale_log2: float, num_parts: int,
    WIDTH: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, PAIRS: gl.constexpr,
    KEYS: gl.constexpr, PAGE_SIZE: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """Program (KV head, part); m of its pairs is (row, head). scale_log2: the scale for powers of two."""
    LANES: gl.constexpr = HEAD // 256  # warps that copy one key
    GROUPS: gl.constexpr = WARPS // 4
    copy: gl.constexpr = gl.BlockedLayout([KEYS * LANES // WARPS, 8], [1, 32], [WARPS // LANES, LANES], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, KEYS // GROUPS, 16])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, HEAD // GROUPS, 16])
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    q = gl.allocate_shared_memory(dtype, [PAIRS, HEAD], shared)
    k = gl.allocate_shared_memory(dtype, [KEYS, HEAD], shared)
    v = gl.allocate_shared_memory(dtype, [KEYS, HEAD], shared)
    kv_head, part = gl.program_id(0), gl.program_id(1)
    num_keys = gl.load(positions_ptr).to(gl.int32) + WIDTH
    active = gl.minimum(gl.cdiv(num_keys, KEYS), num_parts)
    if part < active:
        k_ptr, v_ptr = k_cache_ptr + kv_head * HEAD, v_cache_ptr + kv_head * HEAD
        first, stride = part * KEYS, active * KEYS
        m = gl.arange(0, PAIRS, gl.SliceLayout(1, copy))
        pair = m // GROUP * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP
        _ask_for_rows(q, q_ptr, pair * HEAD, m < WIDTH * GROUP)
        page = _pages_of_keys(page_table_ptr, first, num_keys, PAGE_SIZE, KEYS, copy)
        _ask_for_keys(k, k_ptr, page, first, num_keys, NUM_KV_HEADS, PAGE_SIZE)
        _ask_for_keys(v, v_ptr, page, first, num_keys, NUM_KV_HEADS, PAGE_SIZE)
        acc, highest, denominator = _attend_to_part(
            q, k, v, k_ptr, v_ptr, page_table_ptr, first, stride, num_keys, scale_log2, WIDTH, NUM_KV_HEADS, GROUP,
            PAGE_SIZE, copy, scores_layout, mma
        )  # fmt: skip
        ampere.async_copy.wait_group(0)  # copies of zeros
        denominator = gl.where(denominator > 0.0, denominator, 1.0)  # a row may see no key of this part
        weight = highest * scale_log2 + gl.log2(denominator)
        m = gl.arange(0, PAIRS, gl.SliceLayout(1, scores_layout))
        place = (kv_head * num_parts + part) * PAIRS
        gl.store(weights_ptr + place + m, weight, mask=m < WIDTH * GROUP)
        m = gl.arange(0, PAIRS, gl.SliceLayout(1, mma))
        column = gl.expand_dims(gl.arange(0, HEAD, gl.SliceLayout(0, mma)), 0)
        output = acc / gl.expand_dims(gl.convert_layout(denominator, gl.SliceLayout(1, mma)), 1)
        offset = gl.expand_dims((place + m) * HEAD, 1) + column
        gl.store(outputs_ptr + offset, output, mask=gl.expand_dims(m < WIDTH * GROUP, 1))


@GluonKernel
def _attend_to_part(
    q: gl.shared_memory_descriptor, k: gl.shared_memory_descriptor, v: gl.shared_memory_descriptor,
    k_ptr: gl.tensor, v_ptr: gl.tensor, page_table_ptr: gl.tensor, first: gl.tensor, stride: gl.tensor,
    num_keys: gl.tensor, scale_log2: float, WIDTH: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr, copy: gl.constexpr, scores_layout: gl.constexpr, mma: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Attend to every stride-th block of keys. The first one's K is on its way, and behind it its V."""
    KEYS: gl.constexpr = k.shape[0]
    HEAD: gl.constexpr = k.shape[1]
    PAIRS: gl.constexpr = q.shape[0]
    highest = gl.full([PAIRS], -1.0e30, gl.float32, gl.SliceLayout(1, scores_layout))  # finite: no NaN with -inf
    denominator = gl.zeros([PAIRS], gl.float32, gl.SliceLayout(1, scores_layout))
    acc = gl.zeros([PAIRS, HEAD], gl.float32, mma)
    zeros = gl.zeros([PAIRS, KEYS], gl.float32, scores_layout)
    key = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(0, scores_layout)), 0)
    own = num_keys - WIDTH + gl.arange(0, PAIRS, gl.SliceLayout(1, scores_layout)) // GROUP
    page = _pages_of_keys(page_table_ptr, first + stride, num_keys, PAGE_SIZE, KEYS, copy)
    for begin in range(first, num_keys, stride):
        ampere.async_copy.wait_group(1)
        hopper.fence_async_shared()
        scores = hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False)
        barrier()  # all warps have read K
        _ask_for_keys(k, k_ptr, page, begin + stride, num_keys, NUM_KV_HEADS, PAGE_SIZE)
        scores = gl.where(begin + key <= gl.expand_dims(own, 1), scores, float("-inf"))
        weights, highest, denominator, rescale = _weigh(scores, highest, denominator, scale_log2, q.dtype, mma)
        acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, mma)), 1)
        ampere.async_copy.wait_group(1)
        hopper.fence_async_shared()
        acc = hopper.warpgroup_mma(weights, v, acc)
        barrier()  # all warps have read V
        _ask_for_keys(v, v_ptr, page, begin + stride, num_keys, NUM_KV_HEADS, PAGE_SIZE)
        page = _pages_of_keys(page_table_ptr, begin + 2 * stride, num_keys, PAGE_SIZE, KEYS, copy)
    return acc, highest, denominator


@GluonKernel
def _pages_of_keys(
    page_table_ptr: gl.tensor, first: gl.tensor, end: gl.tensor, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr,
    copy: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Pages of a block's keys. Shapes: -> [KEYS] i32."""
    key = first + gl.arange(0, KEYS, gl.SliceLayout(1, copy))
    return gl.load(page_table_ptr + key // PAGE_SIZE, mask=key < end, other=0)


@GluonKernel
def _ask_for_keys(
    shared: gl.shared_memory_descriptor, ptr: gl.tensor, page: gl.tensor, first: gl.tensor, end: gl.tensor,
    NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
) -> None:  # fmt: skip
    """Begin to copy keys, or values, of a block; zeros from `end` on. One group of copies."""
    key = first + gl.arange(0, shared.shape[0], page.type.layout)
    row = page.to(gl.int64) * PAGE_SIZE + key % PAGE_SIZE
    _ask_for_rows(shared, ptr, row * (NUM_KV_HEADS * shared.shape[1]), key < end)
    ampere.async_copy.commit_group()


@TritonKernel.with_options(do_not_specialize=("num_parts",))
def sum_parts_kernel(
    outputs_ptr: tl.tensor, weights_ptr: tl.tensor, positions_ptr: tl.tensor, out_ptr: tl.tensor, num_parts: int,
    WIDTH: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, PAIRS: tl.constexpr,
    KEYS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The mean of the parts' outputs, weighted by 2^weight. Program (row and head, columns)."""
    wait_for_inputs(PDL)
    row, head = tl.program_id(0) // (NUM_KV_HEADS * GROUP), tl.program_id(0) % (NUM_KV_HEADS * GROUP)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, PARTS)
    place = (head // GROUP * num_parts + part) * PAIRS + row * GROUP + head % GROUP
    active = tl.minimum(tl.cdiv(tl.load(positions_ptr).to(tl.int32) + WIDTH, KEYS), num_parts)
    weight = tl.load(weights_ptr + place, mask=part < active, other=-1.0e30)
    weight = tl.exp2(weight - tl.max(weight, axis=0))
    output_ptrs = outputs_ptr + tl.expand_dims(place, 1) * HEAD + tl.expand_dims(column, 0)
    output = tl.load(output_ptrs, mask=tl.expand_dims(part < active, 1), other=0.0)
    mean = tl.sum(output * tl.expand_dims(weight, 1), axis=0) / tl.sum(weight, axis=0)
    tl.store(out_ptr + tl.program_id(0) * HEAD + column, mean)
