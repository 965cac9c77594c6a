"""The kernel of `fused_linear`, `linear_logits`, `linear_add` and `linear_argmax` for large weights and 9 to 128 rows.

With so many rows, reading x from the L2 cache costs about as much as reading W from memory, so a program takes many
rows of W at once: 64 or 128 are the left operand of a warpgroup's product, and all rows of x the right one. The copy
engine brings a tile of each into shared memory per stage. If the tiles are too few for the multiprocessors, K is split
among several programs; the last of them to finish adds the parts, in order. Elsewhere few programs begin where the
kernel before ends first, and crowd there: the multiprocessors of a GPC share a way to memory, so 15 programs in one
take half longer than eight (H200). So each begins beside one that does nothing (`IN_PAIRS`).

    ring      [stage] | rows of W, K of a stage | rows of x, K of a stage |    swizzled by 128 bytes
    product   [rows of W, rows of x] in registers, accumulated over K
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import barrier, cuda, gl, hopper
from overlap_spec_kernels.launch import (
    GluonKernel,
    ceil_div,
    dependent_launch,
    next_power_of_2,
    runs_warpgroups,
    shared_zeros,
)
from overlap_spec_kernels.linear.call import Call, num_columns, num_multiprocessors
from overlap_spec_kernels.linear.streamed_linear import _LEAST_PADDED, _better, _of_block, _scale_of_rows, _store

_DTYPES = (torch.bfloat16, torch.float16)
_LARGE = 8 << 20  # bytes of the smallest weight for this kernel
_MOST_ROWS = 128  # rows of x
_SPLIT_BELOW = 67  # tiles: fewer leave half of a Hopper's multiprocessors idle


class Tiles(NamedTuple):
    """How a linear is divided among programs and stages, chosen from shapes alone."""

    block_n: int  # rows of W at a time (twice as many if gated)
    block_k: int
    stages: int
    splits: int = 1  # parts of K
    warps: int = 4

    def num_programs(self, weight: Tensor, gated: bool) -> int:
        """One program per multiprocessor, or fewer if there are fewer tiles."""
        items = ceil_div(num_columns(weight, gated), self.block_n) * self.splits
        return min(items, num_multiprocessors(weight.device))

    def run(self, call: Call, programs: int) -> None:
        """Launch. Sync: never."""
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        num_rows, size_k = call.x.shape
        rows = max(next_power_of_2(num_rows), 16)
        num_tiles = ceil_div(num_columns(call.weight, call.gated), self.block_n)
        swizzled = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        partial, counters = call.x, call.x
        if self.splits > 1:
            size = (num_tiles, self.splits, self.block_n, rows)
            partial, counters = call.x.new_empty(size, dtype=torch.float32), tile_counters(call.x.device)
        together = 2 if 2 * programs <= num_multiprocessors(call.x.device) else 1
        _warpgroup_linear_kernel.in_clusters(together, (programs * together,))(
            TensorDescriptor.from_tensor(call.weight, [self.block_n, self.block_k], swizzled),
            TensorDescriptor.from_tensor(call.x, [rows, self.block_k], swizzled),
            *call.tensors()[2:],
            call.given(call.best),
            call.given(call.best_at),
            partial,
            counters,
            call.given(call.bias),
            *call.sizes()[1:],
            SIZE_K=size_k,
            SCALED=call.squares is not None,
            GATED=call.gated,
            ADD=call.residual is not None,
            ARGMAX=call.best is not None,
            BIASED=call.bias is not None,
            ROWS=rows,
            BLOCK_N=self.block_n,
            BLOCK_K=self.block_k,
            STAGES=self.stages,
            SPLITS=self.splits,
            IN_PAIRS=together == 2,
            WARPS=self.warps,
            BLOCK_U=max(next_power_of_2(call.num_squares), self.warps),
            num_warps=self.warps,
            **dependent_launch(call.x.device, num_rows),
        )


def tiles_for(x: Tensor, weight: Tensor, gated: bool) -> Tiles | None:
    """The division for these shapes; None where this kernel does not apply or a BLAS is faster.

    A BLAS is faster for many rows if tiles are too few to share the copies of x. The choice was measured on an H200:
    benchmarks/results/choosing/tiles_h200.json.
    """
    num_rows, size_k = x.shape
    if x.dtype not in _DTYPES or weight.nbytes < _LARGE or num_rows > _MOST_ROWS or not runs_warpgroups(x.device):
        return None
    if size_k % 64 or x.stride(0) % 8 or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return None
    if size_k % 256:
        whole = not gated and size_k >= _LEAST_PADDED and num_rows <= 64
        return Tiles(64, 64, 12 if num_rows <= 32 else 8) if whole else None
    if num_rows <= 32:
        splits = 2 if ceil_div(weight.shape[0], 64) < _SPLIT_BELOW else 1
        return Tiles(64, 128, 5) if gated else Tiles(64, 128, 8, splits)
    if gated:
        return Tiles(128, 64, 4, warps=8)
    return Tiles(64, 128, 6) if num_rows <= 64 else None


def argmax_tiles_for(x: Tensor, weight: Tensor) -> Tiles | None:
    """The division for the best of each row's columns, of 65 to 128 rows: as many rows of W at once as for a gate.

    So a tile of x is copied half as often, and nothing is written for a BLAS's second kernel to read.
    """
    tiles = tiles_for(x, weight, gated=True)
    return None if tiles is None else tiles._replace(block_n=2 * tiles.block_n)


@functools.cache
def tile_counters(device: torch.device) -> Tensor:
    """Number of programs that have stored their part of each tile; zero between kernels. Shapes: -> [tiles] i32."""
    return shared_zeros(_SPLIT_BELOW, device)


@GluonKernel.with_options(do_not_specialize=("num_rows", "num_squares"))
def _warpgroup_linear_kernel(
    w_tiles: gl.tensor, x_tiles: gl.tensor, squares_ptr: gl.tensor, residual_ptr: gl.tensor, norm_ptr: gl.tensor,
    out_ptr: gl.tensor, weighted_ptr: gl.tensor, sums_ptr: gl.tensor, best_ptr: gl.tensor, best_at_ptr: gl.tensor,
    partial_ptr: gl.tensor, counters_ptr: gl.tensor, bias_ptr: gl.tensor,
    residual_stride: int, size_n: gl.tensor, num_rows: int, num_squares: int, eps: float,
    SIZE_K: gl.constexpr, SCALED: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, ARGMAX: gl.constexpr,
    BIASED: gl.constexpr, PDL: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, SPLITS: gl.constexpr, IN_PAIRS: gl.constexpr, WARPS: gl.constexpr, BLOCK_U: gl.constexpr,
) -> None:  # fmt: skip
    """Program p takes items p, p + programs, ..: item i is part i % SPLITS of K of tile i // SPLITS of W's rows.

    IN_PAIRS: every other program takes none; it keeps a multiprocessor until the kernels before this one have ended.
    """
    CHUNKS: gl.constexpr = SIZE_K // BLOCK_K // SPLITS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    shared: gl.constexpr = w_tiles.layout
    dtype: gl.constexpr = w_tiles.dtype
    if PDL:
        cuda.gdc_launch_dependents()
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], shared)
    up_ring = w_ring
    if GATED:
        up_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], shared)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_K], shared)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(bars.index(i), count=1)
    hopper.fence_async_shared()
    num_items = gl.cdiv(size_n, BLOCK_N) * SPLITS
    first, stride = gl.program_id(0), gl.num_programs(0)
    if IN_PAIRS:
        first, stride = gl.where(first % 2 == 0, first // 2, num_items), stride // 2
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
    best = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, mma))
    best_at = gl.zeros([ROWS], gl.int32, gl.SliceLayout(0, mma))
    step = 0
    for item in range(first, num_items, stride):
        acc = gl.zeros([BLOCK_N, ROWS], gl.float32, mma)
        up = acc
        bias = gl.zeros([BLOCK_N], gl.float32, gl.SliceLayout(1, mma))
        if BIASED:
            bias = _of_block(bias_ptr, item // SPLITS, size_n, bias)
        for _chunk in range(0, CHUNKS):
            stage = step % STAGES
            hopper.mbarrier.wait(bars.index(stage), (step // STAGES) & 1)
            acc, up = _multiply(w_ring.index(stage), up_ring.index(stage), x_ring.index(stage), acc, up, GATED)
            # The previous step's products have ended: refill its stage for the step STAGES - 1 ahead.
            ahead = step + STAGES - 1
            _ask_for_tile(
                w_ring, up_ring, bars, w_tiles, first, stride, ahead, num_steps, size_n, GATED, SPLITS, CHUNKS, x_tiles
            )
            _ask_for_x(x_ring, bars, x_tiles, first, stride, ahead, num_steps, SPLITS, CHUNKS)
            step += 1
        if GATED:
            acc, up = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc, up])
        else:
            acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        block, y, is_last = item // SPLITS, acc, True
        if SPLITS > 1:
            y, is_last = _add_parts(acc, partial_ptr, counters_ptr, block, item % SPLITS, SPLITS)
        y *= gl.expand_dims(scale, 0)
        if BIASED:
            y += gl.expand_dims(bias, 1)
        if GATED:
            y = y / (1.0 + gl.exp(-y)) * (up * gl.expand_dims(scale, 0))
        if is_last:
            if ARGMAX:
                best, best_at = _better(y, best, best_at, block * BLOCK_N, size_n)
            else:
                _store(
                    y, block, out_ptr, weighted_ptr, sums_ptr, residual_ptr, norm_ptr, residual_stride, size_n,
                    num_rows, ADD
                )  # fmt: skip
    if ARGMAX:
        m = gl.arange(0, ROWS, gl.SliceLayout(0, mma))
        has_any = (m < num_rows) & (first < num_items)
        gl.store(best_ptr + first * num_rows + m, best, mask=has_any)
        gl.store(best_at_ptr + first * num_rows + m, best_at, mask=has_any)


@GluonKernel
def _ask_for_tile(
    ring: gl.shared_memory_descriptor, up_ring: gl.shared_memory_descriptor, bars: gl.shared_memory_descriptor,
    tiles: gl.tensor, first: gl.tensor, stride: gl.tensor, step: gl.tensor, num_steps: gl.tensor, size_n: gl.tensor,
    GATED: gl.constexpr, SPLITS: gl.constexpr, CHUNKS: gl.constexpr, x_tiles: gl.tensor,
) -> None:  # fmt: skip
    """Begin to copy a step's tile of W, and of its second half if gated; nothing after the last step."""
    BLOCK_N: gl.constexpr = ring.shape[1]
    BLOCK_K: gl.constexpr = ring.shape[2]
    item = first + step // CHUNKS * stride
    k = (item % SPLITS * CHUNKS + step % CHUNKS) * BLOCK_K
    stage = step % ring.shape[0]
    wanted = step < num_steps
    num_bytes: gl.constexpr = tiles.block_type.nbytes * (2 if GATED else 1) + x_tiles.block_type.nbytes
    bar = bars.index(stage)
    hopper.mbarrier.expect(bar, num_bytes, pred=wanted)
    n = item // SPLITS * BLOCK_N
    hopper.tma.async_copy_global_to_shared(tiles, [n, k], bar, ring.index(stage), pred=wanted)
    if GATED:
        hopper.tma.async_copy_global_to_shared(tiles, [size_n + n, k], bar, up_ring.index(stage), pred=wanted)


