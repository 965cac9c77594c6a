"""The kernel of quantised weights for few rows of x: weights of 8 or 4 bits become bfloat16 in registers.

As in `streamed_linear.py`, a program streams its rows of W, and the matching columns of x, through a ring buffer in
shared memory, and each warp multiplies its own part of K. The ring holds W as it is stored, so a step of the ring
brings two or four times as many columns. A part is as wide as a group of columns that share a scale, or wider by two:

    8 bits   a part of 128 columns: one group of 128, or a part of a row with one scale
    4 bits   a part is two halves: byte j holds column j of the first half (low bits) and of the second (high bits)

A group's scale multiplies the group's sums in float32, a row's scale the row's sum. Values are exact in bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from overlap_spec_kernels.language import ampere, cuda, gl
from overlap_spec_kernels.launch import GluonKernel, ceil_div, dependent_launch, next_power_of_2
from overlap_spec_kernels.linear.call import Call, num_columns, num_multiprocessors
from overlap_spec_kernels.linear.packing import Packing
from overlap_spec_kernels.linear.streamed_linear import _scale_of_rows, _store

_BLOCK_ROWS = 32  # most rows of x in a program
_MULTIPROCESSORS = 132  # of an H200
_RING_BYTES, _RING_BYTES_OF_MORE = 216 << 10, 200 << 10  # for 8 rows of x; with more, sums need some memory besides


class QuantizedStream(NamedTuple):
    """How a linear is divided among programs and stages, chosen from shapes alone."""

    block_n: int  # rows of W at a time (twice as many if gated)
    warps_k: int  # each multiplies `runs` parts of K, one apart from the other
    warps_n: int
    stages: int
    runs: int = 1
    per_sm: int = 2  # most programs per multiprocessor; each then loops over blocks of W

    def num_programs(self, weight: Tensor, gated: bool) -> int:
        """One program per block of rows of W, or fewer."""
        blocks = ceil_div(num_columns(weight, gated), self.block_n)
        return min(blocks, self.per_sm * num_multiprocessors(weight.device))

    def run(self, call: Call, programs: int, packing: Packing) -> None:
        """Launch. Sync: never."""
        num_rows, size_k = call.x.shape
        rows = _block_rows(num_rows)
        num_warps = self.warps_k * self.warps_n
        _quantized_stream_kernel[(programs, ceil_div(num_rows, rows))](
            *call.tensors(),
            packing.scales,
            call.given(packing.zeros),
            *call.sizes(),
            packing.scales.shape[1],
            SIZE_K=size_k,
            SCALED=call.squares is not None,
            GATED=call.gated,
            ADD=call.residual is not None,
            BITS=packing.bits,
            SCALES=packing.scales_per_part,
            SCALE_ROWS=packing.scale_rows,
            ZEROS=packing.zeros is not None,
            ROWS=rows,
            BLOCK_N=self.block_n,
            PART=packing.part,
            WARPS_K=self.warps_k,
            WARPS_N=self.warps_n,
            RUNS=self.runs,
            STAGES=self.stages,
            BLOCK_U=max(next_power_of_2(call.num_squares), 32 // rows * num_warps),
            num_warps=num_warps,
            **dependent_launch(call.x.device),
        )


def stream_of(x: Tensor, weight: Tensor, gated: bool, packing: Packing) -> QuantizedStream:
    """The division for these shapes, with as many stages as shared memory has room for.

    The choice was measured on an H200: benchmarks/results/choosing/quantized_h200.json.
    """
    rows = _block_rows(x.shape[0])
    block_n, warps_k, warps_n, runs, per_sm = _way(x.shape[0], num_columns(weight, gated))
    tiles = 2 if gated else 1
    part = packing.part * (tiles * block_n * packing.bits // 8 + 2 * rows)  # bytes of W and x
    part += packing.scales_per_part * tiles * block_n * 6  # of scales and zero points
    ring = _RING_BYTES if rows == 8 else _RING_BYTES_OF_MORE
    stages = ring // per_sm // (part * warps_k * runs)
    return QuantizedStream(block_n, warps_k, warps_n, min(max(stages, 2), 16), runs, per_sm)


def _way(num_rows: int, columns: int) -> tuple[int, int, int, int, int]:
    """`block_n`, `warps_k`, `warps_n`, `runs`, `per_sm` for so many rows of x and columns of the result."""
    if num_rows > 16:
        return (32, 4, 2, 1, 1) if num_rows <= 32 else (64, 2, 4, 1, 1)
    if num_rows <= 8 and columns > 16 * 2 * _MULTIPROCESSORS:  # blocks for three programs
        return 16, 4, 1, 1, 3
    return (16, 4, 1, 2, 2) if num_rows <= 8 else (16, 4, 1, 1, 2)


def _block_rows(num_rows: int) -> int:
    """Rows of x in a program, padded."""
    return min(max(next_power_of_2(num_rows), 8), _BLOCK_ROWS)


@GluonKernel.with_options(do_not_specialize=("num_rows", "num_squares"))
def _quantized_stream_kernel(
    x_ptr: gl.tensor, weight_ptr: gl.tensor, squares_ptr: gl.tensor, residual_ptr: gl.tensor, norm_ptr: gl.tensor,
    out_ptr: gl.tensor, weighted_ptr: gl.tensor, sums_ptr: gl.tensor, scales_ptr: gl.tensor, zeros_ptr: gl.tensor,
    x_stride: int, residual_stride: int, size_n: gl.tensor, num_rows: int, num_squares: int, eps: float,
    scale_stride: int,
    SIZE_K: gl.constexpr, SCALED: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, BITS: gl.constexpr,
    SCALES: gl.constexpr, SCALE_ROWS: gl.constexpr, ZEROS: gl.constexpr, PDL: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, PART: gl.constexpr, WARPS_K: gl.constexpr, WARPS_N: gl.constexpr,
    RUNS: gl.constexpr, STAGES: gl.constexpr, BLOCK_U: gl.constexpr,
) -> None:  # fmt: skip
    """Program (p, r) takes blocks p, p + programs, .. of W's rows and block r of x's; step i, chunk i % CHUNKS."""
    HALVES: gl.constexpr = 8 // BITS
    HALF: gl.constexpr = PART // HALVES  # columns of a half, which are bytes of W
    PARTS: gl.constexpr = SIZE_K // PART
    DEPTH: gl.constexpr = WARPS_K * RUNS  # parts of a step
    CHUNKS: gl.constexpr = (PARTS + DEPTH - 1) // DEPTH
    TILES: gl.constexpr = 2 if GATED else 1
    LANES: gl.constexpr = HALF // 16
    PHASES: gl.constexpr = 8 if LANES >= 8 else LANES
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS_K, WARPS_N, 1], [1, 16, 8])
    flat: gl.constexpr = gl.SliceLayout(0, mma)  # layout of a result [rows of W, rows of x]
    w_shared: gl.constexpr = gl.SwizzledSharedLayout(16, 8 // PHASES, PHASES, [2, 1, 0])
    x_shared: gl.constexpr = gl.SwizzledSharedLayout(16, 8 // LANES if LANES < 8 else 1, LANES, [2, 1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if PDL:
        cuda.gdc_launch_dependents()
    w_ring = gl.allocate_shared_memory(gl.uint8, [STAGES * TILES, DEPTH, BLOCK_N, HALF], w_shared)
    x_ring = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES * HALVES, DEPTH, ROWS, HALF], x_shared)
    s_ring = x_ring
    z_ring = x_ring
    if SCALES > 0:
        places: gl.constexpr = [STAGES * TILES * SCALES, DEPTH, BLOCK_N]
        s_ring = gl.allocate_shared_memory(scales_ptr.dtype.element_ty, places, plain)
        if ZEROS:
            z_ring = gl.allocate_shared_memory(zeros_ptr.dtype.element_ty, places, plain)
    first, stride = gl.program_id(0), gl.num_programs(0)
    num_steps = (gl.cdiv(size_n, BLOCK_N) - first + stride - 1) // stride * CHUNKS
    for step in gl.static_range(STAGES - 1):
        _ask_for_tiles(
            w_ring, s_ring, z_ring, weight_ptr, scales_ptr, zeros_ptr, step, num_steps, size_n, scale_stride, PARTS,
            TILES, SCALES, SCALE_ROWS, ZEROS, CHUNKS, WARPS_K, WARPS_N
        )  # fmt: skip
    if PDL:
        cuda.gdc_wait()
    for step in gl.static_range(STAGES - 1):
        _ask_for_rows(x_ring, x_ptr, step, num_steps, x_stride, num_rows, PARTS, HALVES, CHUNKS, WARPS_K, WARPS_N)
        ampere.async_copy.commit_group()
    scale = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(0, flat))
    if SCALED:
        scale = _scale_of_rows(
            squares_ptr, num_rows, num_squares, eps, SIZE_K, ROWS, BLOCK_U, WARPS_K * WARPS_N, False, flat
        )
    acc = gl.zeros([DEPTH, BLOCK_N, ROWS], gl.float32, mma)
    up = acc
    for i in range(0, num_steps):
        ampere.async_copy.wait_group(STAGES - 2)
        stage = i % STAGES
        acc = _multiply(acc, w_ring, x_ring, s_ring, z_ring, stage * TILES, stage, HALVES, SCALES, ZEROS, mma)
        if GATED:
            up = _multiply(up, w_ring, x_ring, s_ring, z_ring, stage * TILES + 1, stage, HALVES, SCALES, ZEROS, mma)
        # Refill the stage that was read in the previous step, for the step STAGES - 1 ahead.
        ahead = i + STAGES - 1
        _ask_for_tiles(
            w_ring, s_ring, z_ring, weight_ptr, scales_ptr, zeros_ptr, ahead, num_steps, size_n, scale_stride, PARTS,
            TILES, SCALES, SCALE_ROWS, ZEROS, CHUNKS, WARPS_K, WARPS_N
        )  # fmt: skip
        _ask_for_rows(x_ring, x_ptr, ahead, num_steps, x_stride, num_rows, PARTS, HALVES, CHUNKS, WARPS_K, WARPS_N)
        ampere.async_copy.commit_group()
        if i % CHUNKS == CHUNKS - 1:
            block = first + i // CHUNKS * stride
            y = gl.sum(acc, axis=0) * gl.expand_dims(scale, 0)
            acc = gl.zeros([DEPTH, BLOCK_N, ROWS], gl.float32, mma)
            if SCALES == 0:
                y *= _scales_of_block(scales_ptr, block * BLOCK_N, size_n, y)
            if GATED:
                other = gl.sum(up, axis=0) * gl.expand_dims(scale, 0)
                if SCALES == 0:
                    other *= _scales_of_block(scales_ptr + size_n, block * BLOCK_N, size_n, y)
                y = y / (1.0 + gl.exp(-y)) * other
                up = acc
            _store(
                y, block, out_ptr, weighted_ptr, sums_ptr, residual_ptr, norm_ptr, residual_stride, size_n, num_rows,
                ADD
            )  # fmt: skip


@GluonKernel
def _multiply(
    acc: gl.tensor, w_ring: gl.shared_memory_descriptor, x_ring: gl.shared_memory_descriptor,
    s_ring: gl.shared_memory_descriptor, z_ring: gl.shared_memory_descriptor, tile: gl.tensor, stage: gl.tensor,
    HALVES: gl.constexpr, SCALES: gl.constexpr, ZEROS: gl.constexpr, mma: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Add a step's products of one tile of W, with the scales of its groups."""
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 4)
    w = w_ring.index(tile).load(left)
    total = acc
    if SCALES > 0:
        total = gl.zeros(acc.shape, gl.float32, mma)
    if HALVES == 1:
        x = x_ring.index(stage).permute([0, 2, 1]).load(right)
        total = ampere.mma_v2(floats_of_bytes(w), x, total)
    else:
        x = x_ring.index(stage * 2).permute([0, 2, 1]).load(right)
        low, high = floats_of_halves(w, _zeros(z_ring, tile * SCALES, ZEROS, left))
        total = ampere.mma_v2(low, x, total)
        if SCALES == 2:
            acc += total * _group_scales(s_ring, tile * 2, mma)
            total = gl.zeros(acc.shape, gl.float32, mma)
            if ZEROS:
                high = floats_of_halves(w, _zeros(z_ring, tile * SCALES + 1, ZEROS, left))[1]
        x = x_ring.index(stage * 2 + 1).permute([0, 2, 1]).load(right)
        total = ampere.mma_v2(high, x, total)
    if SCALES > 0:
        total = acc + total * _group_scales(s_ring, tile * SCALES + SCALES - 1, mma)
    return total


