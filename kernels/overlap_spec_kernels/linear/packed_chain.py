"""A layer from its attention on, in one launch and one order of sums: output, gate and up, down, for few rows.

Weights are float8 in fragment order, with a scale for each row (`ordered_quantized.py`). Each linear waits for all of
the one before it. A launch for each would leave memory idle meanwhile: a program's ring of W takes most of its shared
memory, so the next kernel's programs begin when it has ended. Here a program's ring is filled with the next linear's W.

On an H200 the four linears of an 8B's layer take 65.3 instead of 69.1 us with one row, and 66.7 instead of 69.3 with 8
(58.6 and 62.0 without one order). Slower were: stages of 128 columns (68.7), the next layer's first linear in the same
launch (68.2), operands loaded a chunk before they are multiplied with x in all stages (66.6): copies of x, of 1 KiB
each, take the copy engine's time. Whole rows of x beside the ring were not tried.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import ceil_div, shared_zeros
from overlap_spec_kernels.linear.call import num_columns, num_multiprocessors
from overlap_spec_kernels.linear.fragments import TILE_COLUMNS, TILE_ROWS
from overlap_spec_kernels.linear.packed_products import parts_in_one_order
from overlap_spec_kernels.linear.packing import Order, Packing
from overlap_spec_kernels.norm.normed import Norm, Normed
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, runs_hopper, tensor_map

SOURCE = Path(__file__).parent / "cuda" / "packed_chain.cu"
_MOST_ROWS = 8  # of x
_WARPS, _COPY_WARPS = 8, 4
_DEPTHS = 256, 128  # columns of a stage
_COLUMNS = TILE_ROWS * _WARPS  # of a result, of an item
_BLOCK = 64  # columns whose squares are added up
_COLUMN_BYTES = 2 * _MOST_ROWS + _COLUMNS  # of x and W, in a stage
_RING_COLUMNS = 1536
_AHEAD = 768  # columns of W on their way: more would keep x waiting
_MOST_COUNTERS = 4096
_LARGE = 8 << 20  # bytes in 16 bits of a weight that multiplies rows before their scale (ordered_quantized.py)


class _Phase(ctypes.Structure):
    """`Phase` of packed_chain.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("weight", "scales", "residual", "norm", "out", "weighted", "sums", "parts")
        ),
        ("counters", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("size_n", "size_k", "tiles", "items", "splits", "residual_stride")),
    )


