"""Products of rows with the matrices of their experts, of few rows, in CUDA C++: float8 with scales of blocks, 4 bits.

The kernels of expert_stream.cu ask for more of W at once than `quantized_products.py`, and have its bits. Up to 32 rows
of x the second product adds up each row's experts. Of 8 to 32 rows the first one is expert_ring.cu's, whose programs
have equal shares, and the second one expert_sum_ring.cu's, which reads each expert once. Of more rows tiles of 8 places
are listed, with up to 8 rows of an expert on average. In 16 bits expert_sum_ring.cu has the second product of 2 to 32
rows, with the bits of `products.py`. In 4 bits both rings have 2 to 32 rows.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.experts.products import Places
from overlap_spec_kernels.experts.stacks import QuantizedStack
from overlap_spec_kernels.experts.sum_of_experts import PART, Routing, squares_of
from overlap_spec_kernels.launch import ceil_div
from overlap_spec_kernels.linear.call import num_multiprocessors
from overlap_spec_kernels.norm.normed import Norm, Normed
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, TensorMap, box_map, runs_hopper, tensor_map

SOURCE = Path(__file__).parent / "cuda" / "expert_stream.cu"
_MOST_STREAMED, _MOST_PLACES = 32, 16  # rows of x, and experts of one
_GATE_WARPS = 16  # that divide K, at most
_GATE_COLUMNS, _GATE_TILES = 8, 8  # of gate and up at a time, and how often
RING_SOURCE = SOURCE.with_name("expert_ring.cu")
_LEAST_IN_RING = 8  # rows of x: of fewer the second product begins later behind a ring, and reads few experts again
_RING_WARPS, _RING_TEAMS, _RING_STAGES = {8: 16, 4: 8}, {8: 1, 4: 2}, {8: 3, 4: 6}  # by bits of W; of a team, at most
_GROUPS_OF_TEAMS, _SLOTS = 2, 2  # of 128 columns of a warp, at most, so that registers suffice; sums of a team
SUM_RING_SOURCE = SOURCE.with_name("expert_sum_ring.cu")
_SUM_CLUSTER, _SUM_STAGES = {4: 2, 8: 2, 16: 1}, {4: 7, 8: 7, 16: 5}  # programs; of its ring at most; by bits of W
_SUM_BLOCKS = {4: 6, 8: 6, 16: 4}  # of 128 bytes of a row of W, which registers hold, at most
_FEW_ROWS = 4  # of x, which have smaller stages
_LEAST_STAGES = 3  # of W in 16 bits: where only two fit, tiles of Triton are faster
_LISTED, _MOST_EXPERTS = 8, 1024  # rows of an expert on average up to which tiles of 8 are taken from lists
_SUM_TILES = 4  # of 16 columns, of a program of several rows
_SHARED = 210 << 10  # bytes of a program at most


class _Work(ctypes.Structure):
    """`Work` of expert_work.cuh."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("scales", "x", "experts", "out", "counts", "listed", "weights", "shared")
        ),
        *((name, ctypes.c_void_p) for name in ("residual", "norm", "weighted", "squares")),
        *((name, ctypes.c_int) for name in ("x_stride", "residual_stride", "size_n", "num_rows")),
        *((name, ctypes.c_int) for name in ("scale_columns", "scale_rows", "per_row", "num_experts")),
    )


class _Shape(NamedTuple):
    """Of a program of expert_stream.cu, as its names have it."""

    groups: int
    warps: int
    tiles: int = 1
    whole: int = 0
    gated: int = 1
    listed: int = 0

    @property
    def stages(self) -> int:
        """Of W."""
        return min(self.tiles, 2) if self.whole else 1

    @property
    def num_bytes(self) -> int:
        """W and x of each warp, with 16 bytes between rows of x."""
        return self.warps * (16 * self.stages * 128 * self.groups + (7 * self.whole + 1) * (256 * self.groups + 16))


class _RingMaps(ctypes.Structure):
    """`Maps` of expert_ring.cu."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16 * 2),)


class _RingWork(ctypes.Structure):
    """`Work` of expert_ring.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scales", "x", "experts", "out")),
        *((name, ctypes.c_int) for name in ("x_stride", "size_n", "num_rows")),
        *((name, ctypes.c_int) for name in ("scale_columns", "scale_rows", "num_experts")),
    )


class _Ring(NamedTuple):
    """Of a program of expert_ring.cu."""

    groups: int
    warps: int
    stages: int
    bits: int
    teams: int

    @classmethod
    def of(cls, weight: QuantizedStack) -> _Ring:
        """As many stages as there is room for."""
        blocks, bits = weight.shape[2] // 128, weight.packing.bits
        warps = math.gcd(blocks, _RING_WARPS[bits])
        teams = _RING_TEAMS[bits] if blocks // warps <= _GROUPS_OF_TEAMS else 1
        one = cls(blocks // warps, warps, 1, bits, teams)
        stages = min((_SHARED - one.num_sums) // one.num_stage, _RING_STAGES[bits])
        return one._replace(stages=stages // teams * teams)

    @property
    def num_stage(self) -> int:
        """Bytes of 16 rows of W, and in 4 bits of their scales, whose boxes begin at multiples of 128."""
        blocks = self.groups * self.warps
        return 16 * 16 * self.bits * blocks + (2 * ceil_div(32 * blocks, 128) * 128 if self.bits == 4 else 0)

    @property
    def num_sums(self) -> int:
        """Bytes of the sums of tiles."""
        return self.teams * _SLOTS * 512 * self.groups * self.warps

    @property
    def num_bytes(self) -> int:
        """Tiles of W, and their sums."""
        return self.stages * self.num_stage + self.num_sums


class _SumRing(NamedTuple):
    """Of a program of expert_sum_ring.cu."""

    blocks: int
    slices: int
    stages: int
    cluster: int
    bits: int
    float16: int
    top_k: int
    rows: int = 8  # of x that a stage has

    @classmethod
    def of(cls, weight: Tensor | QuantizedStack, num_rows: int, top_k: int) -> _SumRing:
        """As many stages as there is room for. In 16 bits, where that is scarce, few rows leave some to W."""
        bits = 16 if isinstance(weight, Tensor) else weight.packing.bits
        blocks, is_half = weight.shape[2] * bits // 1024, isinstance(weight, Tensor) and weight.dtype == torch.float16
        slices = next((n for n in range(1, blocks) if blocks % n == 0 and blocks // n <= _SUM_BLOCKS[bits]), blocks)
        rows = _FEW_ROWS if bits == 16 and num_rows <= _FEW_ROWS else 8
        one = cls(blocks, slices if bits == 16 else 1, 1, _SUM_CLUSTER[bits], bits, int(is_half), top_k, rows)
        return one._replace(stages=min((_SHARED - one.num_results) // one.num_stage, _SUM_STAGES[bits]))

    @property
    def num_stage(self) -> int:
        """Bytes of a stage: W of the cluster, and rows of x with some bytes between them."""
        row = 2048 * self.blocks // self.bits
        return self.cluster * 16 * 128 * self.blocks + self.rows * (row + (16 if self.bits == 16 else 32))

    @property
    def num_results(self) -> int:
        """Bytes of the results of all places."""
        return (_MOST_STREAMED if self.rows == 8 else self.rows) * self.top_k * PART * 4

    @property
    def num_bytes(self) -> int:
        """W and x of the stages, and the results."""
        return self.stages * self.num_stage + self.num_results


def _gate_shape(weight: QuantizedStack, gated: bool = True, listed: bool = False) -> _Shape:
    """Of tiles of 8 rows of x. Columns of a program have the same scales."""
    _, rows, size_k = weight.shape
    whole = math.gcd(rows // 2 if gated else rows, weight.packing.scale_rows) // (_GATE_COLUMNS if gated else PART)
    warps = math.gcd(size_k // 128, _GATE_WARPS)
    return _Shape(size_k // 128 // warps, warps, math.gcd(whole, _GATE_TILES), 1, int(gated), int(listed))


def _sum_shape(weight: QuantizedStack, num_rows: int, top_k: int) -> _Shape:
    _, rows, size_k = weight.shape
    tiles = math.gcd(rows // PART, _SUM_TILES) if num_rows > 1 else 1
    return _Shape(size_k // 128, top_k, tiles=tiles)


def streams_gate(x: Tensor, weight: QuantizedStack, experts: Tensor) -> bool:
    """Whether the first product is one of these. Shapes: x [T, I], experts [T, k]."""
    num_experts, rows, size_k = weight.shape
    whole = size_k % 256 == 0 and rows // 2 % _GATE_COLUMNS == 0  # two warps, whose threads finish 8 rows
    if weight.packing.bits == 4 or len(experts) >= _LEAST_IN_RING:
        whole = whole and num_experts <= _MOST_EXPERTS and _Ring.of(weight).stages > 1
    if weight.packing.bits == 4:
        return whole and _in_groups(x, weight, experts)
    return whole and _streams(x, weight, experts, _gate_shape(weight))


def streams_sum(x: Tensor, weight: Tensor | QuantizedStack, experts: Tensor) -> bool:
    """Whether `sum_down` takes these. Shapes: x [T, H], of the type of the second product's, experts [T, k]."""
    _, rows, size_k = weight.shape
    if isinstance(weight, Tensor):
        fits = weight.element_size() == 2 and weight.data_ptr() % 16 == 0 and runs_hopper(x.device)
        return fits and size_k % 64 == 0 and _are_few(experts) and _sums_in_ring(weight, experts)
    if weight.packing.bits == 4:
        return size_k % 256 == 0 and _in_groups(x, weight, experts) and _sums_in_ring(weight, experts)
    whole = size_k % 128 == 0 and rows % PART == 0
    return whole and _streams(x, weight, experts, _sum_shape(weight, *experts.shape))


def _are_few(experts: Tensor) -> bool:
    """Whether the rings list them, where one row has kernels of its own. Shapes: experts [T, k]."""
    return 1 < len(experts) <= _MOST_STREAMED and experts.shape[1] <= _MOST_PLACES


def _streams(x: Tensor, weight: QuantizedStack, experts: Tensor, shape: _Shape) -> bool:
    few = len(experts) <= _MOST_STREAMED and experts.shape[1] <= _MOST_PLACES
    return few and shape.num_bytes <= _SHARED and _in_blocks(x, weight)


def _in_blocks(x: Tensor, weight: QuantizedStack) -> bool:
    """Whether expert_stream.cu takes their types and memory: float8 with scales of blocks."""
    return weight.packing.bits == 8 and weight.packing.scale_rows % PART == 0 and _is_known(x, weight)


def _in_groups(x: Tensor, weight: QuantizedStack, experts: Tensor) -> bool:
    """Whether the rings take them in 4 bits, with a scale for each row and group."""
    return weight.packing.scale_rows == 1 and _are_few(experts) and _is_known(x, weight)


def _is_known(x: Tensor, weight: QuantizedStack) -> bool:
    packing, aligned = weight.packing, x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    fits = packing.group == 128 and packing.zeros is None and aligned
    return fits and x.dtype == torch.bfloat16 and runs_hopper(x.device)


@functools.cache
def _stream(name: str, shape: _Shape, top_k: int, shared: bool, wide: bool, device: torch.device) -> CudaKernel:
    sizes = {key.upper(): value for key, value in shape._asdict().items()}
    sizes |= {"STAGES": shape.stages, "TOP_K": top_k, "SHARED": int(shared), "WIDE": int(wide)}
    code = CudaCode(SOURCE, tuple(f"{key}={value}" for key, value in sizes.items()))
    return CudaKernel(code, name, 32 * shape.warps, shape.num_bytes)


def _boxes(weight: Tensor | QuantizedStack, eights: int = 1, slices: int = 1) -> TensorMap:
    """The map for so many times 8 rows of W, or of a slice of it: blocks of 128 bytes one after another."""
    data = weight if isinstance(weight, Tensor) else weight.data
    line = 128 // data.element_size()
    boxes = data.view(-1, 8, data.shape[2] // line, line).transpose(1, 2)
    return box_map(boxes, (eights, boxes.shape[1] // slices, 8, line))


def multiply_few(x: Tensor, weight: QuantizedStack, experts: Tensor) -> Tensor:
    """silu(gate) * up of every place. Shapes: x [T, I], experts [T, k] -> [T * k, O / 2]. Sync: never."""
    if weight.packing.bits == 4 or len(experts) >= _LEAST_IN_RING:
        return _multiply_in_ring(x, weight, experts)
    shape, places = _gate_shape(weight), Places(experts, experts, experts)
    return _multiply_rows(x, weight, places, shape, experts.shape[1], experts.numel())


def _multiply_in_ring(x: Tensor, weight: QuantizedStack, experts: Tensor) -> Tensor:
    """`multiply_few` of 8 rows and more, or in 4 bits."""
    (num_experts, rows, _), (num_rows, top_k), packing = weight.shape, experts.shape, weight.packing
    ring, scales, out = _Ring.of(weight), packing.scales, x.new_empty(experts.numel(), rows // 2)
    read = (each.data_ptr() for each in (scales, x, experts, out))
    sizes = x.stride(0), rows // 2, num_rows, scales.shape[2], packing.scale_rows, num_experts
    maps = [_boxes(weight)] * 2
    if ring.bits == 4:
        maps[1] = tensor_map(scales.view(-1, rows), scales.shape[1], 8, swizzle=0)
    work = _RingMaps.from_buffer_copy(b"".join(map(bytes, maps))), _RingWork(*read, *sizes)
    _ring(ring, top_k, x.device).launch(num_multiprocessors(x.device), work)
    return out


@functools.cache
def _ring(ring: _Ring, top_k: int, device: torch.device) -> CudaKernel:
    names = {key.upper(): value for key, value in ring._asdict().items()} | {"TOP_K": top_k}
    defines = tuple(f"{key}={value}" for key, value in names.items())
    return CudaKernel(
        CudaCode(RING_SOURCE, defines), "gate_ring", 32 * (ring.teams * (ring.warps + 2) + 1), ring.num_bytes
    )


def _multiply_rows(
    x: Tensor, weight: QuantizedStack, places: Places, shape: _Shape, per_row: int, tiles: int
) -> Tensor:  # fmt: skip
    """`per_row`: places that have one row of x. Shapes: x [T * k / per_row, I] -> [T * k, columns]. Sync: never."""
    (num_experts, rows, _), (num_rows, top_k), scales = weight.shape, places.experts.shape, weight.packing.scales
    size_n = rows // 2 if shape.gated else rows
    out = torch.empty((places.experts.numel(), size_n), dtype=x.dtype, device=x.device)
    read = (each.data_ptr() for each in (scales, x, places.experts, out, places.counts, places.listed))
    sizes = x.stride(0), 0, size_n, num_rows, scales.shape[2], weight.packing.scale_rows, per_row, num_experts
    programs = size_n // (_GATE_COLUMNS if shape.gated else PART) // shape.tiles * tiles
    kernel = _stream("multiply_rows", shape, top_k, False, False, x.device)
    kernel.launch(programs, (_boxes(weight), _Work(*read, *[None] * 6, *sizes)))
    return out


def multiply_listed(x: Tensor, weight: QuantizedStack, places: Places, gated: bool, per_row: int) -> Tensor:
    """See `_multiply_rows`, of places that are listed."""
    pairs, shape = places.experts.numel(), _gate_shape(weight, gated, listed=True)
    return _multiply_rows(x, weight, places, shape, per_row, min(pairs, pairs // 8 + len(weight.data)))


def streams_listed(x: Tensor, weight: QuantizedStack, places: Places, gated: bool) -> bool:
    """Whether tiles of 8 rows of expert_stream.cu multiply these: an expert has few. Shapes: x [.., I]."""
    num_experts, rows, size_k = weight.shape
    whole = size_k % 256 == 0 and rows % (2 * _GATE_COLUMNS) == 0 and num_experts <= _MOST_EXPERTS
    few = places.are_listed and places.experts.numel() <= _LISTED * num_experts
    return whole and few and _gate_shape(weight, gated, listed=True).num_bytes <= _SHARED and _in_blocks(x, weight)


def sum_down(
    x: Tensor, weight: Tensor | QuantizedStack, routing: Routing, residual: Tensor, norm: Norm, shared: Tensor | None
) -> Normed:
    """See `sum_of_experts.multiply_and_add`: of a few rows. Shapes: x [T * k, I], routing [T, k], others [T, H]."""
    (num_experts, rows, _), (num_rows, top_k) = weight.shape, routing.experts.shape
    values, weighted = (torch.empty((num_rows, rows), dtype=x.dtype, device=x.device) for _ in range(2))
    squares, packing = squares_of(values), None if isinstance(weight, Tensor) else weight.packing
    scales, columns, scale_rows = (
        (None, 0, 0) if packing is None else (packing.scales, packing.scales.shape[2], packing.scale_rows)
    )
    read = scales, x, routing.experts, values, None, None, routing.weights, shared, residual, norm.weight
    pointers = (None if each is None else each.data_ptr() for each in (*read, weighted, squares))
    sizes = x.stride(0), residual.stride(0), rows, num_rows, columns, scale_rows, 1, num_experts
    work, given = _Work(*pointers, *sizes), (shared is not None, norm.weight.dtype == torch.float32, x.device)
    if isinstance(weight, Tensor) or _sums_in_ring(weight, routing.experts):
        ring = _SumRing.of(weight, num_rows, top_k)
        _sum_ring(ring, *given).launch(rows // PART, (_boxes(weight, 2 * ring.cluster, ring.slices), work))
    else:
        shape = _sum_shape(weight, num_rows, top_k)
        kernel = _stream("sum_down", shape, top_k, *given)
        kernel.launch(rows // PART // shape.tiles * num_rows, (_boxes(weight), work))
    return Normed(values, weighted, squares, norm.eps)


def _sums_in_ring(weight: Tensor | QuantizedStack, experts: Tensor) -> bool:
    """Whether `sum_down` reads each expert once. Shapes: experts [T, k]."""
    (num_experts, rows, _), ring = weight.shape, _SumRing.of(weight, *experts.shape)
    fits = rows % (PART * ring.cluster) == 0 and num_experts <= _MOST_EXPERTS
    if ring.bits == 16:
        return fits and ring.stages >= _LEAST_STAGES
    return fits and ring.blocks <= _SUM_BLOCKS[ring.bits] and len(experts) >= (_LEAST_IN_RING if ring.bits == 8 else 2)


@functools.cache
def _sum_ring(ring: _SumRing, shared: bool, wide: bool, device: torch.device) -> CudaKernel:
    names = {key.upper(): value for key, value in ring._asdict().items()} | {"SHARED": int(shared), "WIDE": int(wide)}
    code = CudaCode(SUM_RING_SOURCE, tuple(f"{key}={value}" for key, value in names.items()))
    return CudaKernel(code, "sum_ring", 32 * (ring.stages * ring.cluster + 2), ring.num_bytes)