@GluonKernel
def _group_scales(ring: gl.shared_memory_descriptor, place: gl.tensor, mma: gl.constexpr) -> gl.tensor:
    """Shapes: -> [parts, rows of W, 1]."""
    return gl.expand_dims(ring.index(place).load(gl.SliceLayout(2, mma)), 2).to(gl.float32)


@GluonKernel
def _zeros(ring: gl.shared_memory_descriptor, place: gl.tensor, ZEROS: gl.constexpr, left: gl.constexpr) -> gl.tensor:
    """128 + the zero points, in bfloat16: stored ones [parts, rows of W, 1], or 8."""
    zeros = gl.full([1, 1, 1], 136.0, gl.bfloat16, left)
    if ZEROS:
        zeros = gl.expand_dims(ring.index(place).load(gl.SliceLayout(2, left)), 2)
    return zeros


@GluonKernel
def floats_of_bytes(w: gl.tensor) -> gl.tensor:
    """Values of float8 e4m3, in bfloat16: exponents are 120 too small at first. 4 at a time, in order."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, s, f;
        mov.b32 f, 0x7b807b80;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        and.b32 s, a, 0x80008000;
        shr.b32 a, a, 4;
        lop3.b32 a, a, 0x07f007f0, s, 0xea;
        mul.rn.bf16x2 $0, a, f;
        and.b32 s, b, 0x80008000;
        shr.b32 b, b, 4;
        lop3.b32 b, b, 0x07f007f0, s, 0xea;
        mul.rn.bf16x2 $1, b, f;
        }""",
        "=r,=r,r",
        [w],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )


@GluonKernel
def floats_of_halves(w: gl.tensor, zeros: gl.tensor) -> gl.tuple:
    """Low and high 4 bits less the zero points, in bfloat16: 0x4300 + v is 128 + v. 4 bytes at a time, in order."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, e;
        mov.b32 e, 0x43004300;
        prmt.b32 a, $4, 0, 0x4140;
        prmt.b32 b, $4, 0, 0x4342;
        shr.b32 c, a, 4;
        shr.b32 d, b, 4;
        lop3.b32 a, a, 0x000f000f, e, 0xea;
        lop3.b32 b, b, 0x000f000f, e, 0xea;
        lop3.b32 c, c, 0x000f000f, e, 0xea;
        lop3.b32 d, d, 0x000f000f, e, 0xea;
        sub.rn.bf16x2 $0, a, $5;
        sub.rn.bf16x2 $1, b, $6;
        sub.rn.bf16x2 $2, c, $5;
        sub.rn.bf16x2 $3, d, $6;
        }""",
        "=r,=r,=r,=r,r,r,r",
        [w, zeros],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@GluonKernel
def _scales_of_block(scales_ptr: gl.tensor, first: gl.tensor, size_n: gl.tensor, y: gl.tensor) -> gl.tensor:
    """The scales of a block's rows. Shapes: -> [rows of W, 1]."""
    n = first + gl.arange(0, y.shape[0], gl.SliceLayout(1, y.type.layout))
    return gl.expand_dims(gl.load(scales_ptr + n, mask=n < size_n, other=0.0).to(gl.float32), 1)


