"""The Triton functions of `tree_attention`: one program per KV head and split, request, tile of rows.

Splits are combined as in decode attention (`_decode_attention_kernel`).
"""

from __future__ import annotations

from overlap_spec_kernels.attention._decode_attention_kernel import (
    _absorb,
    _arrive,
    _combine,
    _publish,
    empty_softmax,
    softmax_of_sinks,
)
from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel


@TritonKernel.with_options(do_not_specialize=("num_rows", "num_splits"))
def tree_attention_kernel(
    q_ptr: tl.tensor, k_cache_ptr: tl.tensor, v_cache_ptr: tl.tensor, page_table_ptr: tl.tensor,
    prefix_ptr: tl.tensor, extra_rows_ptr: tl.tensor, mask_ptr: tl.tensor, positions_ptr: tl.tensor,
    out_ptr: tl.tensor, outputs_ptr: tl.tensor, weights_ptr: tl.tensor, counters_ptr: tl.tensor, sinks_ptr: tl.tensor,
    scale_log2: float, v_scale: float, q_row_stride: int, q_head_stride: int, table_stride: int,
    num_rows: int, num_extra: int, num_splits: int,
    TILE_ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr, KEYS_PER_SPLIT: tl.constexpr, COMBINED: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (KV head and split, request, tile of rows); m of a block is (row, head). num_rows: rows of a request.

    Blocks of the prefix go to the active splits in turn. The extra keys, and the sinks, go to the split after the last
    block's.
    """
    kv_head, split = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    request = tl.program_id(1).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    row = tl.program_id(2) * TILE_ROWS + m // GROUP
    live = (m // GROUP < TILE_ROWS) & (row < num_rows)
    wait_for_inputs(PDL)
    prefix = tl.load(prefix_ptr + request).to(tl.int32)
    position = tl.zeros([BLOCK_M], tl.int32)
    lowest_key = 0
    if WINDOW:
        position = tl.load(positions_ptr + request * num_rows + row, mask=live, other=1 << 30).to(tl.int32)
        lowest_key = tl.minimum(tl.maximum(tl.min(position, axis=0) - (WINDOW - 1), 0), prefix)
    num_keys = prefix - lowest_key
    active = tl.minimum(tl.maximum(tl.cdiv(num_keys + num_extra, KEYS_PER_SPLIT), 1), num_splits)
    if split < active:
        q_row = (request * num_rows + row) * q_row_stride + (kv_head * GROUP + m % GROUP) * q_head_stride
        column = tl.arange(0, BLOCK_D)
        shown = live[:, None] & (column < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + q_row[:, None] + column[None, :], mask=shown, other=0.0)
        k_cache_ptr += kv_head * HEAD_DIM
        v_cache_ptr += kv_head * HEAD_DIM
        highest, denominator = empty_softmax(BLOCK_M)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        takes_extra = split == tl.cdiv(num_keys, BLOCK_N) % active
        if SINKS:
            highest, denominator = softmax_of_sinks(sinks_ptr + kv_head * GROUP + m % GROUP, live & takes_extra)
        if takes_extra:
            mask_row_ptr = mask_ptr + (request * num_rows + row) * tl.cdiv(num_extra, 64)
            acc, highest, denominator = _attend_to_extra(
                q, acc, highest, denominator, k_cache_ptr, v_cache_ptr, extra_rows_ptr + request * num_extra,
                mask_row_ptr, live, num_extra, scale_log2, NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_E, BLOCK_D
            )  # fmt: skip
        acc, highest, denominator = _attend_to_prefix(
            q, acc, highest, denominator, k_cache_ptr, v_cache_ptr, page_table_ptr + request * table_stride,
            lowest_key + split * BLOCK_N, prefix, active * BLOCK_N, position, scale_log2,
            NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, PAGE_SIZE, WINDOW, BLOCK_N, BLOCK_D
        )  # fmt: skip
        denominator = tl.where(denominator > 0.0, denominator, 1.0)  # a split without keys: avoid 0 / 0
        output, weight = acc / denominator[:, None] * v_scale, highest + tl.log2(denominator)
        out_row = (request * num_rows + row) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP
        target_ptr = out_ptr + (out_row * HEAD_DIM)[:, None] + column[None, :]
        if active == 1:
            tl.store(target_ptr, output, mask=shown)
        else:
            unit = (request * NUM_KV_HEADS + kv_head) * tl.num_programs(2) + tl.program_id(2)
            outputs_ptr += unit * num_splits * (BLOCK_M * BLOCK_D)
            weights_ptr += unit * num_splits * BLOCK_M
            _publish(output, weight, outputs_ptr, weights_ptr, split, num_splits, live, BLOCK_M, BLOCK_D // 2)
            if _arrive(counters_ptr + unit, active):
                output = _combine(outputs_ptr, weights_ptr, active, num_splits, live, BLOCK_M, BLOCK_D // 2, COMBINED)
                tl.store(target_ptr, output, mask=shown)


@TritonKernel
def _attend_to_extra(
    q: tl.tensor, acc: tl.tensor, highest: tl.tensor, denominator: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor,
    rows_ptr: tl.tensor, mask_row_ptr: tl.tensor, live: tl.tensor,
    num_extra: int, scale_log2: float,
    CACHE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Continue the softmax with the extra keys whose bit is set. A block's bits are in one word of the mask.

    A key that no row of the tile attends to is not read: its memory may be unwritten.
    """
    column = tl.arange(0, BLOCK_D)
    inside = column < HEAD_DIM
    bit = tl.arange(0, BLOCK_E)
    for begin in range(0, num_extra, BLOCK_E):
        word = tl.load(mask_row_ptr + begin // 64, mask=live, other=0)
        word = (word >> (begin % 64)).to(tl.int32)  # BLOCK_E <= 32
        visible = (((word[:, None] >> bit[None, :]) & 1) != 0) & (begin + bit < num_extra)[None, :]
        read = tl.max(visible.to(tl.int32), axis=0) > 0
        offset = tl.load(rows_ptr + begin + bit, mask=begin + bit < num_extra, other=0) * CACHE_STRIDE
        k = tl.load(k_ptr + offset[None, :] + column[:, None], mask=inside[:, None] & read[None, :], other=0.0)
        v = tl.load(v_ptr + offset[:, None] + column[None, :], mask=read[:, None] & inside[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale_log2
        scores = tl.where(visible, scores, float("-inf"))
        acc, highest, denominator = _absorb(scores, v.to(q.dtype), acc, highest, denominator)
    return acc, highest, denominator


@TritonKernel
def _attend_to_prefix(
    q: tl.tensor, acc: tl.tensor, highest: tl.tensor, denominator: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor,
    table_row_ptr: tl.tensor, first_key: tl.tensor, prefix: tl.tensor, stride: tl.tensor, position: tl.tensor,
    scale_log2: float,
    CACHE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Continue the softmax with every stride-th block of the prefix. Without a window nothing is masked."""
    column = tl.arange(0, BLOCK_D)
    inside = column < HEAD_DIM
    for block in range(first_key, prefix, stride):
        key = block + tl.arange(0, BLOCK_N)
        valid = key < prefix
        page = tl.load(table_row_ptr + key // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
        offset = (page * PAGE_SIZE + key % PAGE_SIZE) * CACHE_STRIDE
        k = tl.load(k_ptr + offset[None, :] + column[:, None], mask=inside[:, None] & valid[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale_log2
        scores = tl.where(valid[None, :], scores, float("-inf"))
        if WINDOW:
            scores = tl.where(key[None, :] > (position - WINDOW)[:, None], scores, float("-inf"))
        v = tl.load(v_ptr + offset[:, None] + column[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        acc, highest, denominator = _absorb(scores, v.to(q.dtype), acc, highest, denominator)
    return acc, highest, denominator
