"""Kernels of linears whose programs have all of K of their rows of W in shared memory before x is there, in CUDA C++.

Small weights in one order of sums, for up to 16 rows of x; and a weight whose programs all run at once, for one row.
(In Gluon, `streamed_linear.py` goes through a ring, at each of whose stages warps meet.)
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import ceil_div
from overlap_spec_kernels.linear.call import Addition, Call, num_columns, num_multiprocessors
from overlap_spec_kernels.norm.normed import Normed
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, runs_hopper

SOURCE = Path(__file__).parent / "cuda" / "short_linear.cu"
_MOST_ROWS = 16  # of x
_BLOCK_N, _THREADS = 16, 128
_MOST_BYTES = 200 << 10  # of a program's shared memory

ROW_SOURCE = SOURCE.with_name("row_linear.cu")
_LEAST_ROW_BYTES, _MOST_ROW_BYTES = 8 << 20, 140 << 10  # of a weight; of a program, beside one of attention
_ROW_WARPS = 8


class _Work(ctypes.Structure):
    """`Work` of short_linear.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "weight", "squares", "residual", "norm", "out", "weighted", "sums", "bias")
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
        tensors = call.x, call.weight, call.squares, call.residual, norm, call.out, call.weighted, call.sums, call.bias
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
            "BIASED": call.bias is not None,
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


class _RowWork(ctypes.Structure):
    """`Work` of row_linear.cu."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("x", "weight", "residual", "norm", "out", "weighted", "sums"))


class RowLinear(NamedTuple):
    """How such a linear of one row, which is added to a residual, is compiled."""

    size_k: int
    wide: bool  # the weight of the norm is float32

    @property
    def block_n(self) -> int:
        """Columns of a program, whose squares are one sum of a norm's."""
        return _BLOCK_N

    @property
    def num_bytes(self) -> int:
        """W's rows, and x."""
        return _BLOCK_N * (2 * self.size_k + 16) + 2 * self.size_k

    def num_programs(self, weight: Tensor, gated: bool) -> int:
        """One for each block of columns."""
        return len(weight) // _BLOCK_N

    def run(self, call: Call, programs: int) -> None:
        """Launch. Sync: never."""
        assert call.norm is not None
        tensors = call.x, call.weight, call.residual, call.norm.weight, call.out, call.weighted, call.sums
        _row_kernel(self, call.x.device).launch(programs, (_RowWork(*map(_address, tensors)),))


def row_linear_for(
    x: Tensor | Normed, weight: Tensor, add: Addition | None, bias: Tensor | None = None
) -> RowLinear | None:
    """The division for these shapes; None where the kernel does not apply."""
    if add is None or bias is not None or isinstance(x, Normed) or len(x) > 1:
        return None
    if x.dtype != torch.bfloat16 or not runs_hopper(x.device):
        return None
    cut = RowLinear(weight.shape[1], add.norm.weight.dtype == torch.float32)
    whole = len(weight) % _BLOCK_N == 0 and cut.size_k % (32 * _ROW_WARPS) == 0 and x.data_ptr() % 16 == 0
    at_once = whole and len(weight) <= _BLOCK_N * num_multiprocessors(x.device)
    fits = weight.nbytes >= _LEAST_ROW_BYTES and cut.num_bytes <= _MOST_ROW_BYTES
    return cut if at_once and fits and weight.data_ptr() % 16 == 0 else None


@functools.cache
def _row_kernel(cut: RowLinear, device: torch.device) -> CudaKernel:
    code = CudaCode(ROW_SOURCE, (f"SIZE_K={cut.size_k}", f"WARPS={_ROW_WARPS}", f"WIDE={int(cut.wide)}"))
    return CudaKernel(code, "row_linear", 32 * _ROW_WARPS, cut.num_bytes)
