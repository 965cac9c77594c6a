"""The sum over each row's experts, in one launch with their second product, or for any form of their weights on a CPU.

A row's result has the same bits whatever rows are beside it, and however many. On a CPU products are of tiles of `TILE`
rows, the last one padded, and a row's sum has one order.

On a GPU one row has `gate_row` for its first product, which begins before its experts are chosen, and the second one
with the sum in `multiply_and_add` in 16 bits, in `down_row` in 4; in float8, and of a few rows in 16 bits, that is
`quantized_streams.sum_down`. More rows have the products of their format and `experts_mlp.sum_kernel`, with the same
bits. All write sums of squares for the norm after them, of 16 columns each (`normed.py`).
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.experts.stacks import QuantizedStack
from overlap_spec_kernels.language import ampere, cuda, gl
from overlap_spec_kernels.launch import (
    GluonKernel,
    ceil_div,
    dependent_launch,
    next_power_of_2,
    runs_gluon,
    warps_for,
)
from overlap_spec_kernels.linear.call import num_multiprocessors
from overlap_spec_kernels.norm.normed import Norm, Normed, Unscaled
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, box_map, runs_hopper

TILE = 4  # rows of a product: on a CPU so many take as long as one
PART = 16  # columns of a sum of squares, and of a program
_BLOCK_K = 128  # columns of a step
_MOST_PLACES, _MOST_INNER = 8, 2048  # experts of a row, and their inner columns
_SHARED = 176 << 10  # bytes of shared memory: with a router between, a larger ring is not faster

_FOLDER = Path(__file__).parent / "cuda"
GATE_SOURCE, DOWN_SOURCE = _FOLDER / "expert_gate.cu", _FOLDER / "expert_down.cu"
_GROUP, _MOST_BYTES = 128, 222 << 10  # columns with a scale; of a program's shared memory
_GATE_BYTES = {16: _MOST_BYTES, 8: 116 << 10, 4: _MOST_BYTES}  # by bits: in 8 the sum's kernel has room beside it
# Of shared memory: no multiprocessor has two programs of the first product, or three of the sum in 4 bits, while
# another has none.
_LEAST_BYTES, _LEAST_DOWN_BYTES = 114 << 10, 102 << 10
_GATE_COLUMNS, _MOST_WARPS = 8, 32  # of a tile; warps of a program
_GATE_CHUNKS = {16: (256,), 8: (256, 128), 4: (512,)}  # columns of a stage, by bits: the first of which two fit
_GATE_PARTS, _MOST_GROUPS = {16: 1, 8: 2, 4: 1}, 16  # warps of a tile at least; groups of one, whose sums it has
_MOST_SQUARES, _WARPS_OF_SCALES = 128, 4  # sums of squares of a row, and warps of the kernels that add them up


class Routing(NamedTuple):
    """The experts of each row, in the order in which they were chosen: the best first."""

    experts: Tensor  # [T, k] i64
    weights: Tensor  # [T, k] f32 (f64 of a float64 model)


def sum_of_experts(x: Tensor, routing: Routing, num_experts: int, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The weighted sum of `compute(expert, rows)` over each row's experts, in the order of its routing.

    Products and sums are operations of their own, each rounded, in the type of the weights.
    Shapes: x [T, H], compute [TILE, H] -> [TILE, H]; -> [T, H]. Sync: waits for the routing.
    """
    (num_rows, top_k), size = routing.experts.shape, x.shape[1]
    results = x.new_empty(num_rows * top_k, size)
    for expert, places in expert_rows(routing.experts, num_experts):
        results[places] = in_tiles(functools.partial(compute, expert), x[places // top_k], size)
    by_place = results.view(num_rows, top_k, size)
    total = routing.weights[:, :1] * by_place[:, 0]
    for place in range(1, top_k):
        total = total + routing.weights[:, place, None] * by_place[:, place]
    return total.to(x.dtype)


def expert_rows(experts: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """Every expert that some row has, ascending, and its places among the T * k, ascending.

    Shapes: experts [T, k] i64 -> [n] i64 each. Sync: waits for `experts`.
    """
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    places = flat.argsort(stable=True).split(counts)
    return ((expert, rows) for expert, rows in enumerate(places) if counts[expert])


def in_tiles(compute: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
    """`compute` of `TILE` rows at a time. Shapes: x [T, I], compute [TILE, I] -> [TILE, size]; -> [T, size]."""
    results = x.new_empty(len(x), size)
    for begin in range(0, len(x), TILE):
        tile = x[begin : begin + TILE]
        missing = TILE - len(tile)
        results[begin : begin + TILE] = compute(F.pad(tile, (0, 0, 0, missing)))[: len(tile)]
    return results


class GateSizes(NamedTuple):
    """Of expert_gate.cu, as its names have it."""

    hidden: int
    inner: int
    bits: int
    tiles: int
    warps: int
    scale_rows: int = 1
    squares: int = 0

    @property
    def chunk(self) -> int:
        chunks = [math.gcd(self.hidden // self.parts, most) for most in _GATE_CHUNKS[self.bits]]
        return next((chunk for chunk in chunks if self._stages(chunk) > 1), chunks[-1])

    @property
    def parts(self) -> int:
        """Warps that share a tile, each with whole groups: a power of two. More leave no room for the next kernel."""
        room = 1 << max(_MOST_WARPS // self.warps, 1).bit_length() - 1
        of_groups = 1 if self.bits == 16 else next_power_of_2(ceil_div(self.hidden, _GROUP * _MOST_GROUPS))
        return math.gcd(self.hidden // _GROUP, max(of_groups, _GATE_PARTS[self.bits]), room)

    @property
    def stages(self) -> int:
        """As many as chunks, or as fit."""
        return min(self._stages(self.chunk), self.hidden // self.parts // self.chunk)

    @property
    def num_bytes(self) -> int:
        """Stages of all warps, and x, or more."""
        return max(self.stages * self._bytes_of_stages(self.chunk) + 2 * self.hidden, _LEAST_BYTES)

    @property
    def fits(self) -> bool:
        """Boxes have whole lines, and chunks are on their way while others are multiplied."""
        whole = self.chunk * self.bits % 1024 == 0 and self.chunk % _GROUP == 0 and self.inner % _GATE_COLUMNS == 0
        columns = self.hidden // self.parts
        whole &= self.bits != 8 or columns // _GROUP <= _MOST_GROUPS
        return whole and self.warps <= _MOST_WARPS and self.stages >= min(2, columns // self.chunk)

    def _stages(self, chunk: int) -> int:
        """That fit."""
        return (_GATE_BYTES[self.bits] - 2 * self.hidden) // self._bytes_of_stages(chunk)

    def _bytes_of_stages(self, chunk: int) -> int:
        """One of each warp."""
        return self.warps * self.parts * 2 * _GATE_COLUMNS * chunk * self.bits // 8


class _Gate(ctypes.Structure):
    """`Work` of expert_gate.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "experts", "scales", "out", "squares")),
        ("eps", ctypes.c_float),
    )


def takes_gate(x: Tensor, weight: Tensor | QuantizedStack, experts: Tensor) -> bool:
    """Whether `gate_row` takes these: one row, in bfloat16 or as `_in_groups` has it. Shapes: x [T, H]."""
    fits = _in_groups(weight, 8, 4) if isinstance(weight, QuantizedStack) else weight.dtype == torch.bfloat16
    one = fits and len(experts) == 1 and x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0
    return one and runs_hopper(x.device) and _gate_sizes(weight, experts).fits


def _in_groups(weight: QuantizedStack, *bits: int) -> bool:
    """Whether it is in so many bits with a scale for 128 columns, in 8 of a block, and symmetric."""
    packing = weight.packing
    fits = packing.bits in bits and (packing.bits == 4 or packing.scale_rows % PART == 0)
    return fits and packing.group == _GROUP and packing.zeros is None


def _gate_sizes(weight: Tensor | QuantizedStack, experts: Tensor) -> GateSizes:
    _, rows, hidden = weight.shape
    bits, scale_rows = (16, 1) if isinstance(weight, Tensor) else (weight.packing.bits, weight.packing.scale_rows)
    tiles = experts.shape[1] * rows // 2 // _GATE_COLUMNS
    warps = ceil_div(tiles, num_multiprocessors(experts.device))
    return GateSizes(hidden, rows // 2, bits, tiles, warps, scale_rows)


@functools.cache
def _gate_kernel(sizes: GateSizes, device: torch.device) -> CudaKernel:
    names = sizes._asdict() | {"chunk": sizes.chunk, "stages": sizes.stages, "parts": sizes.parts}
    code = CudaCode(GATE_SOURCE, tuple(f"{key.upper()}={value}" for key, value in names.items()))
    return CudaKernel(code, "expert_gate", 32 * sizes.warps * sizes.parts, sizes.num_bytes)


def gate_row(rows: Tensor | Unscaled, weight: Tensor | QuantizedStack, experts: Tensor) -> Tensor:
    """silu(gate) * up of one row's experts, right after their choice. Shapes: rows [1, H], experts [1, k] -> [k, I].

    Sync: never.
    """
    data, scales = (weight, None) if isinstance(weight, Tensor) else (weight.data, weight.packing.scales)
    x, squares, eps = _row_to_scale(rows, weight)
    sizes, line = _gate_sizes(weight, experts), 128 // data.element_size()
    sizes = sizes._replace(squares=0 if squares is None else len(squares))
    out, lines = x.new_empty(experts.shape[1], sizes.inner), sizes.chunk * sizes.bits // 1024
    boxes = box_map(data.view(-1, 8, data.shape[2] // line, line).transpose(1, 2), (1, lines, 8, line))
    pointers = (None if each is None else each.data_ptr() for each in (x, experts, scales, out, squares))
    programs = ceil_div(sizes.tiles, sizes.warps)
    _gate_kernel(sizes, x.device).launch(programs, (boxes, _Gate(*pointers, eps)))
    return out


def _row_to_scale(rows: Tensor | Unscaled, weight: Tensor | QuantizedStack) -> tuple[Tensor, Tensor | None, float]:
    """A row, sums of squares of which `gate_row` makes its scale, and epsilon; no sums of a row that is scaled before.

    That is taken in 16 bits, whose products wait for W anyway, and where kernels that scale rows add up squares in
    another order. Shapes: [1, H], [parts, 1].
    """
    if not isinstance(rows, Unscaled):
        return rows, None, 0.0
    (_, x, squares, eps), scaled = rows
    fits = squares is not None and len(squares) <= _MOST_SQUARES and x.data_ptr() % 16 == 0
    if fits and isinstance(weight, QuantizedStack) and warps_for(next_power_of_2(x.shape[1])) == _WARPS_OF_SCALES:
        return x, squares, eps
    return scaled, None, 0.0


class _Down(ctypes.Structure):
    """`Work` of expert_down.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "gated", "experts", "weights", "shared")),
        *((name, ctypes.c_void_p) for name in ("residual", "norm", "out", "weighted", "squares")),
        *((name, ctypes.c_int) for name in ("residual_stride", "size_n", "num_rows")),
    )


def takes_down(x: Tensor, weight: QuantizedStack, experts: Tensor) -> bool:
    """Whether `down_row` takes these: of one row, in 4 bits with scales of groups. Shapes: x [T, H], experts [T, k]."""
    (_, hidden, inner), top_k = weight.shape, experts.shape[1]
    whole = hidden % PART == 0 and inner % _GROUP == 0 and top_k <= _MOST_WARPS
    fits = _in_groups(weight, 4) and whole and len(experts) == 1 and _down_bytes(inner, top_k) <= _MOST_BYTES
    return fits and x.dtype == torch.bfloat16 and runs_hopper(x.device)


def _down_bytes(inner: int, top_k: int) -> int:
    """Rows of W, and of the gated product, or more."""
    return max(top_k * (PART * (inner // 2 + 16) + 2 * inner), _LEAST_DOWN_BYTES)


@functools.cache
def _down_kernel(hidden: int, inner: int, top_k: int, shared: bool, wide: bool, device: torch.device) -> CudaKernel:
    names = {"HIDDEN": hidden, "INNER": inner, "TOP_K": top_k, "SHARED": int(shared), "WIDE": int(wide)}
    code = CudaCode(DOWN_SOURCE, tuple(f"{key}={value}" for key, value in names.items()))
    return CudaKernel(code, "expert_down", 32 * top_k, _down_bytes(inner, top_k))


def down_row(
    gated: Tensor, weight: QuantizedStack, routing: Routing, residual: Tensor, norm: Norm, shared: Tensor | None
) -> Normed:
    """See `multiply_and_add`: in 4 bits. Sync: never."""
    (_, hidden, inner), top_k = weight.shape, len(gated)
    values, weighted = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
    squares, scales = squares_of(values), weight.packing.scales
    given = weight.data, scales, gated, *routing, shared, residual, norm.weight, values, weighted, squares
    pointers = (None if each is None else each.data_ptr() for each in given)
    kernel = _down_kernel(hidden, inner, top_k, shared is not None, norm.weight.dtype == torch.float32, gated.device)
    kernel.launch(hidden // PART, (_Down(*pointers, 0, hidden, 1),))
    return Normed(values, weighted, squares, norm.eps)


def sums_in_product(weight: Tensor, experts: Tensor) -> bool:
    """Whether `multiply_and_add` takes these. Shapes: weight [E, H, I], experts [T, k]."""
    (_, size, inner), (num_rows, top_k) = weight.shape, experts.shape
    fits = size % PART == 0 and inner % _BLOCK_K == 0 and inner <= _MOST_INNER and top_k <= _MOST_PLACES
    return num_rows == 1 and fits and weight.element_size() == 2 and runs_gluon(weight.device)


def squares_of(x: Tensor) -> Tensor:
    """Room for sums of squares of parts of rows. Shapes: x [T, H] -> [parts, T] f32."""
    return torch.empty((ceil_div(x.shape[1], PART), len(x)), dtype=torch.float32, device=x.device)


def multiply_and_add(
    x: Tensor, weight: Tensor, routing: Routing, residual: Tensor, norm: Norm, shared: Tensor | None
) -> Normed:
    """The second product of a row's experts, their sum, what is added to it, and its norm: see `experts_add`.

    Shapes: x [k, I], weight [E, H, I], routing [1, k], residual, shared [1, H] -> [1, H]. Sync: never.
    """
    (_, size, inner), top_k, squares = weight.shape, len(x), squares_of(residual)
    values, weighted = (torch.empty((1, size), dtype=x.dtype, device=x.device) for _ in range(2))
    warps = next_power_of_2(top_k)
    _multiply_and_add_kernel[(size // PART,)](
        x,
        weight,
        routing.experts,
        routing.weights,
        residual if shared is None else shared,
        residual,
        norm.weight,
        values,
        weighted,
        squares,
        size,
        SIZE_K=inner,
        TOP_K=top_k,
        SHARED=shared is not None,
        WARPS=warps,
        BLOCK_K=_BLOCK_K,
        STAGES=min(inner // _BLOCK_K, (_SHARED - 2 * 8 * inner) // (2 * PART * warps * _BLOCK_K)),
        num_warps=warps,
        **dependent_launch(x.device),
    )
    return Normed(values, weighted, squares, norm.eps)


@GluonKernel
def _multiply_and_add_kernel(
    x_ptr: gl.tensor, weight_ptr: gl.tensor, experts_ptr: gl.tensor, weights_ptr: gl.tensor, shared_ptr: gl.tensor,
    residual_ptr: gl.tensor, norm_ptr: gl.tensor, out_ptr: gl.tensor, weighted_ptr: gl.tensor, squares_ptr: gl.tensor,
    size_n: int, SIZE_K: gl.constexpr, TOP_K: gl.constexpr, SHARED: gl.constexpr, WARPS: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
) -> None:  # fmt: skip
    """One program per 16 columns, one warp per expert. W is the left operand; columns of the right one are places.

    What the choice is, and what is added, was written before the gated product (`products.wait_for_choice`). So the
    ring is filled with W while that product ends.
    """
    FILLED: gl.constexpr = STAGES if STAGES == SIZE_K // BLOCK_K else STAGES - 1  # steps before the wait
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [WARPS, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    dtype: gl.constexpr = weight_ptr.dtype.element_ty
    if PDL:
        cuda.gdc_launch_dependents()
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    ring = gl.allocate_shared_memory(dtype, [STAGES, 16 * WARPS, BLOCK_K], swizzled)
    row = gl.arange(0, 16 * WARPS, gl.SliceLayout(1, copy))  # 16 of each place
    k = gl.expand_dims(gl.arange(0, BLOCK_K, gl.SliceLayout(0, copy)), 0)
    expert = gl.load(experts_ptr + gl.minimum(row // 16, TOP_K - 1))
    column = gl.program_id(0) * 16 + row % 16
    matrix = weight_ptr + gl.expand_dims((expert * size_n + column) * SIZE_K, 1) + k
    for step in gl.static_range(FILLED):
        ampere.async_copy.async_copy_global_to_shared(ring.index(step), matrix + step * BLOCK_K)
        ampere.async_copy.commit_group()
    n = gl.program_id(0) * 16 + gl.arange(0, 16, flat)
    weights: gl.tuple = ()
    for place in gl.static_range(TOP_K):
        weights = weights + (gl.load(weights_ptr + place),)
    residual, norm = gl.load(residual_ptr + n).to(gl.float32), gl.load(norm_ptr + n).to(gl.float32)
    beside = residual
    if SHARED:
        beside = gl.load(shared_ptr + n).to(gl.float32)
    if PDL:
        cuda.gdc_wait()
    acc = _products(ring, matrix, x_ptr, k, SIZE_K, TOP_K, FILLED, mma, copy, swizzled)
    total = _sum_in_order(acc, weights, TOP_K, dtype, flat)
    if SHARED:
        total = (total.to(dtype).to(gl.float32) + beside).to(dtype).to(gl.float32)
    rounded = (total.to(dtype).to(gl.float32) + residual).to(dtype)
    wide = rounded.to(gl.float32)
    gl.store(out_ptr + n, rounded)
    gl.store(weighted_ptr + n, (wide * norm).to(dtype))
    gl.store(squares_ptr + gl.program_id(0), gl.sum(wide * wide, axis=0))


@GluonKernel
def _products(
    ring: gl.shared_memory_descriptor, matrix: gl.tensor, x_ptr: gl.tensor, k: gl.tensor, SIZE_K: gl.constexpr,
    TOP_K: gl.constexpr, FILLED: gl.constexpr, mma: gl.constexpr, copy: gl.constexpr, swizzled: gl.constexpr,
) -> gl.tensor:  # fmt: skip
    """Of 16 rows of each expert with every row of x, of which one is that expert's. Shapes: -> [16 * warps, 8]."""
    STAGES: gl.constexpr = ring.shape[0]
    ROWS: gl.constexpr = ring.shape[1]
    BLOCK_K: gl.constexpr = ring.shape[2]
    CHUNKS: gl.constexpr = SIZE_K // BLOCK_K
    place = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, copy)), 1)
    chunks: gl.tuple = ()  # all are asked for before the first is stored
    for step in gl.static_range(CHUNKS):
        at = x_ptr + place * SIZE_K + (k + step * BLOCK_K)
        chunks = chunks + (gl.load(at, mask=place < TOP_K, other=0.0),)
    rows: gl.tuple = ()
    for step in gl.static_range(CHUNKS):
        rows = rows + (gl.allocate_shared_memory(ring.dtype, [8, BLOCK_K], swizzled, chunks[step]),)
    acc = gl.zeros([ROWS, 8], gl.float32, mma)
    for step in gl.static_range(CHUNKS):
        ampere.async_copy.wait_group(FILLED - 1 if FILLED + step < CHUNKS else CHUNKS - 1 - step)
        w = ring.index(step % STAGES).load(gl.DotOperandLayout(0, mma, 2))
        x = rows[step].permute([1, 0]).load(gl.DotOperandLayout(1, mma, 2))
        if FILLED + step < CHUNKS:  # into the stage that was read in the previous step
            ahead = matrix + (FILLED + step) * BLOCK_K
            ampere.async_copy.async_copy_global_to_shared(ring.index((FILLED + step) % STAGES), ahead)
            ampere.async_copy.commit_group()
        acc = ampere.mma_v2(w, x, acc)
    return acc


@GluonKernel
def _sum_in_order(
    acc: gl.tensor, weights: gl.tuple, TOP_K: gl.constexpr, dtype: gl.constexpr, flat: gl.constexpr
) -> gl.tensor:
    """Each expert's own column of products, rounded, times its weight: the first place first. Shapes: -> [16]."""
    ROWS: gl.constexpr = acc.shape[0]
    own = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout)) // 16, 1)
    column = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, acc.type.layout)), 0)
    y = gl.sum(gl.where(own == column, acc, 0.0), axis=1).to(dtype).to(gl.float32)  # of one that is not 0
    results = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]), y)
    total = gl.zeros([16], gl.float32, flat)
    for place in gl.static_range(TOP_K):
        total += weights[place] * results.slice(place * 16, 16).load(flat)
    return total
