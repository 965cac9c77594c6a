"""The kernel of quantised weights in fragment order for 1 to 32 rows of x, in CUDA C++.

With so few rows a linear takes as long as reading its weight, if little else is done for each byte. So weights lie in
memory as tensor cores take them, the copy engine brings them in long runs, and x stays in registers. (Gluon in Triton
3.6 cannot hold an operand in registers across a loop of copies, nor copy without an address for each thread.)
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import ceil_div
from overlap_spec_kernels.linear.call import Call, num_columns, num_multiprocessors
from overlap_spec_kernels.linear.fragments import TILE_COLUMNS, TILE_ROWS
from overlap_spec_kernels.linear.packing import Order, Packing
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, runs_hopper

SOURCE = Path(__file__).parent / "cuda" / "packed_stream.cu"
MOST_ROWS = 32  # of x
_FEW_ROWS = 16  # that any weight which the kernel takes can have
_CLUSTERS = (1, 2, 4, 8)
_X_REGISTERS = 16 * 64  # of a multiprocessor, for each lane of its warps, that hold x: half of all
_SHARED_BYTES = 228 << 10  # of a multiprocessor
_OWN_BYTES = 3 << 10  # of a program: what the system takes, and barriers
_MOST_STAGES = 4
_SMALL = 8 << 20  # bytes of a weight
_SHORT_K, _FEW_WARPS = 2048, 8  # columns, of which 8 warps take less time than 16: packed_stream_rows_h200.txt
_MOST_OF_MORE_ROWS = 24 << 20  # bytes of a weight; a larger one's more than 16 rows of x are `packed_products`' work
_STAGE_TILES = {4: 8, 8: 4}  # tiles of a warp in a stage, by bits of a value, where a program has 8 warps: 32 KiB
_MOST_OF_16_ROWS = 2  # programs of a cluster; beyond it, `packed_products` takes more than 8 rows of x
_MOST_BESIDE, _BESIDE_WARPS = 128, 4  # rows of another matrix, about one for each multiprocessor; of a program
_BESIDE_ROWS = 24  # of x: with more, a program has too few registers for other warps
_GROUPS = (0, 32, 64, 128)
_ROW_SCALES, _BLOCK_SCALES = 0, 4  # of `ScaleType` in packed_stream.cu, as are these:
_GROUP_SCALES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_SCALE_BYTES = (0, 64, 32, 32, 16)  # of a group and 16 rows


class _Work(ctypes.Structure):
    """`Work` of packed_stream.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "zeros", "x", "squares", "residual", "norm")),
        *((name, ctypes.c_void_p) for name in ("out", "weighted", "sums", "beside", "beside_out")),
        *((name, ctypes.c_int) for name in ("x_stride", "residual_stride", "size_n", "num_rows", "num_squares")),
        ("eps", ctypes.c_float),
    )


class Beside(NamedTuple):
    """Another matrix that x is multiplied by in the same launch, in bfloat16, and what it gives."""

    matrix: Tensor  # [P, K]
    out: Tensor  # [T, P]


