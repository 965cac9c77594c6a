"""The kernel of `decode_attention` for few rows of 16-bit heads on Hopper.

Programs divide keys and combine splits as in `_decode_attention_kernel`. Here keys pass through a ring buffer in shared
memory, and each warp of a block has its own keys and its own softmax, so warps exchange nothing until they merge at the
end:

    ring      [stage] | warps, keys of a warp, d |   K, and V; 16 bytes a thread, swizzled
    scores    [warps, 16 (row, head), keys of a warp] -> weights, without leaving the registers

A stage is refilled as soon as it is in registers, so all stages are loading while a block is multiplied.
"""

from __future__ import annotations

from overlap_spec_kernels.language import ampere, barrier, cuda, gl
from overlap_spec_kernels.launch import GluonKernel


@GluonKernel.with_options(do_not_specialize=("num_splits",))
def decode_attention_gluon_kernel(
    qkv_ptr: gl.tensor, cos_sin_ptr: gl.tensor, positions_ptr: gl.tensor, page_table_ptr: gl.tensor,
    k_cache_ptr: gl.tensor, v_cache_ptr: gl.tensor, out_ptr: gl.tensor,
    outputs_ptr: gl.tensor, weights_ptr: gl.tensor, counters_ptr: gl.tensor,
    shares_ptr: gl.tensor, scale_log2: float, qkv_stride: int, table_stride: int, capacity: int, num_splits: int,
    WIDTH: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr,
    PAGE_SIZE: gl.constexpr, WARPS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    KEYS_PER_SPLIT: gl.constexpr, COMBINED: gl.constexpr, READ_BEFORE_WAIT: gl.constexpr, UNEVEN: gl.constexpr,
    PDL: gl.constexpr, LATE: gl.constexpr,
) -> None:  # fmt: skip
    """Program (KV head and split, request); m of its 16 is (row, head). KEYS_PER_SPLIT >= WARPS * KEYS."""
    BLOCK: gl.constexpr = WARPS * KEYS
    LANES: gl.constexpr = HEAD // 8
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    copy: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // LANES, LANES], [WARPS, 1, 1], [2, 1, 0])  # keys
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])  # layout of qkv's heads
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    dtype: gl.constexpr = qkv_ptr.dtype.element_ty
    if PDL and not LATE:
        cuda.gdc_launch_dependents()
    if PDL and not READ_BEFORE_WAIT:
        cuda.gdc_wait()
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, WARPS, KEYS, HEAD], shared)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, WARPS, KEYS, HEAD], shared)
    kv_head, request, split, splits, place = _share(shares_ptr, num_splits, NUM_KV_HEADS, UNEVEN)
    if UNEVEN and splits == 0:  # an entry left over
        if PDL and READ_BEFORE_WAIT:
            cuda.gdc_wait()
        return
    first_row = request * WIDTH
    num_cached = gl.load(positions_ptr + first_row).to(gl.int32)
    table_row_ptr = page_table_ptr + request * table_stride
    first = split * BLOCK
    page = _load_pages(table_row_ptr, first, capacity, PAGE_SIZE, WARPS, KEYS, copy)  # before the length: one wait less
    active = gl.minimum(gl.maximum(gl.cdiv(num_cached, KEYS_PER_SPLIT), 1), splits)
    k_cache_ptr += kv_head * HEAD
    v_cache_ptr += kv_head * HEAD
    stride = active * BLOCK
    end = gl.where(split < active, num_cached, 0)  # end of the cached keys
    page = _fill_ring(
        k_ring, v_ring, k_cache_ptr, v_cache_ptr, table_row_ptr, page, first, stride, end, NUM_KV_HEADS, PAGE_SIZE
    )  # fmt: skip
    if PDL:
        _after_reading(READ_BEFORE_WAIT, LATE)
    if split < active:
        m = gl.arange(0, 16, gl.SliceLayout(1, flat))
        q_ptr = qkv_ptr + (first_row + m // GROUP) * qkv_stride + (kv_head * GROUP + m % GROUP) * HEAD
        q = _load_rotated(q_ptr, cos_sin_ptr + (num_cached + m // GROUP) * HEAD, m < WIDTH * GROUP, HEAD)
        # The last split also takes the new rows, and computes them while the first blocks are loading.
        is_last = split == active - 1
        new_live = (m < WIDTH) & is_last
        k_ptr = qkv_ptr + (first_row + m) * qkv_stride + (NUM_KV_HEADS * GROUP + kv_head) * HEAD
        new_k = _load_rotated(k_ptr, cos_sin_ptr + (num_cached + m) * HEAD, new_live, HEAD)
        new_v = _load_heads(k_ptr + NUM_KV_HEADS * HEAD, new_live, HEAD)
        heads: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        q_shared = gl.allocate_shared_memory(dtype, [16, HEAD], heads, q)
        k_shared = gl.allocate_shared_memory(dtype, [16, HEAD], heads, new_k)
        v_shared = gl.allocate_shared_memory(dtype, [16, HEAD], heads, new_v)
        q = _operand(q_shared, 0, mma)
        highest = gl.full([WARPS, 16], -1.0e30, gl.float32, gl.SliceLayout(2, mma))  # finite: no NaN with -inf
        denominator = gl.zeros([WARPS, 16], gl.float32, gl.SliceLayout(2, mma))
        acc = gl.zeros([WARPS, 16, HEAD], gl.float32, mma)
        if is_last:
            _write_cache(
                new_k, new_v, k_cache_ptr, v_cache_ptr, table_row_ptr, num_cached + m, new_live, NUM_KV_HEADS, PAGE_SIZE
            )  # fmt: skip
            acc, highest, denominator = _attend_to_new(
                q, k_shared, v_shared, acc, highest, denominator, scale_log2, GROUP
            )  # fmt: skip
        acc, highest, denominator = _attend_to_cache(
            q, acc, highest, denominator, k_ring, v_ring, k_cache_ptr, v_cache_ptr, table_row_ptr, page,
            first, stride, end, scale_log2, NUM_KV_HEADS, PAGE_SIZE
        )  # fmt: skip
        output, weight = _merge_warps(acc, highest, denominator)
        _finish(
            output, weight, out_ptr, outputs_ptr, weights_ptr, counters_ptr, request, kv_head, split, active,
            splits, place, WIDTH, NUM_KV_HEADS, GROUP, WARPS, COMBINED
        )  # fmt: skip


@GluonKernel
def _after_reading(READ_BEFORE_WAIT: gl.constexpr, LATE: gl.constexpr) -> None:
    """Keys are asked for: wait for qkv, if nothing else was waited for, and let the next kernel begin, if not yet."""
    if READ_BEFORE_WAIT:
        cuda.gdc_wait()
    if LATE:
        cuda.gdc_launch_dependents()


@GluonKernel
def _share(
    shares_ptr: gl.tensor, num_splits: int, NUM_KV_HEADS: gl.constexpr, UNEVEN: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """This program's KV head, request and split, the request's number of splits, and the first one's place in scratch.

    From the table of `decode_shares`, or the same number for all. A place belongs to one split.
    """
    if UNEVEN:
        kv_head, entry = gl.program_id(0), gl.program_id(1)
        share = gl.load(shares_ptr + entry)
        request = share >> 32
        split, splits = (share >> 16 & 65535).to(gl.int32), (share & 65535).to(gl.int32)
        unit, offset = kv_head.to(gl.int64), entry - split
    else:
        kv_head, split = gl.program_id(0) // num_splits, gl.program_id(0) % num_splits
        request = gl.program_id(1).to(gl.int64)
        splits = num_splits
        unit, offset = request * NUM_KV_HEADS + kv_head, 0
    return kv_head, request, split, splits, unit * num_splits + offset


@GluonKernel
def _axes(
    A: gl.constexpr, B: gl.constexpr, C: gl.constexpr, layout: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Indices into a tensor [A, B, C]. Shapes: -> [A, 1, 1], [1, B, 1], [1, 1, C]."""
    a = gl.arange(0, A, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    b = gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    c = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    a, b, c = gl.expand_dims(a, 1), gl.expand_dims(b, 0), gl.expand_dims(c, 0)
    return gl.expand_dims(a, 2), gl.expand_dims(b, 2), gl.expand_dims(c, 1)


@GluonKernel
def _load_pages(
    table_row_ptr: gl.tensor, first: gl.tensor, end: gl.tensor, PAGE_SIZE: gl.constexpr, WARPS: gl.constexpr,
    KEYS: gl.constexpr, copy: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Pages of a block's keys. Shapes: -> [WARPS, 1] if a warp's keys always share a page, else [WARPS, KEYS]."""
    rows: gl.constexpr = gl.SliceLayout(2, copy)
    key = first + gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, rows)), 1) * KEYS
    if PAGE_SIZE % KEYS:
        key = key + gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(0, rows)), 0)
    return gl.load(table_row_ptr + key // PAGE_SIZE, mask=key < end, other=0)


@GluonKernel
def _fill_ring(
    k_ring: gl.shared_memory_descriptor, v_ring: gl.shared_memory_descriptor, k_ptr: gl.tensor, v_ptr: gl.tensor,
    table_row_ptr: gl.tensor, page: gl.tensor, first: gl.tensor, stride: gl.tensor, end: gl.tensor,
    NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Begin to load the first blocks; `page` is the first block's. Returns the page of the block after them."""
    STAGES: gl.constexpr = k_ring.shape[0]
    WARPS: gl.constexpr = k_ring.shape[1]
    KEYS: gl.constexpr = k_ring.shape[2]
    copy: gl.constexpr = page.type.layout.parent
    pages = [page]
    for step in gl.static_range(1, STAGES + 1):
        pages = pages + [_load_pages(table_row_ptr, first + step * stride, end, PAGE_SIZE, WARPS, KEYS, copy)]
    for step in gl.static_range(STAGES):
        begin = first + step * stride
        _ask_for_block(k_ring, v_ring, step, k_ptr, v_ptr, pages[step], begin, end, NUM_KV_HEADS, PAGE_SIZE)
        ampere.async_copy.commit_group()
    return pages[STAGES]


@GluonKernel
def _ask_for_block(
    k_ring: gl.shared_memory_descriptor, v_ring: gl.shared_memory_descriptor, stage: gl.tensor, k_ptr: gl.tensor,
    v_ptr: gl.tensor, page: gl.tensor, first: gl.tensor, end: gl.tensor, NUM_KV_HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
) -> None:  # fmt: skip
    """Begin to copy a block of keys from the given pages, with zeros from `end` on."""
    KEYS: gl.constexpr = k_ring.shape[2]
    HEAD: gl.constexpr = k_ring.shape[3]
    copy: gl.constexpr = page.type.layout.parent
    warp, key, column = _axes(k_ring.shape[1], KEYS, HEAD, copy)
    key = first + warp * KEYS + key
    row = gl.expand_dims(page, 2).to(gl.int64) * PAGE_SIZE + key % PAGE_SIZE
    place = row * (NUM_KV_HEADS * HEAD) + column
    ampere.async_copy.async_copy_global_to_shared(k_ring.index(stage), k_ptr + place, mask=key < end)
    ampere.async_copy.async_copy_global_to_shared(v_ring.index(stage), v_ptr + place, mask=key < end)


@GluonKernel
def _load_heads(x_ptr: gl.tensor, live: gl.tensor, HEAD: gl.constexpr) -> gl.tensor:
    """Shapes: pointers [16], live [16] -> [16, HEAD]."""
    column = gl.arange(0, HEAD, gl.SliceLayout(0, x_ptr.type.layout.parent))
    return gl.load(gl.expand_dims(x_ptr, 1) + gl.expand_dims(column, 0), mask=gl.expand_dims(live, 1), other=0.0)


@GluonKernel
def _load_rotated(x_ptr: gl.tensor, angle_ptr: gl.tensor, live: gl.tensor, HEAD: gl.constexpr) -> gl.tensor:
    """Load heads, rotate them in float32 and round. A column's partner in the other half comes from the L1 cache.

    Shapes: pointers [16] to heads and to their angles, live [16] -> [16, HEAD].
    """
    HALF: gl.constexpr = HEAD // 2
    column = gl.expand_dims(gl.arange(0, HEAD, gl.SliceLayout(0, x_ptr.type.layout.parent)), 0)
    half, angle = column // HALF, column % HALF
    x_ptr, angle_ptr, mask = gl.expand_dims(x_ptr, 1), gl.expand_dims(angle_ptr, 1), gl.expand_dims(live, 1)
    x = gl.load(x_ptr + column, mask=mask, other=0.0)
    partner = gl.load(x_ptr + ((1 - half) * HALF + angle), mask=mask, other=0.0).to(gl.float32)
    cos = gl.load(angle_ptr + angle, mask=mask, other=0.0).to(gl.float32)
    sin = gl.load(angle_ptr + (HALF + angle), mask=mask, other=0.0).to(gl.float32)
    return (x.to(gl.float32) * cos + partner * gl.where(half == 0, -1.0, 1.0) * sin).to(x.dtype)


@GluonKernel
def _operand(shared: gl.shared_memory_descriptor, INDEX: gl.constexpr, mma: gl.constexpr) -> gl.tensor:
    """The same operand for every warp. Shapes: [n, m] -> [warps, n, m]."""
    layout: gl.constexpr = gl.DotOperandLayout(INDEX, mma, 2)
    shape: gl.constexpr = [mma.warps_per_cta[0], shared.shape[0], shared.shape[1]]
    one = gl.expand_dims(shared.load(gl.SliceLayout(0, layout)), 0)
    each, _ = gl.broadcast(one, gl.zeros(shape, shared.dtype, layout))
    return each


@GluonKernel
def _write_cache(
    k: gl.tensor, v: gl.tensor, k_cache_ptr: gl.tensor, v_cache_ptr: gl.tensor, table_row_ptr: gl.tensor,
    key: gl.tensor, live: gl.tensor, NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
) -> None:  # fmt: skip
    column = gl.arange(0, k.shape[1], gl.SliceLayout(0, k.type.layout))
    page = gl.load(table_row_ptr + key // PAGE_SIZE, mask=live, other=0).to(gl.int64)
    row = (page * PAGE_SIZE + key % PAGE_SIZE) * (NUM_KV_HEADS * k.shape[1])
    place, mask = gl.expand_dims(row, 1) + gl.expand_dims(column, 0), gl.expand_dims(live, 1)
    gl.store(k_cache_ptr + place, k, mask=mask)
    gl.store(v_cache_ptr + place, v, mask=mask)


@GluonKernel
def _attend_to_new(
    q: gl.tensor, k_shared: gl.shared_memory_descriptor, v_shared: gl.shared_memory_descriptor, acc: gl.tensor,
    highest: gl.tensor, denominator: gl.tensor, scale_log2: float, GROUP: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Start the first warp's softmax with the new keys up to each row's own; every row attends to the first one."""
    mma: gl.constexpr = acc.type.layout
    warp, m, new = _axes(acc.shape[0], 16, 16, mma)
    k, v = _operand(k_shared.permute([1, 0]), 1, mma), _operand(v_shared, 1, mma)
    scores = _scores(q, k, (new <= m // GROUP) & (warp == 0), scale_log2, mma)
    acc, highest, denominator = _absorb(scores, v, acc, highest, denominator)
    return acc, highest, denominator


@GluonKernel
def _attend_to_cache(
    q: gl.tensor, acc: gl.tensor, highest: gl.tensor, denominator: gl.tensor, k_ring: gl.shared_memory_descriptor,
    v_ring: gl.shared_memory_descriptor, k_ptr: gl.tensor, v_ptr: gl.tensor, table_row_ptr: gl.tensor,
    page: gl.tensor, first: gl.tensor, stride: gl.tensor, end: gl.tensor, scale_log2: float,
    NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Attend to every stride-th block of cached keys, unmasked; `page` is that of the first block not yet requested."""
    STAGES: gl.constexpr = k_ring.shape[0]
    WARPS: gl.constexpr = k_ring.shape[1]
    KEYS: gl.constexpr = k_ring.shape[2]
    mma: gl.constexpr = acc.type.layout
    copy: gl.constexpr = page.type.layout.parent
    warp, _, key = _axes(WARPS, 16, KEYS, mma)
    key = warp * KEYS + key
    stage = 0
    for begin in range(first, end, stride):
        ampere.async_copy.wait_group(STAGES - 1)
        k = k_ring.index(stage).permute([0, 2, 1]).load(gl.DotOperandLayout(1, mma, 2))
        scores = _scores(q, k, begin + key < end, scale_log2, mma)
        v = v_ring.index(stage).load(gl.DotOperandLayout(1, mma, 2))
        ahead = begin + STAGES * stride
        if ahead < end:
            _ask_for_block(k_ring, v_ring, stage, k_ptr, v_ptr, page, ahead, end, NUM_KV_HEADS, PAGE_SIZE)
            page = _load_pages(table_row_ptr, ahead + stride, end, PAGE_SIZE, WARPS, KEYS, copy)
        ampere.async_copy.commit_group()
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        acc, highest, denominator = _absorb(scores, v, acc, highest, denominator)
    # Copies of zeros count too: all must arrive before the ring's memory is reused.
    ampere.async_copy.wait_group(0)
    return acc, highest, denominator


@GluonKernel
def _scores(q: gl.tensor, k: gl.tensor, seen: gl.tensor, scale_log2: float, mma: gl.constexpr) -> gl.tensor:
    """Shapes: q [warps, 16, d], k [warps, d, keys] -> [warps, 16, keys], log2 of the weights."""
    zeros = gl.zeros([q.shape[0], 16, k.shape[2]], gl.float32, mma)
    return gl.where(seen, ampere.mma_v2(q, k, zeros) * scale_log2, float("-inf"))


@GluonKernel
def _absorb(
    scores: gl.tensor, v: gl.tensor, acc: gl.tensor, highest: gl.tensor, denominator: gl.tensor
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """One step of a warp's online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), in powers of two."""
    mma: gl.constexpr = acc.type.layout
    new_highest = gl.maximum(highest, gl.max(scores, axis=2))
    p = gl.exp2(scores - gl.expand_dims(new_highest, 2))
    rescale = gl.exp2(highest - new_highest)
    weights = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, mma, 2))
    acc = ampere.mma_v2(weights, v, acc * gl.expand_dims(rescale, 2))
    return acc, new_highest, denominator * rescale + gl.sum(p, axis=2)


@GluonKernel
def _merge_warps(acc: gl.tensor, highest: gl.tensor, denominator: gl.tensor) -> tuple[gl.tensor, gl.tensor]:
    """The mean of V, weighted by 2^score, and log2 of the sum of the weights. Shapes: -> [16, HEAD], [16, 1]."""
    WARPS: gl.constexpr = acc.shape[0]
    LANES: gl.constexpr = acc.shape[2] // 4
    whole: gl.constexpr = gl.BlockedLayout([WARPS, 1, 4], [1, 32 // LANES, LANES], [1, WARPS, 1], [2, 1, 0])
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    heads: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    highest_shared = gl.allocate_shared_memory(gl.float32, highest.shape, rows, highest)
    denominator_shared = gl.allocate_shared_memory(gl.float32, highest.shape, rows, denominator)
    acc_shared = gl.allocate_shared_memory(gl.float32, acc.shape, heads, acc)
    highest = gl.expand_dims(highest_shared.load(gl.SliceLayout(2, whole)), 2)
    denominator = gl.expand_dims(denominator_shared.load(gl.SliceLayout(2, whole)), 2)
    acc = acc_shared.load(whole)
    top = gl.max(highest, axis=0)
    weight = gl.exp2(highest - gl.expand_dims(top, 0))
    total = gl.sum(denominator * weight, axis=0)
    return gl.sum(acc * weight, axis=0) / total, top + gl.log2(total)


@GluonKernel
def _finish(
    output: gl.tensor, weight: gl.tensor, out_ptr: gl.tensor, outputs_ptr: gl.tensor, weights_ptr: gl.tensor,
    counters_ptr: gl.tensor, request: gl.tensor, kv_head: gl.tensor, split: gl.tensor, active: gl.tensor,
    splits: gl.tensor, place: gl.tensor, WIDTH: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    WARPS: gl.constexpr, COMBINED: gl.constexpr,
) -> None:  # fmt: skip
    """Store the output of a lone split; otherwise the split that arrives last combines them."""
    LIVE: gl.constexpr = WIDTH * GROUP
    HEAD: gl.constexpr = output.shape[1]
    out_ptr += (request * (WIDTH * NUM_KV_HEADS) + kv_head) * (GROUP * HEAD)
    if active == 1:
        _store_output(out_ptr, output, WIDTH, NUM_KV_HEADS, GROUP)
    else:
        outputs_ptr += place * (16 * HEAD)
        weights_ptr += place * 16
        _publish(output, weight, outputs_ptr, weights_ptr, split, splits, LIVE)
        if _arrive(counters_ptr + place, active):
            combined = _combine(outputs_ptr, weights_ptr, active, splits, LIVE, HEAD, WARPS, COMBINED)
            _store_output(out_ptr, combined, WIDTH, NUM_KV_HEADS, GROUP)


@GluonKernel
def _store_output(
    out_ptr: gl.tensor, x: gl.tensor, WIDTH: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr
) -> None:
    """Shapes: x [16, HEAD]."""
    m = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, x.type.layout)), 1)
    column = gl.expand_dims(gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout)), 0)
    head = m // GROUP * (NUM_KV_HEADS * GROUP) + m % GROUP
    gl.store(out_ptr + head * x.shape[1] + column, x.to(out_ptr.dtype.element_ty), mask=m < WIDTH * GROUP)


@GluonKernel
def _publish(
    output: gl.tensor, weight: gl.tensor, outputs_ptr: gl.tensor, weights_ptr: gl.tensor, split: gl.tensor,
    num_splits: int, LIVE: gl.constexpr,
) -> None:  # fmt: skip
    """Store a split's result for `_combine`: outputs [splits, m, d], weights [m, splits]."""
    m = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, output.type.layout)), 1)
    column = gl.expand_dims(gl.arange(0, output.shape[1], gl.SliceLayout(0, output.type.layout)), 0)
    gl.store(outputs_ptr + (split * 16 + m) * output.shape[1] + column, output, mask=m < LIVE)
    gl.store(weights_ptr + m * num_splits + split, weight, mask=m < LIVE)


@GluonKernel
def _arrive(counter_ptr: gl.tensor, active: gl.tensor) -> gl.tensor:
    """Count this split, after its results are stored: is it the last one? Then the counter is zero again.

    One thread counts for the program. The barrier orders the stores of the others before it; acq_rel then publishes
    them all, and makes those of the splits counted earlier visible to the thread and, through the barrier with
    which it hands the result to the others, to the program. No program counts after the last, so it may reset.
    """
    barrier()
    is_last = gl.atomic_add(counter_ptr, 1, sem="acq_rel") == active - 1
    if is_last:
        gl.store(counter_ptr, 0)
    return is_last


