"""The kernel of `fused_linear`, `linear_logits`, `linear_add` and `linear_argmax` for 16-bit weights and few rows of x.

A program streams its rows of W, and the matching columns of x, through a ring buffer in shared memory. No kernel writes
W, so the ring is filled with W before x is ready. Each warp multiplies its own part of K, so a product is short. W is
the left operand, whose smallest tile has 16 rows; x is the right one, whose rows are padded to 8 only.

    ring      [stage] | parts of K, rows of W, K / parts |   16 bytes a thread, swizzled
    product   [parts, rows of W, rows of x] -> summed over parts at the end of each block of rows of W

The kernel is written in Gluon because a Triton loop fills its ring only after the wait for x (docs/history.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import ampere, cuda, gl
from overlap_spec_kernels.launch import GluonKernel, ceil_div, dependent_launch, next_power_of_2, runs_gluon
from overlap_spec_kernels.linear.call import Call, num_columns, num_multiprocessors

_MOST_ROWS = 64  # rows of x: with more, a BLAS is as fast
_MOST_LARGE = 16  # the same for a large weight
_BLOCK_ROWS = 32  # most rows of x in a program
_DTYPES = (torch.bfloat16, torch.float16)
_LARGE = 8 << 20  # bytes: reading a weight of this size takes longer than a launch
# Stages of a large weight by their columns, the widest first: benchmarks/results/choosing/layers_h200.txt.
_STAGES = {1024: 4, 512: 7, 256: 12}
_GATED_STAGES = {512: 5, 256: 8}
_FEW_ROWS, _FEW_ROWS_K = 8, 1024
_FEW_COLUMNS = 128  # of a result: few programs, each with few rows, whose K is all asked for at once
_LEAST_HELD = 4 << 20  # bytes of a small weight whose programs ask for all of it at once
_LEAST_PADDED = 2048  # columns, beside which what a stage lacks is little


class Stream(NamedTuple):
    """How a linear is divided among programs and stages, chosen from shapes alone."""

    block_n: int  # rows of W at a time (twice as many if gated)
    block_k: int
    warps_k: int
    warps_n: int
    stages: int
    late: bool = False  # let the next kernel begin after the last load of W was issued, else at once
    per_sm: int = 16  # most programs per multiprocessor; each then loops over blocks of W
    in_order: bool = False  # squares of a row are added up in an order that its neighbours do not change
    most_rows: int = _BLOCK_ROWS  # of x in a program

    def num_programs(self, weight: Tensor, gated: bool) -> int:
        """One program per block of rows of W, or fewer.

        If few programs had blocks in the last round, those would be read at the speed of few: then all have as many.
        """
        blocks = ceil_div(num_columns(weight, gated), self.block_n)
        at_once = self.per_sm * num_multiprocessors(weight.device)
        last_round = blocks % at_once
        return ceil_div(blocks, ceil_div(blocks, at_once)) if last_round < at_once // 2 else min(blocks, at_once)

    def run(self, call: Call, programs: int) -> None:
        """Launch. Sync: never."""
        num_rows = call.x.shape[0]
        rows = min(max(next_power_of_2(num_rows), 8), self.most_rows)
        num_warps = self.warps_k * self.warps_n
        _streamed_linear_kernel[(programs, ceil_div(num_rows, rows))](
            *call.tensors(),
            call.given(call.best),
            call.given(call.best_at),
            call.given(call.bias),
            *call.sizes(),
            SIZE_K=call.weight.shape[1],
            SCALED=call.squares is not None,
            GATED=call.gated,
            ADD=call.residual is not None,
            ARGMAX=call.best is not None,
            BIASED=call.bias is not None,
            ROWS=rows,
            BLOCK_N=self.block_n,
            BLOCK_K=self.block_k,
            WARPS_K=self.warps_k,
            WARPS_N=self.warps_n,
            STAGES=self.stages,
            LATE=self.late,
            IN_ORDER=self.in_order,
            BLOCK_U=max(next_power_of_2(call.num_squares), 32 // rows * num_warps),
            num_warps=num_warps,
            enable_fp_fusion=not self.in_order,  # a mean is rounded before eps is added, as in tiles
            **dependent_launch(call.x.device),
        )


_TINY = Stream(16, 512, 8, 1, 5, most_rows=_FEW_ROWS)


def stream_for(x: Tensor, weight: Tensor, gated: bool) -> Stream | None:
    """The division for these shapes; None where this kernel does not apply.

    A kernel that begins early takes the multiprocessors that have room beside programs of the kernel before it. If only
    some have room, its programs crowd on those. So for a large weight each multiprocessor runs one program, whose ring
    leaves no room for another; kernels of small weights begin late instead (docs/history.md), unless all of W is asked
    for at once.
    """
    size_k = weight.shape[1]
    if x.dtype not in _DTYPES or x.shape[0] > _MOST_ROWS or not runs_gluon(x.device):
        return None
    if size_k % 64 or x.stride(0) % 8:
        return None
    if weight.nbytes < _LARGE:
        return _of_small(x.shape[0], weight, gated)
    if x.shape[0] <= _FEW_ROWS and not gated and (several := _several(weight)):
        return several
    if size_k % 256:
        return Stream(64, 64, 1, 4, 8, late=True, per_sm=1)
    if x.shape[0] > _MOST_LARGE:
        return None
    stages = _GATED_STAGES if gated else _STAGES
    most_k = _FEW_ROWS_K if x.shape[0] <= _FEW_ROWS else 256  # columns of x, padded to 16 rows, take as much as W's
    block_k = next(columns for columns in stages if columns <= most_k and size_k % columns == 0)
    return Stream(16, block_k, 4, 1, stages[block_k], per_sm=1)


def _of_small(num_rows: int, weight: Tensor, gated: bool) -> Stream:
    """Those of weights that are not large; with 256 columns at once sums have one order, for any number of rows."""
    size_n, size_k = weight.shape
    if size_k % 512 == 0 and size_n <= _FEW_COLUMNS and not gated:
        return _TINY
    if size_k % 256:
        return Stream(16, 64, 2, 1, 10, late=True) if num_rows <= 16 else Stream(32, 64, 1, 2, 8, late=True)
    if weight.nbytes >= _LEAST_HELD and not gated:
        has_few = size_n <= 16 * num_multiprocessors(weight.device)
        if has_few and size_k <= 2048 and num_rows <= 16:
            return Stream(16, 256, 4, 1, size_k // 256 + 1)
        if not has_few and size_k <= 768 and num_rows <= _FEW_ROWS:
            return Stream(32, 256, 4, 1, size_k // 256 + 1)
    return Stream(16, 256, 4, 1, 6, late=True)


def _several(weight: Tensor) -> Stream | None:
    """Programs that share a multiprocessor, where too many of those would idle while the others end: of large weights.

    If each multiprocessor has one program, a weight of 180 blocks (gpt-oss's output of attention) gives 90 of them two
    blocks and leaves the other 42 idle. If there are more rounds, the idle time of the last one matters less, and a
    deep ring is faster. The last stage of K may be partly empty.
    """
    multiprocessors = num_multiprocessors(weight.device)
    rounds, rest = divmod(ceil_div(weight.shape[0], 16), multiprocessors)
    idle = multiprocessors // 4 <= rest < multiprocessors // 2
    if idle and rounds == 1:
        return Stream(16, 512, 4, 1, 4, per_sm=2)
    padded = weight.shape[1] % 256 > 0 and weight.shape[1] >= _LEAST_PADDED
    return Stream(16, 512, 4, 1, 3, per_sm=3) if (idle and rounds == 2) or padded else None


@GluonKernel.with_options(do_not_specialize=("num_rows", "num_squares"))
def _streamed_linear_kernel(
    x_ptr: gl.tensor, weight_ptr: gl.tensor, squares_ptr: gl.tensor, residual_ptr: gl.tensor, norm_ptr: gl.tensor,
    out_ptr: gl.tensor, weighted_ptr: gl.tensor, sums_ptr: gl.tensor, best_ptr: gl.tensor, best_at_ptr: gl.tensor,
    bias_ptr: gl.tensor,
    x_stride: int, residual_stride: int, size_n: gl.tensor, num_rows: int, num_squares: int, eps: float,
    SIZE_K: gl.constexpr, SCALED: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, ARGMAX: gl.constexpr,
    BIASED: gl.constexpr, PDL: gl.constexpr, LATE: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, WARPS_K: gl.constexpr, WARPS_N: gl.constexpr, STAGES: gl.constexpr, BLOCK_U: gl.constexpr,
    IN_ORDER: gl.constexpr,
) -> None:  # fmt: skip
    """Program (p, r) takes blocks p, p + programs, .. of W's rows and block r of x's; step i, chunk i % CHUNKS."""
    PART: gl.constexpr = BLOCK_K // WARPS_K
    CHUNKS: gl.constexpr = (SIZE_K + BLOCK_K - 1) // BLOCK_K
    LANES: gl.constexpr = PART // 8 if PART < 256 else 32
    PHASES: gl.constexpr = 8 if LANES >= 8 else LANES
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS_K, WARPS_N, 1], [1, 16, 8])
    copy: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // LANES, LANES], [WARPS_K, WARPS_N, 1], [2, 1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 8 // PHASES, PHASES, [2, 1, 0])
    flat: gl.constexpr = gl.SliceLayout(0, mma)  # layout of a result [rows of W, rows of x]
    dtype: gl.constexpr = weight_ptr.dtype.element_ty
    if PDL and not LATE:
        cuda.gdc_launch_dependents()
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, WARPS_K, BLOCK_N, PART], shared)
    up_ring = w_ring
    if GATED:
        up_ring = gl.allocate_shared_memory(dtype, [STAGES, WARPS_K, BLOCK_N, PART], shared)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, WARPS_K, ROWS, PART], shared)
    first, stride = gl.program_id(0), gl.num_programs(0)
    num_steps = (gl.cdiv(size_n, BLOCK_N) - first + stride - 1) // stride * CHUNKS
    for step in gl.static_range(STAGES - 1):
        _ask_for_weights(w_ring, up_ring, weight_ptr, step, num_steps, size_n, SIZE_K, GATED, CHUNKS, copy)
    bias = gl.zeros([BLOCK_N], gl.float32, gl.SliceLayout(1, flat))
    if BIASED:
        bias = _of_block(bias_ptr, first, size_n, bias)
    if PDL:
        cuda.gdc_wait()
    for step in gl.static_range(STAGES - 1):
        _ask_for_rows(x_ring, x_ptr, step, num_steps, x_stride, num_rows, SIZE_K, CHUNKS, copy)
        ampere.async_copy.commit_group()
    scale = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(0, flat))
    if SCALED:
        scale = _scale_of_rows(
            squares_ptr, num_rows, num_squares, eps, SIZE_K, ROWS, BLOCK_U, WARPS_K * WARPS_N, IN_ORDER, flat
        )
    acc = gl.zeros([WARPS_K, BLOCK_N, ROWS], gl.float32, mma)
    up = acc
    best = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, flat))
    best_at = gl.zeros([ROWS], gl.int32, gl.SliceLayout(0, flat))
    for i in range(0, num_steps):
        ampere.async_copy.wait_group(STAGES - 2)
        w = w_ring.index(i % STAGES).load(gl.DotOperandLayout(0, mma, 2))
        x = x_ring.index(i % STAGES).permute([0, 2, 1]).load(gl.DotOperandLayout(1, mma, 2))
        if GATED:
            w_up = up_ring.index(i % STAGES).load(gl.DotOperandLayout(0, mma, 2))
        # Refill the stage that was read in the previous step, for the step STAGES - 1 ahead.
        ahead = i + STAGES - 1
        _ask_for_weights(w_ring, up_ring, weight_ptr, ahead, num_steps, size_n, SIZE_K, GATED, CHUNKS, copy)
        _ask_for_rows(x_ring, x_ptr, ahead, num_steps, x_stride, num_rows, SIZE_K, CHUNKS, copy)
        ampere.async_copy.commit_group()
        if PDL and LATE and ahead >= num_steps:  # all loads are issued: let the next kernel begin
            cuda.gdc_launch_dependents()
        acc = ampere.mma_v2(w, x, acc)
        if GATED:
            up = ampere.mma_v2(w_up, x, up)
        if i % CHUNKS == CHUNKS - 1:
            block = first + i // CHUNKS * stride
            y = gl.sum(acc, axis=0) * gl.expand_dims(scale, 0)
            acc = gl.zeros([WARPS_K, BLOCK_N, ROWS], gl.float32, mma)
            if BIASED:
                y += gl.expand_dims(bias, 1)
                bias = _of_block(bias_ptr, block + stride, size_n, bias)
            if GATED:
                y = y / (1.0 + gl.exp(-y)) * (gl.sum(up, axis=0) * gl.expand_dims(scale, 0))
                up = acc
            if ARGMAX:
                best, best_at = _better(y, best, best_at, block * BLOCK_N, size_n)
            else:
                _store(
                    y, block, out_ptr, weighted_ptr, sums_ptr, residual_ptr, norm_ptr, residual_stride, size_n,
                    num_rows, ADD
                )  # fmt: skip
    if ARGMAX:
        m = gl.program_id(1) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, flat))
        gl.store(best_ptr + first * num_rows + m, best, mask=m < num_rows)
        gl.store(best_at_ptr + first * num_rows + m, best_at, mask=m < num_rows)


@GluonKernel
def _ask_for_weights(
    ring: gl.shared_memory_descriptor, up_ring: gl.shared_memory_descriptor, weight_ptr: gl.tensor, step: gl.tensor,
    num_steps: gl.tensor, size_n: gl.tensor, SIZE_K: gl.constexpr, GATED: gl.constexpr, CHUNKS: gl.constexpr,
    copy: gl.constexpr,
) -> None:  # fmt: skip
    """Begin to copy a step's chunk of W, and of its second half if gated; nothing after the last step."""
    BLOCK_N: gl.constexpr = ring.shape[2]
    BLOCK_K: gl.constexpr = ring.shape[1] * ring.shape[3]
    n, k = _places(BLOCK_N, ring.shape[1], ring.shape[3], copy)
    block = gl.program_id(0) + step // CHUNKS * gl.num_programs(0)
    row = gl.minimum(block * BLOCK_N + n, size_n - 1).to(gl.int64)
    k += step % CHUNKS * BLOCK_K
    chunk = weight_ptr + row * SIZE_K + k
    wanted = n < gl.where(step < num_steps, BLOCK_N, 0)
    if SIZE_K % BLOCK_K:
        wanted = wanted & (k < SIZE_K)
    stage = step % ring.shape[0]
    ampere.async_copy.async_copy_global_to_shared(ring.index(stage), chunk, mask=wanted)
    if GATED:
        up_offset = size_n.to(gl.int64) * SIZE_K
        ampere.async_copy.async_copy_global_to_shared(up_ring.index(stage), chunk + up_offset, mask=wanted)


@GluonKernel
def _ask_for_rows(
    ring: gl.shared_memory_descriptor, x_ptr: gl.tensor, step: gl.tensor, num_steps: gl.tensor, x_stride: int,
    num_rows: int, SIZE_K: gl.constexpr, CHUNKS: gl.constexpr, copy: gl.constexpr,
) -> None:  # fmt: skip
    """Begin to copy a step's columns of x."""
    BLOCK_K: gl.constexpr = ring.shape[1] * ring.shape[3]
    m, k = _places(ring.shape[2], ring.shape[1], ring.shape[3], copy)
    m += gl.program_id(1) * ring.shape[2]
    k += step % CHUNKS * BLOCK_K
    chunk = x_ptr + m * x_stride + k
    wanted = m < gl.where(step < num_steps, num_rows, 0)
    if SIZE_K % BLOCK_K:
        wanted = wanted & (k < SIZE_K)
    ampere.async_copy.async_copy_global_to_shared(ring.index(step % ring.shape[0]), chunk, mask=wanted)


@GluonKernel
def _places(
    NUM_ROWS: gl.constexpr, PARTS: gl.constexpr, PART: gl.constexpr, copy: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """Rows and columns of a chunk [PARTS, rows, PART]. Shapes: [1, rows, 1], [PARTS, 1, PART]."""
    row = gl.arange(0, NUM_ROWS, gl.SliceLayout(0, gl.SliceLayout(2, copy)))
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, copy)))
    inner = gl.arange(0, PART, gl.SliceLayout(0, gl.SliceLayout(1, copy)))
    k = gl.expand_dims(gl.expand_dims(part, 1), 2) * PART + gl.expand_dims(gl.expand_dims(inner, 0), 1)
    return gl.expand_dims(gl.expand_dims(row, 0), 2), k