class PackedStream(NamedTuple):
    """How a linear is divided among programs, warps and stages, chosen from shapes alone."""

    stages: int = 2
    tiles: int = 1  # of a warp in a stage
    rows: int = 8  # of x, padded
    cluster: int = 1  # programs that divide K
    warps: int = 16  # of a program
    early: int = 2  # stages that are asked for before x
    leaves_room: bool = False  # its registers do, for a program of attention

    @property
    def block_n(self) -> int:
        """Rows of W at a time (twice as many if gated)."""
        return TILE_ROWS

    def num_programs(self, weight: Tensor, gated: bool) -> int:
        """Programs that would find work; fewer run if the device has room for fewer."""
        return num_columns(weight, gated) // TILE_ROWS * self.cluster

    def takes_beside(self, matrix: Tensor) -> bool:
        """Whether a launch has room for the product of another matrix."""
        fits = len(matrix) <= _MOST_BESIDE and self.cluster == 1 and self.rows <= _BESIDE_ROWS
        return fits and not self.leaves_room and matrix.dtype == torch.bfloat16 and matrix.data_ptr() % 16 == 0

    def run(self, call: Call, programs: int, packing: Packing, beside: Beside | None = None) -> None:
        """Launch. Sync: never."""
        x, out = call.x, call.out
        assert out is not None
        norm = None if call.norm is None else call.norm.weight
        work = _Work(
            *map(_address, (call.weight, packing.scales, packing.zeros, x, call.squares, call.residual, norm)),
            *map(_address, (out, call.weighted, call.sums, *(beside or (None, None)))),
            x.stride(0),
            0 if call.residual is None else call.residual.stride(0),
            num_columns(call.weight, call.gated),
            x.shape[0],
            call.num_squares,
            call.eps,
        )
        rows, shared_bytes = 0 if beside is None else len(beside.matrix), self._shared_bytes(call.gated, packing)
        warps = self.warps + (_BESIDE_WARPS if rows else 0)
        kernel = _kernel(warps, self.defines(call, packing, rows), shared_bytes, x.device)
        kernel.launch(min(programs, kernel.clusters_at_once(self.cluster) * self.cluster), (work,))

    def defines(self, call: Call, packing: Packing, beside: int = 0) -> tuple[str, ...]:
        """The names that packed_stream.cu is compiled with. `beside`: rows of another matrix."""
        assert call.out is not None
        flags = {
            "GATED": call.gated,
            "ADD": call.residual is not None,
            "SCALED": call.squares is not None,
            "WIDE": call.out.dtype == torch.float32,
            "ZEROS": packing.zeros is not None,
            "WIDE_NORM": call.norm is not None and call.norm.weight.dtype == torch.float32,
        }
        sizes = {
            "BITS": packing.bits,
            "K_TILES": call.x.shape[1] // TILE_COLUMNS,
            "ROWS": self.rows,
            "WARPS": self.warps,
            "TILES": self.tiles,
            "STAGES": self.stages,
            "EARLY": min(self.early, self.stages),
            "ROOM": self.leaves_room,
            "CLUSTER": self.cluster,
            "GROUP": packing.group,
            "SCALE": _scale_type(packing) or _ROW_SCALES,
            "BESIDE": beside,
        }
        return tuple(f"{name}={int(value)}" for name, value in (sizes | flags).items())

    def _shared_bytes(self, gated: bool, packing: Packing) -> int:
        return _sums_bytes(self, gated) + self.stages * _stage_bytes(self, packing)


def takes_weight(shape: tuple[int, int], packing: Packing) -> bool:
    """Whether the kernel can multiply such a weight, in fragment order, with any number of rows up to 16."""
    known = packing.group in _GROUPS and _scale_type(packing) is not None
    return known and _cluster(PackedStream(rows=_FEW_ROWS), shape[1], packing.group) is not None


def packed_stream_for(x: Tensor, weight: Tensor, gated: bool, packing: Packing) -> PackedStream | None:
    """The division for these tensors; None where the kernel does not apply, or `packed_products` is faster."""
    num_rows, size_k = x.shape
    if packing.order is not Order.FRAGMENTS or num_rows > MOST_ROWS or not runs_hopper(x.device):
        return None
    if x.dtype != torch.bfloat16 or x.stride(0) % 8 or x.data_ptr() % 16:
        return None
    if num_columns(weight, gated) % TILE_ROWS or not takes_weight((len(weight), size_k), packing):
        return None
    cut = _division(num_rows, weight.nbytes, size_k, gated, packing)
    known = packing.bits == 4 and packing.group == 128 and packing.zeros is None
    if cut is None or gated or num_rows > 1 or weight.nbytes >= _SMALL or not known:
        return cut
    return _all_at_once(cut, weight, size_k, num_multiprocessors(x.device))


def _all_at_once(cut: PackedStream, weight: Tensor, size_k: int, multiprocessors: int) -> PackedStream:
    """One row and a small weight: a program asks for all of its share before x, in a ring that is no longer.

    So it begins beside attention. Shapes: weight [O, I].
    """
    steps = ceil_div(size_k // TILE_COLUMNS, cut.cluster * cut.warps * cut.tiles)
    share = ceil_div(len(weight) // TILE_ROWS, multiprocessors) * steps
    stages = max(min(cut.stages, share), 2)
    return cut._replace(stages=stages, early=stages, leaves_room=True)


def _division(num_rows: int, num_bytes: int, size_k: int, gated: bool, packing: Packing) -> PackedStream | None:
    """The fastest one in whole layers on an H200: benchmarks/results/choosing/quantized_layer_first_h200.json.

    None where no program holds x, or `packed_products` is faster (packed_stream_h200.json beside it). A program takes a
    whole multiprocessor: with half of it, so that the next kernel can begin, qkv and output take 2 to 10% less time
    alone, but a layer takes 3 to 8% more.
    """
    tiles, rows = _STAGE_TILES[packing.bits], padded(num_rows)
    few_warps = fitted(PackedStream(tiles=tiles, rows=rows, warps=_FEW_WARPS), size_k, gated, packing)
    if rows > _FEW_ROWS:
        return few_warps if few_warps is not None and _takes_more_rows(few_warps, num_bytes, gated, packing) else None
    cut = fitted(PackedStream(tiles=tiles // 2, rows=rows), size_k, gated, packing)
    if cut is None or (rows > 8 and cut.cluster > _MOST_OF_16_ROWS):
        return None
    if packing.bits == 4:
        return few_warps if rows > 8 or cut.cluster > 1 else cut
    return few_warps if not gated and (size_k <= _SHORT_K or num_bytes <= _SMALL) else cut


def _takes_more_rows(cut: PackedStream, num_bytes: int, gated: bool, packing: Packing) -> bool:
    """More than 16 (choosing/packed_stream_rows_h200.txt). Programs that divide K take long for each 16 rows of W."""
    most = _MOST_OF_MORE_ROWS if cut.cluster == 1 else _SMALL if cut.cluster == 2 else 0
    return packing.bits == 8 and not gated and num_bytes <= most


def padded(num_rows: int) -> int:
    """Rows of x that products take."""
    return ceil_div(num_rows, 8) * 8


def fitted(cut: PackedStream, size_k: int, gated: bool, packing: Packing) -> PackedStream | None:
    """With as few programs in a cluster, at most as many tiles and as many stages as fit; None if nothing does."""
    cluster = _cluster(cut, size_k, packing.group)
    if cluster is None:
        return None
    most = ceil_div(size_k // TILE_COLUMNS // cluster, cut.warps)
    return with_stages(cut._replace(cluster=cluster, tiles=min(cut.tiles, most)), gated, packing)


def with_stages(cut: PackedStream, gated: bool, packing: Packing) -> PackedStream | None:
    """As many stages as shared memory has room for, and pay; None if there is no room for two.

    With more on their way, all other reads wait: x, and what the kernel before still needs. On an H200, 4 stages with 2
    before x take 5 to 8% less for a layer than 6 with all: benchmarks/results/choosing/layers_h200.txt.
    """
    shared = _SHARED_BYTES - _OWN_BYTES - _sums_bytes(cut, gated)
    stages = min(shared // _stage_bytes(cut, packing), _MOST_STAGES)
    return cut._replace(stages=stages) if stages > 1 else None


def _cluster(cut: PackedStream, size_k: int, group: int) -> int | None:
    """The fewest programs whose registers hold x, each with whole tiles and groups of K."""
    tiles = size_k // TILE_COLUMNS
    for cluster in _CLUSTERS:
        whole = tiles % cluster == 0 and (group == 0 or size_k // cluster % group == 0)
        if whole and ceil_div(tiles // cluster, cut.warps) * cut.rows <= _X_REGISTERS // cut.warps:
            return cluster
    return None


def _sums_bytes(cut: PackedStream, gated: bool) -> int:
    """What warps leave, and what the other programs of a cluster send: 64 bytes for each row of x, two buffers."""
    return (cut.warps + cut.cluster - 1) * 2 * (2 if gated else 1) * cut.rows * 64


def _stage_bytes(cut: PackedStream, packing: Packing) -> int:
    """Tiles of W with their scales and zero points."""
    tiles = cut.warps * cut.tiles
    groups = tiles * TILE_COLUMNS // packing.group if packing.group else 0
    of_group = _SCALE_BYTES[_scale_type(packing) or _ROW_SCALES] + (0 if packing.zeros is None else 32)
    return tiles * TILE_ROWS * TILE_COLUMNS * packing.bits // 8 + groups * of_group


def _scale_type(packing: Packing) -> int | None:
    """None for scales that the kernel does not take."""
    if packing.group == 0:
        return _ROW_SCALES if packing.scales.dtype == torch.float32 else None
    if packing.scale_rows == 1:
        return _GROUP_SCALES.get(packing.scales.dtype)
    return _BLOCK_SCALES if packing.scales.dtype == torch.float32 else None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def _kernel(warps: int, defines: tuple[str, ...], shared_bytes: int, device: torch.device) -> CudaKernel:
    return CudaKernel(CudaCode(SOURCE, defines), "packed_stream", 32 * warps, shared_bytes)
