"""The kernel of gated `fused_linear` and of `linear_argmax` for large weights and many rows, in CUDA C++.

A BLAS multiplies as fast, but then a second kernel must read the product again (gate and up, or all logits). This
kernel computes the gate or the maximum in registers. It also multiplies where all products have one order of sums
(`ordered.py`), which a BLAS does not promise; rows of W may have scales then, which multiply the sums.
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
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, runs_hopper, tensor_map

SOURCE = Path(__file__).parent / "cuda" / "wide_linear.cu"
_DEPTH = 64  # columns of K per stage
_ROWS = 128  # rows of x per program
_CLUSTER = 2  # programs that share a tile of W
_BAND = 8  # pairs of tiles of x that meet all of W before others do, on average
_STAGED = 64  # columns of a plain result that are written at once
_THREADS = 3 * 128  # one warpgroup copies, two multiply
_DTYPES = (torch.bfloat16, torch.float16)
_LARGE = 8 << 20  # bytes of the smallest weight for this kernel
# Least share of useful rows and columns in the tiles; below it, a BLAS has tiles that fit better. It writes all logits
# for a second kernel to find the best.
_FULL, _FULL_ARGMAX = 0.95, 0.68


class _Work(ctypes.Structure):
    """`Work` of wide_linear.cu."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("best_at", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("row_scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_rows", ctypes.c_int),
        ("size_n", ctypes.c_int),
        ("chunks", ctypes.c_int),
        ("num_tiles", ctypes.c_int),
        ("num_columns", ctypes.c_int),
        ("num_bands", ctypes.c_int),
        ("num_items", ctypes.c_int),
        ("is_float", ctypes.c_int),
    )


