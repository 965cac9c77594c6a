"""The kernel of 8-bit weights for 9 to 128 rows of x: tiles of W become bfloat16 on their way into the product.

As in `warpgroup_linear.py`, the copy engine brings tiles of W and of x into shared memory, and a warpgroup multiplies
64 rows of W with all rows of x. Here its left operand is in registers: a tile of W is read from shared memory as it
is stored, and its values, exact in bfloat16, never return there. While one program converts a tile, the other one of
its multiprocessor multiplies. Each row of W has one scale, which multiplies the row's sum.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import cuda, gl, hopper
from overlap_spec_kernels.launch import GluonKernel, ceil_div, dependent_launch, next_power_of_2, shared_zeros
from overlap_spec_kernels.linear.call import Call, num_columns, num_multiprocessors
from overlap_spec_kernels.linear.packing import Packing
from overlap_spec_kernels.linear.quantized_stream import _scales_of_block
from overlap_spec_kernels.linear.streamed_linear import _scale_of_rows, _store
from overlap_spec_kernels.linear.warpgroup_linear import _add_parts, _ask_for_tile, _ask_for_x

BLOCK_K = 128  # columns of a stage: a row of a tile of W is as long as the swizzle
_MOST_TILES = 4096  # of a weight whose columns are split
_RING_BYTES = 216 << 10  # shared memory of a multiprocessor
_MULTIPROCESSORS = 132  # of an H200: so many programs have a part of K
_LEAST_CHUNKS = {64: 8, 128: 16}  # of K that a part has, by `block_n`


class QuantizedTiles(NamedTuple):
    """How a linear is divided among programs and stages, chosen from shapes alone."""

    block_n: int  # rows of W at a time (twice as many if gated)
    stages: int
    splits: int = 1  # parts of K
    warps: int = 4
    per_sm: int = 2

    def num_programs(self, weight: Tensor, gated: bool) -> int:
        """`per_sm` programs per multiprocessor, or fewer if there are fewer tiles."""
        items = ceil_div(num_columns(weight, gated), self.block_n) * self.splits
        return min(items, self.per_sm * num_multiprocessors(weight.device))

    def run(self, call: Call, programs: int, packing: Packing) -> None:
        """Launch. Sync: never."""
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        num_rows, size_k = call.x.shape
        rows = max(next_power_of_2(num_rows), 8)
        num_tiles = ceil_div(num_columns(call.weight, call.gated), self.block_n)
        w_layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
        x_layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        partial, counters = call.x, call.x
        if self.splits > 1:
            size = (num_tiles, self.splits, self.block_n, rows)
            partial, counters = call.x.new_empty(size, dtype=torch.float32), tile_counters(call.x.device)
        _quantized_tiles_kernel[(programs,)](
            TensorDescriptor.from_tensor(call.weight, [self.block_n, BLOCK_K], w_layout),
            TensorDescriptor.from_tensor(call.x, [rows, BLOCK_K], x_layout),
            *call.tensors()[2:],
            packing.scales,
            partial,
            counters,
            *call.sizes()[1:],
            SIZE_K=size_k,
            SCALED=call.squares is not None,
            GATED=call.gated,
            ADD=call.residual is not None,
            ROWS=rows,
            BLOCK_N=self.block_n,
            BLOCK_K=BLOCK_K,
            STAGES=self.stages,
            SPLITS=self.splits,
            WARPS=self.warps,
            BLOCK_U=max(next_power_of_2(call.num_squares), self.warps),
            num_warps=self.warps,
            **dependent_launch(call.x.device, num_rows),
        )


def tiles_of(x: Tensor, weight: Tensor, gated: bool, packing: Packing) -> QuantizedTiles | None:
    """The division for these shapes; None where this kernel does not apply.

    The choice was measured on an H200: benchmarks/results/choosing/quantized_h200.json.
    """
    num_rows, size_k = x.shape
    if packing.bits != 8 or packing.scales_per_part or size_k % BLOCK_K or not 8 < num_rows <= 128:
        return None
    if x.stride(0) % 8 or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return None
    block_n, warps, per_sm = (64, 4, 2) if num_rows <= 64 else (128, 8, 1)
    stage = BLOCK_K * ((2 if gated else 1) * block_n + 2 * max(next_power_of_2(num_rows), 8))
    stages = max(_RING_BYTES // per_sm // stage, 2)
    if gated:
        return QuantizedTiles(block_n, stages, 1, warps, per_sm)
    chunks = size_k // BLOCK_K
    wanted = min(_MULTIPROCESSORS * per_sm // ceil_div(weight.shape[0], block_n), chunks // _LEAST_CHUNKS[block_n])
    splits = next(n for n in range(max(wanted, 1), 0, -1) if chunks % n == 0)
    return QuantizedTiles(block_n, stages, splits, warps, per_sm)


@functools.cache
def tile_counters(device: torch.device) -> Tensor:
    """Number of programs that have stored their part of each tile; zero between kernels. Shapes: -> [tiles] i32."""
    return shared_zeros(_MOST_TILES, device)


@GluonKernel.with_options(do_not_specialize=("num_rows", "num_squares"))
def _quantized_tiles_kernel(
    w_tiles: gl.tensor, x_tiles: gl.tensor, squares_ptr: gl.tensor, residual_ptr: gl.tensor, norm_ptr: gl.tensor,
    out_ptr: gl.tensor, weighted_ptr: gl.tensor, sums_ptr: gl.tensor, scales_ptr: gl.tensor, partial_ptr: gl.tensor,
    counters_ptr: gl.tensor,
    residual_stride: int, size_n: gl.tensor, num_rows: int, num_squares: int, eps: float,
    SIZE_K: gl.constexpr, SCALED: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, PDL: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    WARPS: gl.constexpr, BLOCK_U: gl.constexpr,
) -> None:  # fmt: skip
    """Program p takes items p, p + programs, ..: item i is part i % SPLITS of K of tile i // SPLITS of W's rows."""
    CHUNKS: gl.constexpr = SIZE_K // BLOCK_K // SPLITS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    if PDL:
        cuda.gdc_launch_dependents()
    w_ring = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK_N, BLOCK_K], w_tiles.layout)
    up_ring = w_ring
    if GATED:
        up_ring = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK_N, BLOCK_K], w_tiles.layout)
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, ROWS, BLOCK_K], x_tiles.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(bars.index(i), count=1)
    hopper.fence_async_shared()
    num_items = gl.cdiv(size_n, BLOCK_N) * SPLITS
    first, stride = gl.program_id(0), gl.num_programs(0)
    num_steps = (num_items - first + stride - 1) // stride * CHUNKS
    for i in gl.static_range(STAGES - 1):
        _ask_for_tile(
            w_ring, up_ring, bars, w_tiles, first, stride, i, num_steps, size_n, GATED, SPLITS, CHUNKS, x_tiles
        )
    if PDL:
        cuda.gdc_wait()
    for i in gl.static_range(STAGES - 1):
        _ask_for_x(x_ring, bars, x_tiles, first, stride, i, num_steps, SPLITS, CHUNKS)
    scale = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(0, mma))
    if SCALED:
        scale = _scale_of_rows(squares_ptr, num_rows, num_squares, eps, SIZE_K, ROWS, BLOCK_U, WARPS, False, mma)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    step = 0
    for item in range(first, num_items, stride):
        acc = gl.zeros([BLOCK_N, ROWS], gl.float32, mma)
        up = acc
        for _chunk in range(0, CHUNKS):
            stage = step % STAGES
            hopper.mbarrier.wait(bars.index(stage), (step // STAGES) & 1)
            x = x_ring.index(stage).permute((1, 0))
            w = _floats_of_pairs(w_ring.index(stage).load(left))
            acc = hopper.warpgroup_mma(w, x, acc, is_async=True)
            if GATED:
                w_up = _floats_of_pairs(up_ring.index(stage).load(left))
                up = hopper.warpgroup_mma(w_up, x, up, is_async=True)
            # The previous step's products have ended: refill its stage for the step STAGES - 1 ahead.
            ahead = step + STAGES - 1
            _ask_for_tile(
                w_ring, up_ring, bars, w_tiles, first, stride, ahead, num_steps, size_n, GATED, SPLITS, CHUNKS, x_tiles
            )
            _ask_for_x(x_ring, bars, x_tiles, first, stride, ahead, num_steps, SPLITS, CHUNKS)
            # A product reads registers until it ends, so it ends before the next tile is converted into them.
            if GATED:
                acc, up = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc, up])
            else:
                acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
            step += 1
        block, y, is_last = item // SPLITS, acc, True
        if SPLITS > 1:
            y, is_last = _add_parts(acc, partial_ptr, counters_ptr, block, item % SPLITS, SPLITS)
        y *= gl.expand_dims(scale, 0) * _scales_of_block(scales_ptr, block * BLOCK_N, size_n, acc)
        if GATED:
            up *= gl.expand_dims(scale, 0) * _scales_of_block(scales_ptr + size_n, block * BLOCK_N, size_n, acc)
            y = y / (1.0 + gl.exp(-y)) * up
        if is_last:
            _store(
                y, block, out_ptr, weighted_ptr, sums_ptr, residual_ptr, norm_ptr, residual_stride, size_n, num_rows,
                ADD
            )  # fmt: skip


@GluonKernel
def _floats_of_pairs(w: gl.tensor) -> gl.tensor:
    """Values of float8 e4m3, in bfloat16: exponents are 120 too small at first. 2 at a time, in order."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, s, f;
        mov.b32 f, 0x7b807b80;
        prmt.b32 a, $1, 0, 0x1404;
        and.b32 s, a, 0x80008000;
        shr.b32 a, a, 4;
        lop3.b32 a, a, 0x07f007f0, s, 0xea;
        mul.rn.bf16x2 $0, a, f;
        }""",
        "=r,r",
        [w],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )
