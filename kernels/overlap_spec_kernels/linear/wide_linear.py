"""The kernel of gated `fused_linear` and of `linear_argmax` for large weights and many rows, in CUDA C++.

A BLAS multiplies as fast, but then a second kernel must read the product again (gate and up, or all logits). This
kernel computes the gate or the maximum in registers.
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
_THREADS = 3 * 128  # one warpgroup copies, two multiply
_DTYPES = (torch.bfloat16, torch.float16)
_LARGE = 8 << 20  # bytes of the smallest weight for this kernel
_FULL = 0.95  # least share of useful rows and columns in the tiles; below it, a BLAS has tiles that fit better


class _Work(ctypes.Structure):
    """`Work` of wide_linear.cu."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("best_at", ctypes.c_void_p),
        ("num_rows", ctypes.c_int),
        ("size_n", ctypes.c_int),
        ("chunks", ctypes.c_int),
        ("num_pairs", ctypes.c_int),
        ("num_columns", ctypes.c_int),
    )


class Wide(NamedTuple):
    """How a linear is divided among clusters, chosen from shapes alone."""

    block_n: int  # rows of W at a time (twice as many if gated)
    stages: int

    def num_programs(self, weight: Tensor, gated: bool) -> int:
        """Number of tiles of W, which is the number of programs that share each row."""
        return ceil_div(num_columns(weight, gated), self.block_n)

    def run(self, call: Call, programs: int) -> None:
        """Launch. Writes `call.out` if gated, else `call.best` and `call.best_at`, contiguous by row. Sync: never."""
        x, weight = call.x, call.weight
        out = call.out if call.gated else call.best
        assert out is not None and call.squares is None
        pairs = _num_pairs(x)
        work = _Work(
            out=out.data_ptr(),
            best_at=None if call.best_at is None else call.best_at.data_ptr(),
            num_rows=x.shape[0],
            size_n=num_columns(weight, call.gated),
            chunks=x.shape[1] // _DEPTH,
            num_pairs=pairs,
            num_columns=programs,
        )
        half = self._columns(call.gated) // _CLUSTER
        maps = tensor_map(x, _ROWS, _DEPTH), tensor_map(weight, half, _DEPTH)
        clusters = min(programs * pairs, _num_clusters(x.device))
        self.kernel(x.dtype, x.device, call.gated).launch(clusters * _CLUSTER, (*maps, work))

    def is_full(self, x: Tensor, weight: Tensor, gated: bool) -> bool:
        """Whether useful rows and columns nearly fill every round of tiles; else a BLAS and a second kernel win."""
        pairs, clusters, programs = _num_pairs(x), _num_clusters(x.device), self.num_programs(weight, gated)
        rounds = ceil_div(programs * pairs, clusters)
        rows = x.shape[0] / (_ROWS * _CLUSTER)
        return rows * num_columns(weight, gated) / self.block_n / (rounds * clusters) >= _FULL

    def kernel(self, dtype: torch.dtype, device: torch.device, gated: bool) -> CudaKernel:
        """The kernel, which is compiled at the first call."""
        return _kernel(self._columns(gated), self.stages, dtype, device, gated)

    def _columns(self, gated: bool) -> int:
        return self.block_n * 2 if gated else self.block_n


GATED, ARGMAX = Wide(112, 4), Wide(224, 5)


def wide_for(x: Tensor, weight: Tensor, gated: bool) -> Wide | None:
    """The division for a gate or an argmax; None where the kernel cannot run with any number of rows.

    The choice was measured on an H200: benchmarks/results/choosing/wide_h200.txt.
    """
    if x.dtype not in _DTYPES or weight.nbytes < _LARGE or not runs_hopper(x.device):
        return None
    if x.shape[1] % _DEPTH or num_columns(weight, gated) % 8:
        return None
    if x.stride(0) % 8 or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return None
    return GATED if gated else ARGMAX


def _num_pairs(x: Tensor) -> int:
    """Number of pairs of tiles of x; a cluster takes one pair."""
    return ceil_div(x.shape[0], _ROWS * _CLUSTER)


def _num_clusters(device: torch.device) -> int:
    """Number of clusters that run at once."""
    return num_multiprocessors(device) // _CLUSTER


@functools.cache
def _kernel(columns: int, stages: int, dtype: torch.dtype, device: torch.device, gated: bool) -> CudaKernel:
    defines = f"COLUMNS={columns}", f"STAGES={stages}", "GATED" if gated else "ARGMAX"
    code = CudaCode(SOURCE, defines, (("wgmma.h", wgmma_header(columns, dtype)),))
    ring = stages * (_ROWS + columns) * _DEPTH * dtype.itemsize
    staged = _ROWS * (columns // 2 + 8) * dtype.itemsize if gated else 0
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
"""