class Wide(NamedTuple):
    """How a linear is divided among clusters, chosen from shapes alone."""

    block_n: int  # rows of W at a time (twice as many if gated)
    stages: int
    parts: int = 1  # of K, whose sums are added; only of a plain result

    def num_programs(self, weight: Tensor, gated: bool) -> int:
        """Number of tiles of W, which is the number of programs that share each row."""
        return ceil_div(num_columns(weight, gated), self.block_n)

    def run(self, call: Call, programs: int, scales: Tensor | None = None, row_scales: Tensor | None = None) -> None:
        """Launch. Writes `call.out`, or `call.best` and `call.best_at`, contiguous by row, if they are given.

        `scales` multiply sums, and `row_scales` the results of that. Shapes: scales [O] f32, row_scales [T] f32.
        Sync: never.
        """
        assert row_scales is None or scales is not None
        x, weight = call.x, call.weight
        out = call.out if call.best is None else call.best
        assert out is not None and call.squares is None
        items, tiles = _num_items(len(x), programs), ceil_div(len(x), _ROWS)
        work = _Work(
            out=out.data_ptr(),
            best_at=None if call.best_at is None else call.best_at.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            row_scales=None if row_scales is None else row_scales.data_ptr(),
            bias=None if call.bias is None else call.bias.data_ptr(),
            num_rows=x.shape[0],
            size_n=num_columns(weight, call.gated),
            chunks=x.shape[1] // _DEPTH,
            num_tiles=tiles,
            num_columns=programs,
            num_bands=_num_bands(tiles),
            num_items=items,
            is_float=out.dtype == torch.float32,
        )
        whole = tensor_map(x, _ROWS, _DEPTH)
        half = tensor_map(x, _ROWS // _CLUSTER, _DEPTH) if tiles % _CLUSTER else whole  # of the last tile alone
        maps = whole, half, tensor_map(weight, self._columns(call.gated) // _CLUSTER, _DEPTH)
        clusters = min(items, _num_clusters(x.device))
        end = "ARGMAX" if call.best is not None else "GATED" if call.gated else "PLAIN"
        extras = *(("SCALED",) if scales is not None else ()), *(("BIASED",) if call.bias is not None else ())
        self.kernel(x.dtype, x.device, end, extras).launch(clusters * _CLUSTER, (*maps, work))

    def is_full(self, x: Tensor, weight: Tensor, gated: bool) -> bool:
        """Whether useful rows and columns nearly fill every round of tiles; else a BLAS and a second kernel win."""
        clusters, programs = _num_clusters(x.device), self.num_programs(weight, gated)
        rounds = ceil_div(_num_items(len(x), programs), clusters)
        useful = x.shape[0] / (_ROWS * _CLUSTER) * num_columns(weight, gated) / self.block_n
        return useful / (rounds * clusters) >= (_FULL_ARGMAX if self in ARGMAX else _FULL)

    def kernel(self, dtype: torch.dtype, device: torch.device, end: str, extras: tuple[str, ...] = ()) -> CudaKernel:
        """The kernel, which is compiled at the first call. `end`: GATED, ARGMAX or PLAIN. `extras`: SCALED, BIASED."""
        return _kernel(self._replace(block_n=self._columns(end == "GATED")), dtype, device, end, extras)

    def _columns(self, gated: bool) -> int:
        return self.block_n * 2 if gated else self.block_n


GATED = Wide(112, 4)
ARGMAX = Wide(224, 5), Wide(176, 5)
GATES = Wide(96, 4), GATED  # narrow ones where they fill rounds better
PLAIN = Wide(128, 6), Wide(160, 5), Wide(192, 5), Wide(256, 4)
IN_PARTS = PLAIN[0]  # sums of parts and of all take twice as many registers
_OF_TILE = 16  # columns that take as long as what a tile takes beside its columns
_KINDS = (*range(256, 1025, 128), 2048)  # most rows for which tiles are chosen; more are taken for the last


def wide_for(x: Tensor, weight: Tensor, gated: bool) -> Wide | None:
    """The division for a gate or an argmax; None where the kernel cannot run with any number of rows.

    A gate's tiles take the least time. What was measured on an H200: benchmarks/results/choosing/wide_h200.txt.
    """
    if x.dtype not in _DTYPES or weight.nbytes < _LARGE or not runs_hopper(x.device):
        return None
    if x.shape[1] % _DEPTH or num_columns(weight, gated) % 8:
        return None
    if x.stride(0) % 8 or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return None
    return _least_time(GATES, len(x), weight, True) if gated else _least_time(ARGMAX, _ROWS * _CLUSTER, weight)


def any_for(x: Tensor, weight: Tensor, gated: bool) -> Wide:
    """Tiles for a gate, or a product as it is, of any number of rows: those that take the least time.

    The choice is one of few numbers of rows, which prompts before serving have, so that no later step compiles others.
    """
    num_rows = next((kind for kind in _KINDS if x.shape[0] <= kind), _KINDS[-1])
    return _least_time(GATES if gated else PLAIN, num_rows, weight, gated)


def _least_time(ways: tuple[Wide, ...], num_rows: int, weight: Tensor, gated: bool = False) -> Wide:
    """Those tiles that take the least time in rounds of all clusters."""

    def time(wide: Wide) -> int:
        items = _num_items(num_rows, wide.num_programs(weight, gated))
        return ceil_div(items, _num_clusters(weight.device)) * (wide._columns(gated) + _OF_TILE)

    return min(ways, key=time)


def _num_items(num_rows: int, num_columns: int) -> int:
    """What clusters take: two tiles of x and one of W, or the last tile of an odd number of x and two of W."""
    pairs, one = divmod(ceil_div(num_rows, _ROWS), _CLUSTER)
    return pairs * num_columns + one * ceil_div(num_columns, _CLUSTER)


def _num_bands(num_tiles: int) -> int:
    """Of tiles of x, one after another: while one is multiplied, less is read than if it were all of x."""
    return max(round(num_tiles / (_CLUSTER * _BAND)), 1)


def _num_clusters(device: torch.device) -> int:
    """Number of clusters that run at once."""
    return num_multiprocessors(device) // _CLUSTER


@functools.cache
def _kernel(cut: Wide, dtype: torch.dtype, device: torch.device, end: str, extras: tuple[str, ...]) -> CudaKernel:
    columns, stages, parts = cut
    defines = f"COLUMNS={columns}", f"STAGES={stages}", f"PARTS={parts}", end, *extras
    code = CudaCode(SOURCE, defines, (("wgmma.h", wgmma_header(columns, dtype)),))
    ring = stages * (_ROWS + columns) * _DEPTH * dtype.itemsize
    staged = {"GATED": columns // 2 + 8, "PLAIN": _STAGED + 8, "ARGMAX": 0}[end] * _ROWS * dtype.itemsize
    return CudaKernel(code, "wide_linear", _THREADS, ring + staged)


def wgmma_header(columns: int, dtype: torch.dtype) -> str:
    """The text of `wgmma.h`, which wide_linear.cu includes; it depends on a product's width and the type of x."""
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    sums = columns // 2
    registers = ", ".join(f"%{i}" for i in range(sums))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(sums))
    return f"""
__device__ __forceinline__ void multiply(float (&sums)[{sums}], u64 x, u64 w, bool add) {{
    asm volatile(
        "{{ .reg .pred add; setp.ne.b32 add, %{sums + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{registers}}}, "
        "%{sums}, %{sums + 1}, add, 1, 1, 0, 0; }}"
        : {operands} : "l"(x), "l"(w), "r"(static_cast<int>(add)));
}}

__device__ __forceinline__ u32 round2(float low, float high) {{
    u32 both;
    asm("cvt.rn.{kind}x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}}

__device__ __forceinline__ float widen(u16 value) {{
    float wide;
    asm("cvt.f32.{kind} %0, %1;" : "=f"(wide) : "h"(value));
    return wide;
}}
"""
