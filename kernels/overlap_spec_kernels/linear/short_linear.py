"""The kernel of small weights in one order of sums for up to 16 rows of x, in CUDA C++.

A program has all of K of its rows of W in shared memory before x is there. (In Gluon, `streamed_linear.py` goes through
a ring, at each of whose stages warps meet.)
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import ceil_div
from overlap_spec_kernels.linear.call import Call, num_columns
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, runs_hopper

SOURCE = Path(__file__).parent / "cuda" / "short_linear.cu"
_MOST_ROWS = 16  # of x
_BLOCK_N, _THREADS = 16, 128
_MOST_BYTES = 200 << 10  # of a program's shared memory


class _Work(ctypes.Structure):
    """`Work` of short_linear.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "weight", "squares", "residual", "norm", "out", "weighted", "sums")
        ),
        *((name, ctypes.c_int) for name in ("x_stride", "residual_stride", "size_n", "num_rows", "num_squares")),
        ("eps", ctypes.c_float),
    )


class Short(NamedTuple):
    """How such a linear is compiled."""

    piece: int  # columns that belong to one sum
    rows: int  # of x, padded

    @property
    def block_n(self) -> int:
        """Columns of a program, whose squares are one sum of a norm's."""
        return _BLOCK_N

    def num_programs(self, weight: Tensor, gated: bool) -> int:
        """One for each block of columns."""
        return ceil_div(num_columns(weight, gated), _BLOCK_N)

    def run(self, call: Call, programs: int) -> None:
        """Launch. Sync: never."""
        assert call.out is not None
        norm = None if call.norm is None else call.norm.weight
        tensors = call.x, call.weight, call.squares, call.residual, norm, call.out, call.weighted, call.sums
        x_stride, residual_stride, *rest = call.sizes()
        work = _Work(*map(_address, tensors), int(x_stride), int(residual_stride), *map(int, rest[:3]), call.eps)
        self.kernel(call).launch(programs, (work,))

    def kernel(self, call: Call) -> CudaKernel:
        """The kernel, which is compiled at the first call."""
        size_k = call.weight.shape[1]
        rows = self.rows + _BLOCK_N * (2 if call.gated else 1)
        return _kernel(self.defines(call), rows * (2 * size_k + 16), call.x.device)

    def defines(self, call: Call) -> tuple[str, ...]:
        """For the compiler."""
        assert call.out is not None
        names = {
            "SIZE_K": call.weight.shape[1],
            "PIECE": self.piece,
            "ROWS": self.rows,
            "GATED": call.gated,
            "ADD": call.residual is not None,
            "SCALED": call.squares is not None,
            "WIDE": call.out.dtype == torch.float32,
        }
        return tuple(f"{name}={int(value)}" for name, value in names.items())


def short_for(x: Tensor, weight: Tensor, gated: bool, piece: int) -> Short | None:
    """The division for these shapes; None where the kernel does not apply. `piece`: of `piece_of`."""
    num_rows, size_k = x.shape
    if not piece or num_rows > _MOST_ROWS or x.dtype != torch.bfloat16 or not runs_hopper(x.device):
        return None
    rows = 8 if num_rows <= 8 else _MOST_ROWS
    fits = (rows + _BLOCK_N * (2 if gated else 1)) * (2 * size_k + 16) <= _MOST_BYTES
    aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return Short(piece, rows) if fits and aligned else None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def _kernel(defines: tuple[str, ...], shared_bytes: int, device: torch.device) -> CudaKernel:
    return CudaKernel(CudaCode(SOURCE, defines), "short_linear", _THREADS, shared_bytes)