@GluonKernel
def _ask_for_x(
    ring: gl.shared_memory_descriptor, bars: gl.shared_memory_descriptor, tiles: gl.tensor, first: gl.tensor,
    stride: gl.tensor, step: gl.tensor, num_steps: gl.tensor, SPLITS: gl.constexpr, CHUNKS: gl.constexpr,
) -> None:  # fmt: skip
    """Begin to copy a step's columns of x. Rows past the end of x are zeros."""
    item = first + step // CHUNKS * stride
    k = (item % SPLITS * CHUNKS + step % CHUNKS) * ring.shape[2]
    stage = step % ring.shape[0]
    hopper.tma.async_copy_global_to_shared(tiles, [0, k], bars.index(stage), ring.index(stage), pred=step < num_steps)


@GluonKernel
def _multiply(
    w: gl.shared_memory_descriptor, w_up: gl.shared_memory_descriptor, x: gl.shared_memory_descriptor, acc: gl.tensor,
    up: gl.tensor, GATED: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """Begin to add a step's products; return when those of the previous step have ended."""
    turned = x.permute((1, 0))
    acc = hopper.warpgroup_mma(w, turned, acc, is_async=True)
    if GATED:
        up = hopper.warpgroup_mma(w_up, turned, up, is_async=True)
        acc, up = hopper.warpgroup_mma_wait(num_outstanding=2, deps=[acc, up])
    else:
        acc = hopper.warpgroup_mma_wait(num_outstanding=1, deps=[acc])
    return acc, up


@GluonKernel
def _add_parts(
    acc: gl.tensor, partial_ptr: gl.tensor, counters_ptr: gl.tensor, block: gl.tensor, part: gl.tensor,
    SPLITS: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """Leave this part of a tile's sum; the last program gets all parts, in their order, and True."""
    BLOCK_N: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, acc.type.layout)), 1)
    m = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, acc.type.layout)), 0)
    place = partial_ptr + block * (SPLITS * BLOCK_N * ROWS) + n * ROWS + m
    gl.store(place + part * (BLOCK_N * ROWS), acc)
    barrier()
    arrived = gl.atomic_add(counters_ptr + block, 1, sem="acq_rel")
    is_last = arrived == SPLITS - 1
    total = acc
    if is_last:
        total = gl.load(place, volatile=True)
        for other in gl.static_range(1, SPLITS):
            total += gl.load(place + other * (BLOCK_N * ROWS), volatile=True)
        gl.store(counters_ptr + block, 0)
    return total, is_last
