"""The kernel of `decode_attention` for few rows of 16-bit heads on Hopper, over a cache of 8 bits.

As `_decode_attention_gluon`, with half of the bytes. The cache is read as pairs of columns, 16 bits each, so copies and
tensor-core operands are those of a 16-bit head of half the size. A register of an operand holds two pairs:

    of K       columns 2j, 2j + 1 and 2j + 2, 2j + 3 of a key    -> two float16 even columns, two odd ones
    of V       columns 2j, 2j + 1 of two keys                    -> the even column of both keys, the odd one of both

So a product over K is one over the even columns and one over the odd, and the output has its even columns in one
accumulator and the odd ones in another. Products are in float16, which holds every value of both formats. Queries are
rounded to it: more bits than bfloat16 has, in a range that no query leaves whose scores mean anything (65504).
"""

from __future__ import annotations

from overlap_spec_kernels.attention._decode_attention_gluon import (
    _after_reading,
    _ask_for_block,
    _axes,
    _fill_ring,
    _finish,
    _load_heads,
    _load_pages,
    _load_rotated,
    _merge_warps,
    _operand,
    _share,
    _write_cache,
)
from overlap_spec_kernels.language import ampere, cuda, gl
from overlap_spec_kernels.launch import GluonKernel


@GluonKernel.with_options(do_not_specialize=("num_splits",))
def decode_attention_8bit_kernel(
    qkv_ptr: gl.tensor, cos_sin_ptr: gl.tensor, positions_ptr: gl.tensor, page_table_ptr: gl.tensor,
    k_pairs_ptr: gl.tensor, v_pairs_ptr: gl.tensor, out_ptr: gl.tensor,
    outputs_ptr: gl.tensor, weights_ptr: gl.tensor, counters_ptr: gl.tensor,
    shares_ptr: gl.tensor, scale_log2: float, inverse_k: float, inverse_v: float, v_scale: float,
    qkv_stride: int, table_stride: int, capacity: int, num_splits: int,
    WIDTH: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr,
    PAGE_SIZE: gl.constexpr, WARPS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    KEYS_PER_SPLIT: gl.constexpr, COMBINED: gl.constexpr, E4M3: gl.constexpr, READ_BEFORE_WAIT: gl.constexpr,
    UNEVEN: gl.constexpr, PDL: gl.constexpr, LATE: gl.constexpr,
) -> None:  # fmt: skip
    """Program (KV head and split, request); m of its 16 is (row, head). KEYS_PER_SPLIT >= WARPS * KEYS."""
    BLOCK: gl.constexpr = WARPS * KEYS
    PAIRS: gl.constexpr = HEAD // 2
    LANES: gl.constexpr = PAIRS // 8
    PHASE: gl.constexpr = 64 // PAIRS  # rows of 128 bytes of shared memory
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    copy: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // LANES, LANES], [WARPS, 1, 1], [2, 1, 0])  # keys
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [16 // LANES, 2 * LANES], [WARPS, 1], [1, 0])  # qkv's heads
    pairs: gl.constexpr = gl.BlockedLayout([1, 4], [16 // LANES, 2 * LANES], [WARPS, 1], [1, 0])  # the same in pairs
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, PHASE, 8 // PHASE, [2, 1, 0])
    heads: gl.constexpr = gl.SwizzledSharedLayout(8, PHASE, 8 // PHASE, [1, 0])
    if PDL and not LATE:
        cuda.gdc_launch_dependents()
    if PDL and not READ_BEFORE_WAIT:
        cuda.gdc_wait()
    k_ring = gl.allocate_shared_memory(gl.int16, [STAGES, WARPS, KEYS, PAIRS], shared)
    v_ring = gl.allocate_shared_memory(gl.int16, [STAGES, WARPS, KEYS, PAIRS], shared)
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
    k_pairs_ptr += kv_head * PAIRS
    v_pairs_ptr += kv_head * PAIRS
    stride = active * BLOCK
    end = gl.where(split < active, num_cached, 0)  # end of the cached keys
    page = _fill_ring(
        k_ring, v_ring, k_pairs_ptr, v_pairs_ptr, table_row_ptr, page, first, stride, end, NUM_KV_HEADS, PAGE_SIZE
    )  # fmt: skip
    if PDL:
        _after_reading(READ_BEFORE_WAIT, LATE)
    if split < active:
        m = gl.arange(0, 16, gl.SliceLayout(1, flat))
        q_ptr = qkv_ptr + (first_row + m // GROUP) * qkv_stride + (kv_head * GROUP + m % GROUP) * HEAD
        q = _load_rotated(q_ptr, cos_sin_ptr + (num_cached + m // GROUP) * HEAD, m < WIDTH * GROUP, HEAD)
        q_even, q_odd = _columns(_in_float16(q), pairs)
        q_even = gl.allocate_shared_memory(gl.float16, [16, PAIRS], heads, q_even)
        q_odd = gl.allocate_shared_memory(gl.float16, [16, PAIRS], heads, q_odd)
        # The last split also takes the new rows, and computes them while the first blocks are loading.
        is_last = split == active - 1
        new_live = (m < WIDTH) & is_last
        k_ptr = qkv_ptr + (first_row + m) * qkv_stride + (NUM_KV_HEADS * GROUP + kv_head) * HEAD
        new_k = _load_rotated(k_ptr, cos_sin_ptr + (num_cached + m) * HEAD, new_live, HEAD)
        new_v = _load_heads(k_ptr + NUM_KV_HEADS * HEAD, new_live, HEAD)
        new = gl.arange(0, 16, gl.SliceLayout(1, pairs))
        new_live = (new < WIDTH) & is_last
        new_k = _packed(new_k, inverse_k, new_live, E4M3, pairs)
        new_v = _packed(new_v, inverse_v, new_live, E4M3, pairs)
        k_shared = gl.allocate_shared_memory(gl.int16, [16, PAIRS], heads, new_k)
        v_shared = gl.allocate_shared_memory(gl.int16, [16, PAIRS], heads, new_v)
        q_even, q_odd = _operand(q_even, 0, mma), _operand(q_odd, 0, mma)
        highest = gl.full([WARPS, 16], -1.0e30, gl.float32, gl.SliceLayout(2, mma))  # finite: no NaN with -inf
        denominator = gl.zeros([WARPS, 16], gl.float32, gl.SliceLayout(2, mma))
        even = gl.zeros([WARPS, 16, PAIRS], gl.float32, mma)
        odd = gl.zeros([WARPS, 16, PAIRS], gl.float32, mma)
        if is_last:
            _write_cache(
                new_k, new_v, k_pairs_ptr, v_pairs_ptr, table_row_ptr, num_cached + new, new_live, NUM_KV_HEADS,
                PAGE_SIZE
            )  # fmt: skip
            even, odd, highest, denominator = _attend_to_new(
                q_even, q_odd, k_shared, v_shared, even, odd, highest, denominator, scale_log2, GROUP, E4M3
            )  # fmt: skip
        even, odd, highest, denominator = _attend_to_cache(
            q_even, q_odd, even, odd, highest, denominator, k_ring, v_ring, k_pairs_ptr, v_pairs_ptr, table_row_ptr,
            page, first, stride, end, scale_log2, NUM_KV_HEADS, PAGE_SIZE, E4M3
        )  # fmt: skip
        acc = gl.join(even, odd).reshape([WARPS, 16, HEAD])
        output, weight = _merge_warps(acc, highest, denominator)
        _finish(
            output * v_scale, weight, out_ptr, outputs_ptr, weights_ptr, counters_ptr, request, kv_head, split, active,
            splits, place, WIDTH, NUM_KV_HEADS, GROUP, WARPS, COMBINED
        )  # fmt: skip


@GluonKernel
def _columns(x: gl.tensor, pairs: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """The even columns, and the odd ones. Shapes: [n, m] -> [n, m / 2] each, without exchange between threads."""
    even, odd = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    return gl.convert_layout(even, pairs, assert_trivial=True), gl.convert_layout(odd, pairs, assert_trivial=True)


@GluonKernel
def _in_float16(x: gl.tensor) -> gl.tensor:
    """Rounded, and no larger than float16 holds; NaN stays NaN."""
    x = x.to(gl.float32)
    return gl.where(x > 65504.0, 65504.0, gl.where(x < -65504.0, -65504.0, x)).to(gl.float16)


@GluonKernel
def _packed(
    x: gl.tensor, inverse_scale: float, live: gl.tensor, E4M3: gl.constexpr, pairs: gl.constexpr
) -> gl.tensor:  # fmt: skip
    """Pairs of 8 bits, the even column's in the low ones: scaled, clamped, rounded; zero in rows that are not live.

    The zeros are put in after the conversion: of two equal conversions that fill a register, ptxas 12.8 and 12.9 lose
    the upper half, which becomes what lies in another register. As a V that may be NaN, whatever its weight.
    Shapes: x [n, m], live [n] -> [n, m / 2].
    """
    even, odd = _columns(x.to(gl.float32) * inverse_scale, pairs)
    convert: gl.constexpr = (
        "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;" if E4M3 else "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;"
    )
    packed = gl.inline_asm_elementwise(convert, "=h,f,f", [even, odd], dtype=gl.int16, is_pure=True, pack=1)
    return gl.where(gl.expand_dims(live, 1), packed, 0)


@GluonKernel
def _widened(pairs: gl.tensor, E4M3: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    """The even columns of pairs, and the odd ones. Shapes: i16 -> f16, the same, twice.

    A register has two pairs: bytes 0 and 2 are even columns.
    """
    widen: gl.constexpr = (
        "{ .reg .b32 both; .reg .b16 low, high; prmt.b32 both, $2, $2, 0x3120; mov.b32 {low, high}, both;"
        " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
        if E4M3
        else "prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;"  # it is the upper half of a float16
    )
    even, odd = gl.inline_asm_elementwise(
        widen, "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )
    return even, odd


@GluonKernel
def _attend_to_new(
    q_even: gl.tensor, q_odd: gl.tensor, k_shared: gl.shared_memory_descriptor,
    v_shared: gl.shared_memory_descriptor, even: gl.tensor, odd: gl.tensor, highest: gl.tensor,
    denominator: gl.tensor, scale_log2: float, GROUP: gl.constexpr, E4M3: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Start the first warp's softmax with the new keys up to each row's own; every row attends to the first one."""
    mma: gl.constexpr = even.type.layout
    warp, m, new = _axes(even.shape[0], 16, 16, mma)
    k, v = _operand(k_shared.permute([1, 0]), 1, mma), _operand(v_shared, 1, mma)
    scores = _scores(q_even, q_odd, k, (new <= m // GROUP) & (warp == 0), scale_log2, mma, E4M3)
    even, odd, highest, denominator = _absorb(scores, v, even, odd, highest, denominator, E4M3)
    return even, odd, highest, denominator


@GluonKernel
def _attend_to_cache(
    q_even: gl.tensor, q_odd: gl.tensor, even: gl.tensor, odd: gl.tensor, highest: gl.tensor,
    denominator: gl.tensor, k_ring: gl.shared_memory_descriptor, v_ring: gl.shared_memory_descriptor,
    k_ptr: gl.tensor, v_ptr: gl.tensor, table_row_ptr: gl.tensor, page: gl.tensor, first: gl.tensor,
    stride: gl.tensor, end: gl.tensor, scale_log2: float, NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
    E4M3: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """Attend to every stride-th block of cached keys, unmasked; `page` is that of the first block not yet requested."""
    STAGES: gl.constexpr = k_ring.shape[0]
    WARPS: gl.constexpr = k_ring.shape[1]
    KEYS: gl.constexpr = k_ring.shape[2]
    mma: gl.constexpr = even.type.layout
    copy: gl.constexpr = page.type.layout.parent
    warp, _, key = _axes(WARPS, 16, KEYS, mma)
    key = warp * KEYS + key
    stage = 0
    for begin in range(first, end, stride):
        ampere.async_copy.wait_group(STAGES - 1)
        k = k_ring.index(stage).permute([0, 2, 1]).load(gl.DotOperandLayout(1, mma, 2))
        scores = _scores(q_even, q_odd, k, begin + key < end, scale_log2, mma, E4M3)
        v = v_ring.index(stage).load(gl.DotOperandLayout(1, mma, 2))
        ahead = begin + STAGES * stride
        if ahead < end:
            _ask_for_block(k_ring, v_ring, stage, k_ptr, v_ptr, page, ahead, end, NUM_KV_HEADS, PAGE_SIZE)
            page = _load_pages(table_row_ptr, ahead + stride, end, PAGE_SIZE, WARPS, KEYS, copy)
        ampere.async_copy.commit_group()
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        even, odd, highest, denominator = _absorb(scores, v, even, odd, highest, denominator, E4M3)
    # Copies of zeros count too: all must arrive before the ring's memory is reused.
    ampere.async_copy.wait_group(0)
    return even, odd, highest, denominator


@GluonKernel
def _scores(
    q_even: gl.tensor, q_odd: gl.tensor, k: gl.tensor, seen: gl.tensor, scale_log2: float, mma: gl.constexpr,
    E4M3: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Shapes: q [warps, 16, d / 2] each, k [warps, d / 2, keys] i16 -> [warps, 16, keys], log2 of the weights."""
    k_even, k_odd = _widened(k, E4M3)
    zeros = gl.zeros([q_even.shape[0], 16, k.shape[2]], gl.float32, mma)
    products = ampere.mma_v2(q_odd, k_odd, ampere.mma_v2(q_even, k_even, zeros))
    return gl.where(seen, products * scale_log2, float("-inf"))


@GluonKernel
def _absorb(
    scores: gl.tensor, v: gl.tensor, even: gl.tensor, odd: gl.tensor, highest: gl.tensor, denominator: gl.tensor,
    E4M3: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:  # fmt: skip
    """One step of a warp's online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), in powers of two."""
    mma: gl.constexpr = even.type.layout
    new_highest = gl.maximum(highest, gl.max(scores, axis=2))
    p = gl.exp2(scores - gl.expand_dims(new_highest, 2))
    rescale = gl.exp2(highest - new_highest)
    factor = gl.expand_dims(rescale, 2)
    weights = gl.convert_layout(p.to(gl.float16), gl.DotOperandLayout(0, mma, 2))
    v_even, v_odd = _widened(v, E4M3)
    even = ampere.mma_v2(weights, v_even, even * factor)
    odd = ampere.mma_v2(weights, v_odd, odd * factor)
    return even, odd, new_highest, denominator * rescale + gl.sum(p, axis=2)
