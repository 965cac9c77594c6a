"""Products of one row with the matrices of its experts in 4-bit floats, in CUDA C++ on Hopper, and their sum.

The kernels of expert_float4.cu have more of W on its way at once than `float4_products.py`, and its bits.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.experts.products import Clamp
from overlap_spec_kernels.experts.sum_of_experts import PART, Routing, squares_of
from overlap_spec_kernels.launch import ceil_div
from overlap_spec_kernels.linear.call import num_multiprocessors
from overlap_spec_kernels.linear.float4 import RUN, TILE_COLUMNS, Float4Matrices
from overlap_spec_kernels.norm.normed import Norm, Normed
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, TensorMap, box_map, runs_hopper

SOURCE = Path(__file__).parent / "cuda" / "expert_float4.cu"
_GATE_COLUMNS, _MOST_WARPS = 8, 16  # of gate and of up of a warp; warps of a program
_CHUNK = 3  # tiles of a stage: of fewer the copies are smaller, of more the last ones come later
_GATE_STAGES, _DOWN_STAGES = 6, 8  # at most
_GATE_BYTES, _DOWN_BYTES = 150 << 10, 110 << 10  # of shared memory: one of the second has room beside one of the first


class Sizes(NamedTuple):
    """Of a program of expert_float4.cu, as its names have it."""

    size_k: int
    words: int
    warps: int
    top_k: int
    rows_of_x: int
    most_bytes: int
    most_stages: int
    biased: int = 0
    clamped: int = 0
    shared: int = 0
    wide: int = 0

    @property
    def tiles(self) -> int:
        """Of a row of W."""
        return ceil_div(self.size_k, TILE_COLUMNS)

    @property
    def stages(self) -> int:
        """As many as chunks, or as fit beside scales and x."""
        room = self.most_bytes - self._besides
        return min(room // (self.warps * _CHUNK * PART * RUN * 4), ceil_div(self.tiles, _CHUNK), self.most_stages)

    @property
    def num_bytes(self) -> int:
        """W, its scales, and x."""
        return self.warps * self.stages * _CHUNK * PART * RUN * 4 + self._besides

    @property
    def fits(self) -> bool:
        """Whether chunks are on their way while others are multiplied."""
        return self.warps <= _MOST_WARPS and self.stages >= min(2, ceil_div(self.tiles, _CHUNK))

    @property
    def defines(self) -> tuple[str, ...]:
        """Names of the command line."""
        names = {"SIZE_K": self.size_k, "WORDS": self.words, "CHUNK": _CHUNK, "STAGES": self.stages}
        names |= {"WARPS": self.warps, "TOP_K": self.top_k, "BIASED": self.biased, "CLAMPED": self.clamped}
        names |= {"SHARED": self.shared, "WIDE": self.wide}
        return tuple(f"{key}={value}" for key, value in names.items())

    @property
    def _besides(self) -> int:
        """Bytes of scales, and of x."""
        return self.tiles * (self.warps * self.words * PART * 4 + self.rows_of_x * TILE_COLUMNS * 2)


class _Work(ctypes.Structure):
    """`Work` of expert_float4.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scales", "factors", "bias", "x", "experts", "out")),
        *((name, ctypes.c_void_p) for name in ("weights", "shared", "residual", "norm", "weighted", "squares")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
        *((name, ctypes.c_int) for name in ("residual_stride", "size_n", "num_rows", "row_tiles")),
    )


def _gate_sizes(weight: Float4Matrices, experts: Tensor) -> Sizes:
    tiles = experts.shape[1] * weight.rows // 2 // _GATE_COLUMNS
    warps = ceil_div(tiles, num_multiprocessors(experts.device))
    return Sizes(weight.columns, weight.scales.shape[-2], warps, experts.shape[1], 1, _GATE_BYTES, _GATE_STAGES)


def _down_sizes(weight: Float4Matrices, top_k: int) -> Sizes:
    return Sizes(weight.columns, weight.scales.shape[-2], top_k, top_k, top_k, _DOWN_BYTES, _DOWN_STAGES)


