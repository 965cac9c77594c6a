"""The Triton functions of `decode_attention`: one program per KV head and split, request, tile of rows."""

from __future__ import annotations

from overlap_spec_kernels.attention.kv_format import to_cache
from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel


@TritonKernel.with_options(do_not_specialize=("num_splits",))
def decode_attention_kernel(
    qkv_ptr: tl.tensor, cos_sin_ptr: tl.tensor, positions_ptr: tl.tensor, page_table_ptr: tl.tensor,
    k_cache_ptr: tl.tensor, v_cache_ptr: tl.tensor, out_ptr: tl.tensor,
    outputs_ptr: tl.tensor, weights_ptr: tl.tensor, counters_ptr: tl.tensor,
    shares_ptr: tl.tensor, sinks_ptr: tl.tensor, scale_log2: float, inverse_k: float, inverse_v: float, v_scale: float,
    qkv_stride: int, table_stride: int, capacity: int, num_splits: int,
    WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HALF: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_HALF: tl.constexpr, KEYS_PER_SPLIT: tl.constexpr, COMBINED: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, WRITES: tl.constexpr, READ_BEFORE_WAIT: tl.constexpr,
    UNEVEN: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (KV head and split, request, tile of rows); m of a block is (row, head). Not WRITES: queries alone."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL and not READ_BEFORE_WAIT:
        tl.extra.cuda.gdc_wait()
    kv_head, request, split, splits, place = _share(shares_ptr, num_splits, NUM_KV_HEADS, UNEVEN)
    if UNEVEN and splits == 0:  # an entry left over
        if PDL and READ_BEFORE_WAIT:
            tl.extra.cuda.gdc_wait()
        return
    first_row = request * WIDTH
    num_cached = tl.load(positions_ptr + first_row).to(tl.int32)
    table_row_ptr = page_table_ptr + request * table_stride
    lowest_key = 0
    if WINDOW:  # 0 for rows that see all keys up to their own; the first row's window begins first
        lowest_key = tl.maximum(num_cached - (WINDOW - 1), 0)
    first_key = lowest_key + split * BLOCK_N
    key = first_key + tl.arange(0, BLOCK_N)
    page = tl.load(table_row_ptr + key // PAGE_SIZE, mask=key < capacity, other=0)  # before the length: one wait less
    # A split has at least KEYS_PER_SPLIT >= BLOCK_N keys, so if one active split has a block, every one has.
    active = tl.minimum(tl.maximum(tl.cdiv(num_cached - lowest_key, KEYS_PER_SPLIT), 1), splits)
    k_cache_ptr += kv_head * (2 * HALF)
    v_cache_ptr += kv_head * (2 * HALF)
    num_first = tl.where(split < active, num_cached, 0)  # keys that the first block may hold
    k, v = _load_block(k_cache_ptr, v_cache_ptr, page, key, num_first, NUM_KV_HEADS, PAGE_SIZE, HALF, BLOCK_HALF)
    if PDL and READ_BEFORE_WAIT:  # only qkv was not there yet
        tl.extra.cuda.gdc_wait()
    if split < active:
        m = tl.arange(0, BLOCK_M)
        row = tl.program_id(2) * TILE_ROWS + m // GROUP
        live = (m // GROUP < TILE_ROWS) & (row < WIDTH)
        q_ptr = qkv_ptr + (first_row + row) * qkv_stride + (kv_head * GROUP + m % GROUP) * (2 * HALF)
        q = _load_rotated(q_ptr, cos_sin_ptr + (num_cached + row) * (2 * HALF), live, HALF, BLOCK_HALF)
        # The last split also takes the new rows, and computes them while the first block is loading.
        is_last = split == active - 1
        new = tl.arange(0, BLOCK_W)
        new_live = (new < WIDTH) & is_last
        if WRITES:
            k_ptr = qkv_ptr + (first_row + new) * qkv_stride + (NUM_KV_HEADS * GROUP + kv_head) * (2 * HALF)
            new_k = _load_rotated(k_ptr, cos_sin_ptr + (num_cached + new) * (2 * HALF), new_live, HALF, BLOCK_HALF)
            new_v = _load_heads(k_ptr + NUM_KV_HEADS * 2 * HALF, new_live, HALF, BLOCK_HALF)
            kept: tl.constexpr = k_cache_ptr.dtype.element_ty
            new_k, new_v = to_cache(new_k, inverse_k, kept), to_cache(new_v, inverse_v, kept)
            if is_last & (tl.program_id(2) == 0):
                _write_cache(
                    new_k, new_v, k_cache_ptr, v_cache_ptr, table_row_ptr, num_cached + new, new_live,
                    NUM_KV_HEADS, PAGE_SIZE, HALF, BLOCK_HALF
                )  # fmt: skip
        else:
            new_page = tl.load(table_row_ptr + (num_cached + new) // PAGE_SIZE, mask=new_live, other=0)
            new_end = tl.where(is_last, num_cached + WIDTH, 0)
            new_k, new_v = _load_block(
                k_cache_ptr, v_cache_ptr, new_page, num_cached + new, new_end, NUM_KV_HEADS, PAGE_SIZE, HALF, BLOCK_HALF
            )
        highest, denominator = empty_softmax(BLOCK_M)
        if SINKS:
            highest, denominator = softmax_of_sinks(sinks_ptr + kv_head * GROUP + m % GROUP, live & is_last)
        acc, highest, denominator = _attend_to_new(
            q, new_k, new_v, new, row, is_last, highest, denominator, scale_log2, WINDOW
        )  # fmt: skip
        output, weight = _attend_to_cache(
            q, k, v, acc, highest, denominator, k_cache_ptr, v_cache_ptr, table_row_ptr, first_key,
            active * BLOCK_N, num_cached, row, scale_log2, NUM_KV_HEADS, PAGE_SIZE, HALF, WINDOW, BLOCK_N, BLOCK_HALF,
            AHEAD
        )  # fmt: skip
        output = output * v_scale
        out_row = (first_row + row) * NUM_KV_HEADS + kv_head
        target_ptr = out_ptr + (out_row * GROUP + m % GROUP) * (2 * HALF)
        if active == 1:
            _store_heads(target_ptr, output, live, HALF, BLOCK_HALF)
        else:
            outputs_ptr += place * (BLOCK_M * 2 * BLOCK_HALF)
            weights_ptr += place * BLOCK_M
            _publish(output, weight, outputs_ptr, weights_ptr, split, splits, live, BLOCK_M, BLOCK_HALF)
            if _arrive(counters_ptr + place, active):
                output = _combine(outputs_ptr, weights_ptr, active, splits, live, BLOCK_M, BLOCK_HALF, COMBINED)
                _store_heads(target_ptr, output, live, HALF, BLOCK_HALF)


@TritonKernel
def _share(
    shares_ptr: tl.tensor, num_splits: int, NUM_KV_HEADS: tl.constexpr, UNEVEN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """This program's KV head, request and split, the request's number of splits, and the first one's place in scratch.

    From the table of `decode_shares`, or the same number for all. A place belongs to one split.
    """
    if UNEVEN:
        kv_head, entry = tl.program_id(0), tl.program_id(1)
        share = tl.load(shares_ptr + entry)
        request = share >> 32
        split, splits = (share >> 16 & 65535).to(tl.int32), (share & 65535).to(tl.int32)
        unit, offset = kv_head.to(tl.int64), entry - split
    else:
        kv_head, split = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
        request = tl.program_id(1).to(tl.int64)
        splits = num_splits
        unit, offset = request * NUM_KV_HEADS + kv_head, 0
    return kv_head, request, split, splits, (unit * tl.num_programs(2) + tl.program_id(2)) * num_splits + offset


@TritonKernel
def _columns(HALF: tl.constexpr, BLOCK_HALF: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Offsets of the columns of a head with padded halves, and which of them are not padding."""
    column = tl.arange(0, 2 * BLOCK_HALF)
    return column // BLOCK_HALF * HALF + column % BLOCK_HALF, column % BLOCK_HALF < HALF


@TritonKernel
def _load_heads(x_ptr: tl.tensor, live: tl.tensor, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr) -> tl.tensor:
    """Shapes: pointers [n], live [n] -> [n, 2 BLOCK_HALF]."""
    column, inside = _columns(HALF, BLOCK_HALF)
    return tl.load(x_ptr[:, None] + column[None, :], mask=live[:, None] & inside[None, :], other=0.0)


@TritonKernel
def _store_heads(x_ptr: tl.tensor, x: tl.tensor, live: tl.tensor, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr) -> None:
    """Shapes: pointers [n], x [n, 2 BLOCK_HALF], live [n]."""
    column, inside = _columns(HALF, BLOCK_HALF)
    tl.store(x_ptr[:, None] + column[None, :], x, mask=live[:, None] & inside[None, :])


@TritonKernel
def _load_rotated(
    x_ptr: tl.tensor, angle_ptr: tl.tensor, live: tl.tensor, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr
) -> tl.tensor:
    """Load heads, rotate them in float32 and round. A column's partner in the other half comes from the L1 cache.

    Shapes: pointers [n] to heads and to their angles, live [n] -> [n, 2 BLOCK_HALF].
    """
    column = tl.arange(0, 2 * BLOCK_HALF)
    half, angle = column // BLOCK_HALF, column % BLOCK_HALF
    mask = live[:, None] & (angle < HALF)[None, :]
    x = tl.load(x_ptr[:, None] + (half * HALF + angle)[None, :], mask=mask, other=0.0)
    partner = tl.load(x_ptr[:, None] + ((1 - half) * HALF + angle)[None, :], mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(angle_ptr[:, None] + angle[None, :], mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(angle_ptr[:, None] + (HALF + angle)[None, :], mask=mask, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * cos + partner * tl.where(half == 0, -1.0, 1.0)[None, :] * sin).to(x.dtype)


@TritonKernel
def _write_cache(
    k: tl.tensor, v: tl.tensor, k_cache_ptr: tl.tensor, v_cache_ptr: tl.tensor, table_row_ptr: tl.tensor,
    key: tl.tensor, live: tl.tensor, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:  # fmt: skip
    column, inside = _columns(HALF, BLOCK_HALF)
    page = tl.load(table_row_ptr + key // PAGE_SIZE, mask=live, other=0).to(tl.int64)
    place = ((page * PAGE_SIZE + key % PAGE_SIZE) * (NUM_KV_HEADS * 2 * HALF))[:, None] + column[None, :]
    mask = live[:, None] & inside[None, :]
    tl.store(k_cache_ptr + place, k, mask=mask)
    tl.store(v_cache_ptr + place, v, mask=mask)


@TritonKernel
def empty_softmax(ROWS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The highest score, in powers of two, and the denominator of rows that have seen no key.

    The score is finite: with -inf a difference would be NaN.
    """
    return tl.full([ROWS], -1.0e30, tl.float32), tl.zeros([ROWS], tl.float32)


@TritonKernel
def softmax_of_sinks(sink_ptrs: tl.tensor, seen: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The same of rows that have seen their sink alone; of others, as nothing. Shapes: pointers [n], seen [n]."""
    sink = tl.load(sink_ptrs, mask=seen, other=-1.0e30).to(tl.float32) * 1.4426950408889634
    return tl.where(sink < -1.0e30, -1.0e30, sink), seen.to(tl.float32)


@TritonKernel
def _attend_to_new(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, new: tl.tensor, row: tl.tensor, is_last: tl.tensor, highest: tl.tensor,
    denominator: tl.tensor, scale_log2: float, WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Continue the softmax, in the last split with the new keys up to each row's own.

    Without a window every row attends to the first new key. Returns the sum of p V, the highest score, the sum of p.
    """
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    if is_last:
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale_log2
        scores = tl.where(new[None, :] <= row[:, None], scores, float("-inf"))
        if WINDOW:
            scores = tl.where(new[None, :] > row[:, None] - WINDOW, scores, float("-inf"))
        acc, highest, denominator = _absorb(scores, v.to(q.dtype), acc, highest, denominator)
    return acc, highest, denominator


@TritonKernel
def _load_block(
    k_ptr: tl.tensor, v_ptr: tl.tensor, page: tl.tensor, key: tl.tensor, num_cached: tl.tensor,
    NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """K and V of a block of keys from the given pages, zero from num_cached on."""
    column, inside = _columns(HALF, BLOCK_HALF)
    mask = (key < num_cached)[:, None] & inside[None, :]
    row = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
    place = (row * (NUM_KV_HEADS * 2 * HALF))[:, None] + column[None, :]
    return tl.load(k_ptr + place, mask=mask, other=0.0), tl.load(v_ptr + place, mask=mask, other=0.0)


@TritonKernel
def _attend_to_cache(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, acc: tl.tensor, highest: tl.tensor, denominator: tl.tensor,
    k_ptr: tl.tensor, v_ptr: tl.tensor, table_row_ptr: tl.tensor, first_key: tl.tensor, stride: tl.tensor,
    num_cached: tl.tensor, row: tl.tensor, scale_log2: float, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HALF: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_HALF: tl.constexpr, AHEAD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Attend to every stride-th block of cached keys; k and v hold the first. Without a window nothing is masked.

    While a block is multiplied, registers hold the next block and the pages of the one after it; or, if AHEAD, shared
    memory holds the next blocks, the first included, and k and v are not used.
    Returns the mean of V, weighted by 2^score, and log2 of the sum of the weights.
    """
    if AHEAD > 0:
        for begin in tl.range(first_key, num_cached, stride, num_stages=AHEAD + 2):
            each = begin + tl.arange(0, BLOCK_N)
            of_each = tl.load(table_row_ptr + each // PAGE_SIZE, mask=each < num_cached, other=0)
            keys, values = _load_block(
                k_ptr, v_ptr, of_each, each, num_cached, NUM_KV_HEADS, PAGE_SIZE, HALF, BLOCK_HALF
            )
            scores = _scores(q, keys, each, num_cached, row, scale_log2, WINDOW)
            acc, highest, denominator = _absorb(scores, values.to(q.dtype), acc, highest, denominator)
    else:
        key = first_key + tl.arange(0, BLOCK_N)
        page = tl.load(table_row_ptr + (key + stride) // PAGE_SIZE, mask=key + stride < num_cached, other=0)
        for _ in range(first_key, num_cached, stride):
            scores = _scores(q, k, key, num_cached, row, scale_log2, WINDOW)
            key += stride
            k, next_v = _load_block(k_ptr, v_ptr, page, key, num_cached, NUM_KV_HEADS, PAGE_SIZE, HALF, BLOCK_HALF)
            page = tl.load(table_row_ptr + (key + stride) // PAGE_SIZE, mask=key + stride < num_cached, other=0)
            acc, highest, denominator = _absorb(scores, v.to(q.dtype), acc, highest, denominator)
            v = next_v
    if WINDOW:  # a split may have no key in a row's window: avoid 0 / 0
        denominator = tl.where(denominator > 0.0, denominator, 1.0)
    return acc / denominator[:, None], highest + tl.log2(denominator)


@TritonKernel
def _scores(
    q: tl.tensor, k: tl.tensor, key: tl.tensor, num_cached: tl.tensor, row: tl.tensor, scale_log2: float,
    WINDOW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Of a block of cached keys. Without a window every row attends to all of them."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale_log2
    scores = tl.where((key < num_cached)[None, :], scores, float("-inf"))
    if WINDOW:
        scores = tl.where(key[None, :] > (num_cached - WINDOW + row)[:, None], scores, float("-inf"))
    return scores


@TritonKernel
def _absorb(
    scores: tl.tensor, v: tl.tensor, acc: tl.tensor, highest: tl.tensor, denominator: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), in powers of two."""
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    p = tl.exp2(scores - new_highest[:, None])
    rescale = tl.exp2(highest - new_highest)
    acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return acc, new_highest, denominator * rescale + tl.sum(p, axis=1)


@TritonKernel
def _publish(
    output: tl.tensor, weight: tl.tensor, outputs_ptr: tl.tensor, weights_ptr: tl.tensor, split: tl.tensor,
    num_splits: int, live: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_HALF: tl.constexpr,
) -> None:  # fmt: skip
    """Store a split's result for `_combine`: outputs [splits, m, d], weights [m, splits]."""
    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, 2 * BLOCK_HALF)
    output_ptrs = outputs_ptr + (split * BLOCK_M + m)[:, None] * (2 * BLOCK_HALF) + column[None, :]
    tl.store(output_ptrs, output, mask=live[:, None])
    tl.store(weights_ptr + m * num_splits + split, weight, mask=live)


@TritonKernel
def _arrive(counter_ptr: tl.tensor, active: tl.tensor) -> tl.tensor:
    """Count this split, after its results are stored: is it the last one? Then the counter is zero again.

    One thread counts for the program. The barrier orders the stores of the others before it; acq_rel then publishes
    them all, and makes those of the splits counted earlier visible to the thread and, through the barrier with
    which it hands the result to the others, to the program. No program counts after the last, so it may reset.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == active - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@TritonKernel
def _combine(
    outputs_ptr: tl.tensor, weights_ptr: tl.tensor, active: tl.tensor, num_splits: int, live: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_HALF: tl.constexpr, COMBINED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The mean of the splits' outputs, weighted by 2^weight, summed in their order. Shapes: -> [BLOCK_M, d padded].

    Read past the L1 cache (.cg), where other programs' stores never arrive. A thread holds the same m and columns
    of every split (the axis of splits is in the middle, where the compiler distributes it last).
    """
    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, 2 * BLOCK_HALF)
    highest = tl.full([BLOCK_M], -1.0e30, tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, 2 * BLOCK_HALF], tl.float32)
    for begin in range(0, active, COMBINED):
        split = begin + tl.arange(0, COMBINED)
        mask = live[:, None] & (split < active)[None, :]
        weight_ptrs = weights_ptr + m[:, None] * num_splits + split[None, :]
        weight = tl.load(weight_ptrs, mask=mask, other=-1.0e30, cache_modifier=".cg")
        rows = split[None, :] * BLOCK_M + m[:, None]
        output_ptrs = outputs_ptr + rows[:, :, None] * (2 * BLOCK_HALF) + column[None, None, :]
        output = tl.load(output_ptrs, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
        new_highest = tl.maximum(highest, tl.max(weight, axis=1))
        rescale = tl.exp2(highest - new_highest)
        weight = tl.exp2(weight - new_highest[:, None])
        acc = acc * rescale[:, None] + tl.sum(output * weight[:, :, None], axis=1)
        denominator = denominator * rescale + tl.sum(weight, axis=1)
        highest = new_highest
    return acc / denominator[:, None]