@GluonKernel
def _scale_of_rows(
    squares_ptr: gl.tensor, num_rows: int, num_squares: int, eps: float, SIZE_K: gl.constexpr, ROWS: gl.constexpr,
    BLOCK_U: gl.constexpr, NUM_WARPS: gl.constexpr, IN_ORDER: gl.constexpr, flat: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """The scale of a norm, from the sums of squares of its parts. Shapes: -> [ROWS].

    IN_ORDER: every eighth part in a sum, and these eight as `ordered.py` adds them.
    """
    LANES: gl.constexpr = 8 if IN_ORDER else 32 if ROWS > 32 else ROWS
    PARTS: gl.constexpr = 8 if IN_ORDER else BLOCK_U
    WARPS: gl.constexpr = 2 if IN_ORDER else NUM_WARPS  # with a part of the parts
    sums: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [WARPS, NUM_WARPS // WARPS], [1, 0])
    part = gl.expand_dims(gl.arange(0, PARTS, gl.SliceLayout(1, sums)), 1)
    m = gl.program_id(1) * ROWS + gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, sums)), 0)
    squares = gl.zeros([PARTS, ROWS], gl.float32, sums)
    for _ in gl.static_range(0, BLOCK_U, PARTS):
        squares += gl.load(squares_ptr + part * num_rows + m, mask=(part < num_squares) & (m < num_rows), other=0.0)
        part += PARTS
    return gl.rsqrt(gl.convert_layout(gl.sum(squares, axis=0), gl.SliceLayout(0, flat)) / SIZE_K + eps)