@GluonKernel
def _ask_for_tiles(
    w_ring: gl.shared_memory_descriptor, s_ring: gl.shared_memory_descriptor, z_ring: gl.shared_memory_descriptor,
    weight_ptr: gl.tensor, scales_ptr: gl.tensor, zeros_ptr: gl.tensor, step: gl.tensor, num_steps: gl.tensor,
    size_n: gl.tensor, scale_stride: gl.tensor, PARTS: gl.constexpr, TILES: gl.constexpr, SCALES: gl.constexpr,
    SCALE_ROWS: gl.constexpr, ZEROS: gl.constexpr, CHUNKS: gl.constexpr, WARPS_K: gl.constexpr, WARPS_N: gl.constexpr,
) -> None:  # fmt: skip
    """Begin to copy a step's chunk of W, with the scales and zero points of its groups."""
    _ask_for_weights(w_ring, weight_ptr, step, num_steps, size_n, PARTS, TILES, CHUNKS, WARPS_K, WARPS_N)
    if SCALES > 0:
        _ask_for_scales(
            s_ring, scales_ptr, step, num_steps, size_n, scale_stride, PARTS, TILES, SCALES, SCALE_ROWS, CHUNKS,
            WARPS_K * WARPS_N
        )  # fmt: skip
        if ZEROS:
            _ask_for_scales(
                z_ring, zeros_ptr, step, num_steps, size_n, size_n * TILES, PARTS, TILES, SCALES, 1, CHUNKS,
                WARPS_K * WARPS_N
            )  # fmt: skip