class _Work(ctypes.Structure):
    """`Work` of packed_chain.cu."""

    _fields_ = (
        ("phases", _Phase * 3),
        ("ended", ctypes.c_void_p),
        ("num_rows", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


class Weight(NamedTuple):
    """Of a linear in fragment order."""

    data: Tensor  # [O, I] u8
    packing: Packing

    @property
    def size_k(self) -> int:
        return self.data.shape[1]


class Layer(NamedTuple):
    """The linears, with the norms after the first and the third."""

    output: Weight
    norm: Norm
    gate_up: Weight
    down: Weight
    next_norm: Norm


class Chain(NamedTuple):
    """How the ring is divided."""

    depth: int = _DEPTHS[0]  # columns of a stage
    columns: int = _RING_COLUMNS
    ahead: int = _AHEAD  # columns of W on their way

    def run(self, x: Tensor, residual: Tensor, layer: Layer) -> Normed:
        """Launch. Sync: never. Shapes: x [T, I], residual [T, H] -> [T, H]."""
        num_rows, device = len(x), x.device
        programs = num_multiprocessors(device)
        middle, out = _normed(residual, layer.norm), _normed(residual, layer.next_norm)
        gates = x.new_empty((num_rows, num_columns(layer.gate_up.data, True)))
        parts = _room_for_parts(layer, residual)  # no program reads those of output when down's are written
        phases = (
            _addition(layer.output, residual, layer.norm, middle, parts, 0),
            _product(layer.gate_up, gates, programs),
            _addition(layer.down, middle.values, layer.next_norm, out, parts, 1),
        )
        work = _Work((_Phase * 3)(*phases), _counters(device).data_ptr(), num_rows, middle.eps)
        maps = (tensor_map(rows, _MOST_ROWS, TILE_COLUMNS) for rows in (x, middle.weighted, gates))
        kernel = _kernel(self, device)
        programs = min(programs, max(phase.items for phase in phases), kernel.clusters_at_once(1))
        kernel.launch(programs, (*maps, work))
        return out

    def defines(self) -> tuple[str, ...]:
        """For the compiler."""
        return f"DEPTH={self.depth}", f"STAGES={self.columns // self.depth}", f"AHEAD={self.ahead // self.depth}"


def chain_for(x: Tensor, layer: Layer) -> Chain | None:
    """The division for these shapes; None where the kernel does not apply."""
    output, norm, gate_up, down, next_norm = layer
    hidden = len(output.data)
    if x.dtype != torch.bfloat16 or len(x) > _MOST_ROWS or x.stride(0) % 8 or x.data_ptr() % 16:
        return None
    if not runs_hopper(x.device) or not all(map(_takes, (output, gate_up, down))):
        return None
    if hidden % _COLUMNS or gate_up.size_k != hidden or len(down.data) != hidden or norm.weight.dtype != x.dtype:
        return None
    if 2 * gate_up.data.numel() < _LARGE:
        return None
    fits = next_norm.weight.dtype == x.dtype and down.size_k == num_columns(gate_up.data, True)
    parts = [(output.size_k, _splits(output)), (hidden, 1), (down.size_k, _splits(down))]
    whole = (depth for depth in _DEPTHS if all(size_k % (depth * splits) == 0 for size_k, splits in parts))
    return Chain(next(whole, _DEPTHS[-1])) if fits else None


def _takes(weight: Weight) -> bool:
    packing = weight.packing
    by_rows = packing.bits == 8 and packing.group == 0 and packing.scales.dtype == torch.float32
    return by_rows and packing.order is Order.FRAGMENTS and weight.size_k % _DEPTHS[-1] == 0


def _normed(residual: Tensor, norm: Norm) -> Normed:
    num_rows, size = residual.shape
    values = residual.new_empty((num_rows, size))
    squares = residual.new_empty((size // _BLOCK, num_rows), dtype=torch.float32)
    return Normed(values, torch.empty_like(values), squares, norm.eps)


def _room_for_parts(layer: Layer, residual: Tensor) -> Tensor:
    """For the sums of parts of K, of output or of down. Shapes: -> [splits, T, H] f32."""
    splits = max(_splits(weight) for weight in (layer.output, layer.down))
    return residual.new_empty((splits, *residual.shape), dtype=torch.float32)


def _splits(weight: Weight) -> int:
    return parts_in_one_order(len(weight.data), weight.size_k, False)


def _addition(weight: Weight, residual: Tensor, norm: Norm, out: Normed, parts: Tensor, number: int) -> _Phase:
    size_n, size_k = weight.data.shape
    groups, splits = size_n // _COLUMNS, _splits(weight)
    assert out.squares is not None
    counters = _counters(residual.device)[_BLOCK + number * (_MOST_COUNTERS // 2) :]
    return _Phase(
        weight=weight.data.data_ptr(),
        scales=weight.packing.scales.data_ptr(),
        residual=residual.data_ptr(),
        norm=norm.weight.data_ptr(),
        out=out.values.data_ptr(),
        weighted=out.weighted.data_ptr(),
        sums=out.squares.data_ptr(),
        parts=parts.data_ptr(),
        counters=counters.data_ptr(),
        size_n=size_n,
        size_k=size_k,
        tiles=_WARPS,
        items=groups * splits,
        splits=splits,
        residual_stride=residual.stride(0),
    )


def _product(weight: Weight, out: Tensor, programs: int) -> _Phase:
    """In tiles of 16 columns, as many for each program."""
    size_n = out.shape[1]
    tiles = min(ceil_div(size_n // TILE_ROWS, programs), _WARPS)
    return _Phase(
        weight=weight.data.data_ptr(),
        scales=weight.packing.scales.data_ptr(),
        out=out.data_ptr(),
        size_n=size_n,
        size_k=weight.size_k,
        tiles=tiles,
        items=ceil_div(size_n // TILE_ROWS, tiles),
        splits=1,
    )


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Zero between kernels: ends of linears, then parts of tiles. Shapes: -> [..] i32."""
    return shared_zeros(2 * _MOST_COUNTERS, device)


@functools.cache
def _kernel(cut: Chain, device: torch.device) -> CudaKernel:
    code = CudaCode(SOURCE, cut.defines())
    return CudaKernel(code, "packed_chain", 32 * (_WARPS + _COPY_WARPS), cut.columns * _COLUMN_BYTES)