@GluonKernel
def _of_block(ptr: gl.tensor, block: gl.tensor, size_n: gl.tensor, like: gl.tensor) -> gl.tensor:
    """One value for each row of a block of W, in float32; zeros past the last. Shapes: like -> the same."""
    n = block * like.shape[0] + gl.arange(0, like.shape[0], like.type.layout)
    return gl.load(ptr + n, mask=n < size_n, other=0.0).to(gl.float32)


@GluonKernel
def _better(
    y: gl.tensor, best: gl.tensor, best_at: gl.tensor, first: gl.tensor, size_n: gl.tensor
) -> tuple[gl.tensor, gl.tensor]:
    """The largest result so far and its row of W, the first of equals: blocks come in ascending order."""
    n = gl.expand_dims(first + gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout)), 1)
    y = gl.where(n < size_n, y, float("-inf"))
    highest = gl.max(y, axis=0)
    at = gl.min(gl.where(y == gl.expand_dims(highest, 0), n, size_n), axis=0)
    return gl.maximum(highest, best), gl.where(highest > best, at, best_at)


@GluonKernel
def _store(
    y: gl.tensor, block: gl.tensor, out_ptr: gl.tensor, weighted_ptr: gl.tensor, sums_ptr: gl.tensor,
    residual_ptr: gl.tensor, norm_ptr: gl.tensor, residual_stride: int, size_n: gl.tensor, num_rows: int,
    ADD: gl.constexpr,
) -> None:  # fmt: skip
    """Write a block of results; if they are added to a residual, what the norm after it needs besides."""
    n_flat = block * y.shape[0] + gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout))
    m_flat = gl.program_id(1) * y.shape[1] + gl.arange(0, y.shape[1], gl.SliceLayout(0, y.type.layout))
    n, m = gl.expand_dims(n_flat, 1), gl.expand_dims(m_flat, 0)
    mask = (n < size_n) & (m < num_rows)
    if ADD:
        y += gl.load(residual_ptr + m * residual_stride + n, mask=mask, other=0.0).to(gl.float32)
    rounded = y.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + m * size_n + n, rounded, mask=mask)
    if ADD:
        wide = gl.where(mask, rounded.to(gl.float32), 0.0)
        norm = gl.load(norm_ptr + n_flat, mask=n_flat < size_n, other=0.0).to(gl.float32)
        weighted = wide * gl.expand_dims(norm, 1)
        gl.store(weighted_ptr + m * size_n + n, weighted.to(weighted_ptr.dtype.element_ty), mask=mask)
        gl.store(sums_ptr + block * num_rows + m_flat, gl.sum(wide * wide, axis=0), mask=m_flat < num_rows)