@GluonKernel
def _ask_for_weights(
    ring: gl.shared_memory_descriptor, weight_ptr: gl.tensor, step: gl.tensor, num_steps: gl.tensor,
    size_n: gl.tensor, PARTS: gl.constexpr, TILES: gl.constexpr, CHUNKS: gl.constexpr, WARPS_K: gl.constexpr,
    WARPS_N: gl.constexpr,
) -> None:  # fmt: skip
    """Begin to copy a step's chunk of W, and of its second half if gated; nothing after the last step.

    What does not change from step to step is apart from what does, so that it is computed once.
    """
    DEPTH: gl.constexpr = ring.shape[1]
    BLOCK_N: gl.constexpr = ring.shape[2]
    HALF: gl.constexpr = ring.shape[3]
    LANES: gl.constexpr = HALF // 16
    copy: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 32 // LANES, LANES], [WARPS_K, WARPS_N, 1], [2, 1, 0])
    part = _along(DEPTH, gl.SliceLayout(1, gl.SliceLayout(2, copy)), 1, 2)
    n = _along(BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, copy)), 0, 2)
    places = n * (PARTS * HALF) + part * HALF + _along(HALF, gl.SliceLayout(0, gl.SliceLayout(1, copy)), 0, 1)
    first = (gl.program_id(0) + step // CHUNKS * gl.num_programs(0)) * BLOCK_N
    chunk = step % CHUNKS
    wanted = n < gl.where(step < num_steps, size_n - first, 0)
    if PARTS % DEPTH != 0:
        wanted = wanted & (part < PARTS - chunk * DEPTH)
    stage = step % (ring.shape[0] // TILES) * TILES
    for tile in gl.static_range(TILES):
        row = (first + size_n * tile).to(gl.int64)
        begin = weight_ptr + (row * (PARTS * HALF) + chunk * (DEPTH * HALF))
        ampere.async_copy.async_copy_global_to_shared(ring.index(stage + tile), begin + places, mask=wanted)


@GluonKernel
def _ask_for_scales(
    ring: gl.shared_memory_descriptor, scales_ptr: gl.tensor, step: gl.tensor, num_steps: gl.tensor,
    size_n: gl.tensor, scale_stride: gl.tensor, PARTS: gl.constexpr, TILES: gl.constexpr, SCALES: gl.constexpr,
    SCALE_ROWS: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr,
) -> None:  # fmt: skip
    """Begin to copy the scales, or zero points, of a step's groups."""
    DEPTH: gl.constexpr = ring.shape[1]
    BLOCK_N: gl.constexpr = ring.shape[2]
    WIDTH: gl.constexpr = 16 // (ring.dtype.primitive_bitwidth // 8) if SCALE_ROWS == 1 else 1  # that a thread copies
    LANES: gl.constexpr = BLOCK_N // WIDTH if BLOCK_N // WIDTH < 32 else 32
    copy: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    part = gl.expand_dims(gl.arange(0, DEPTH, gl.SliceLayout(1, copy)), 1)
    n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, copy)), 0)
    first = (gl.program_id(0) + step // CHUNKS * gl.num_programs(0)) * BLOCK_N
    before = step % CHUNKS * DEPTH
    wanted = n < gl.where(step < num_steps, size_n - first, 0)
    if PARTS % DEPTH != 0:
        wanted = wanted & (part < PARTS - before)
    stage = step % (ring.shape[0] // (TILES * SCALES)) * (TILES * SCALES)
    for tile in gl.static_range(TILES):
        for scale in gl.static_range(SCALES):
            row = (first + size_n * tile + n) // SCALE_ROWS
            place = (part * SCALES + (before * SCALES + scale)) * scale_stride + row
            target = ring.index(stage + tile * SCALES + scale)
            ampere.async_copy.async_copy_global_to_shared(target, scales_ptr + place, mask=wanted)


@GluonKernel
def _ask_for_rows(
    ring: gl.shared_memory_descriptor, x_ptr: gl.tensor, step: gl.tensor, num_steps: gl.tensor, x_stride: int,
    num_rows: int, PARTS: gl.constexpr, HALVES: gl.constexpr, CHUNKS: gl.constexpr, WARPS_K: gl.constexpr,
    WARPS_N: gl.constexpr,
) -> None:  # fmt: skip
    """Begin to copy a step's columns of x, those of each half apart."""
    DEPTH: gl.constexpr = ring.shape[1]
    ROWS: gl.constexpr = ring.shape[2]
    HALF: gl.constexpr = ring.shape[3]
    LANES: gl.constexpr = HALF // 8
    copy: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // LANES, LANES], [WARPS_K, WARPS_N, 1], [2, 1, 0])
    part = _along(DEPTH, gl.SliceLayout(1, gl.SliceLayout(2, copy)), 1, 2)
    m = _along(ROWS, gl.SliceLayout(0, gl.SliceLayout(2, copy)), 0, 2)
    k = part * (HALF * HALVES) + _along(HALF, gl.SliceLayout(0, gl.SliceLayout(1, copy)), 0, 1)
    places = m * x_stride + k
    first, chunk = gl.program_id(1) * ROWS, step % CHUNKS
    wanted = m < gl.where(step < num_steps, num_rows - first, 0)
    if PARTS % DEPTH != 0:
        wanted = wanted & (part < PARTS - chunk * DEPTH)
    begin = x_ptr + (first * x_stride + chunk * (DEPTH * HALF * HALVES))
    stage = step % (ring.shape[0] // HALVES) * HALVES
    for half in gl.static_range(HALVES):
        ampere.async_copy.async_copy_global_to_shared(
            ring.index(stage + half), begin + half * HALF + places, mask=wanted
        )


@GluonKernel
def _along(SIZE: gl.constexpr, layout: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr) -> gl.tensor:
    """0, 1, .. along one of three dimensions."""
    return gl.expand_dims(gl.expand_dims(gl.arange(0, SIZE, layout), FIRST), SECOND)