@GluonKernel
def _combine(
    outputs_ptr: gl.tensor, weights_ptr: gl.tensor, active: gl.tensor, num_splits: int, LIVE: gl.constexpr,
    HEAD: gl.constexpr, WARPS: gl.constexpr, COMBINED: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """The mean of the splits' outputs, weighted by 2^weight, summed in their order. Shapes: -> [16, HEAD].

    Loads bypass the L1 cache (.cg), because other programs' stores never reach it. A thread holds the same m and
    columns of every split.
    """
    LANES: gl.constexpr = HEAD // 4
    layout: gl.constexpr = gl.BlockedLayout([1, COMBINED, 4], [32 // LANES, 1, LANES], [WARPS, 1, 1], [2, 1, 0])
    rows: gl.constexpr = gl.SliceLayout(2, layout)
    m, offset, column = _axes(16, COMBINED, HEAD, layout)
    m_flat = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, rows)), 1)
    offset_flat = gl.expand_dims(gl.arange(0, COMBINED, gl.SliceLayout(0, rows)), 0)
    highest = gl.full([16, 1], -1.0e30, gl.float32, gl.SliceLayout(1, layout))
    denominator = gl.zeros([16, 1], gl.float32, gl.SliceLayout(1, layout))
    acc = gl.zeros([16, HEAD], gl.float32, gl.SliceLayout(1, layout))
    for begin in range(0, active, COMBINED):
        split, split_flat = begin + offset, begin + offset_flat
        weight_ptrs = weights_ptr + m_flat * num_splits + split_flat
        mask = (m_flat < LIVE) & (split_flat < active)
        weight = gl.expand_dims(gl.load(weight_ptrs, mask=mask, other=-1.0e30, cache_modifier=".cg"), 2)
        output_ptrs = outputs_ptr + (split * 16 + m) * HEAD + column
        mask = (m < LIVE) & (split < active)
        output = gl.load(output_ptrs, mask=mask, other=0.0, cache_modifier=".cg")
        new_highest = gl.maximum(highest, gl.max(weight, axis=1))
        rescale = gl.exp2(highest - new_highest)
        weight = gl.exp2(weight - gl.expand_dims(new_highest, 1))
        acc = acc * rescale + gl.sum(output * weight, axis=1)
        denominator = denominator * rescale + gl.sum(weight, axis=1)
        highest = new_highest
    return acc / denominator