def takes_float4_gate(x: Tensor, weight: Float4Matrices, experts: Tensor) -> bool:
    """Whether `float4_gate` takes these: one row in bfloat16. Shapes: x [T, I], experts [T, k]."""
    whole = weight.rows // 2 % _GATE_COLUMNS == 0 and x.data_ptr() % 16 == 0
    return whole and _takes(x, weight, experts) and _gate_sizes(weight, experts).fits


def takes_float4_down(x: Tensor, weight: Float4Matrices, experts: Tensor) -> bool:
    """Whether `float4_down` takes these: as the first product. Shapes: x [T, H], experts [T, k]."""
    whole = weight.rows % PART == 0
    return whole and _takes(x, weight, experts) and _down_sizes(weight, experts.shape[1]).fits


def _takes(x: Tensor, weight: Float4Matrices, experts: Tensor) -> bool:
    fits = len(experts) == 1 and weight.columns % RUN == 0
    return fits and x.dtype == weight.dtype == torch.bfloat16 and runs_hopper(x.device)


def _boxes(weight: Float4Matrices, rows: int) -> TensorMap:
    """The map for so many rows of all parts and some tiles of columns."""
    matrices = weight.words.flatten(0, 1).flatten(-2).view(torch.float32)
    return box_map(matrices, (weight.parts, 1, _CHUNK, rows * RUN), swizzle=0)


@functools.cache
def _kernel(name: str, sizes: Sizes, device: torch.device) -> CudaKernel:
    return CudaKernel(CudaCode(SOURCE, sizes.defines), name, 32 * (sizes.warps + 1), sizes.num_bytes)


def float4_gate(
    x: Tensor, weight: Float4Matrices, bias: Tensor | None, experts: Tensor, clamp: Clamp | None
) -> Tensor:  # fmt: skip
    """What is made of gate and up of one row's experts, right after their choice.

    Shapes: x [1, H], bias [E, 2I], experts [1, k] -> [k, I]. Sync: never.
    """
    top_k, size_n = experts.shape[1], weight.rows // 2
    sizes = _gate_sizes(weight, experts)._replace(biased=int(bias is not None), clamped=int(clamp is not None))
    out = torch.empty((top_k, size_n), dtype=x.dtype, device=x.device)
    given = weight.scales, weight.factors, bias, x, experts, out
    pointers = (None if each is None else each.data_ptr() for each in given)
    work = _Work(*pointers, *[None] * 6, *(clamp or (0.0, 0.0)), 0, size_n, 1, weight.words.shape[2])
    programs = ceil_div(top_k * size_n // _GATE_COLUMNS, sizes.warps)
    _kernel("float4_gate", sizes, x.device).launch(programs, (_boxes(weight, _GATE_COLUMNS), work))
    return out


def float4_down(
    gated: Tensor, weight: Float4Matrices, bias: Tensor | None, routing: Routing, residual: Tensor, norm: Norm,
    shared: Tensor | None,
) -> Normed:  # fmt: skip
    """See `sum_of_experts.multiply_and_add`; results have a bias. Shapes: bias [E, H]. Sync: never."""
    values, weighted = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
    squares, sizes = squares_of(values), _down_sizes(weight, len(gated))
    sizes = sizes._replace(biased=int(bias is not None), shared=int(shared is not None))
    sizes = sizes._replace(wide=int(norm.weight.dtype == torch.float32))
    given = weight.scales, weight.factors, bias, gated, routing.experts, values, routing.weights
    of_sum = shared, residual, norm.weight, weighted, squares
    pointers = (None if each is None else each.data_ptr() for each in (*given, *of_sum))
    work = _Work(*pointers, 0.0, 0.0, 0, weight.rows, 1, weight.words.shape[2])
    _kernel("float4_down", sizes, gated.device).launch(weight.rows // PART, (_boxes(weight, PART), work))
    return Normed(values, weighted, squares, norm.eps)
