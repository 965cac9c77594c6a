"""Linears of up to 8 rows in one order of sums: a layer from its attention on in one launch.

Weights are float8 in fragment order, with a scale for each row (`ordered_quantized.py`). Each linear waits for all of
the one before it. A launch for each would leave memory idle meanwhile: a program's ring of W takes most of its shared
memory, so the next kernel's programs begin when it has ended. Here a program's ring is filled with the next linear's W.

Of an 8B's layer on an H200 (microseconds of its linears in a graph; one row 70.1 by a launch for each, 61.7 so) slower
were all of W asked for at once (2), stages of 128 columns (5), tiles in pairs for half as many warps (1), queries, keys
and values by such a kernel too (1), x by warps of its own (3; with 8 rows 11), and W that follows brought to the L2
cache while programs wait (2 to 7). With 8 rows x in one piece takes 1.0 more than in four, with one row 1.3 less.
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
from overlap_spec_kernels.linear.fragments import TILE_ROWS
from overlap_spec_kernels.linear.packed_products import parts_in_one_order
from overlap_spec_kernels.linear.packing import Order, Packing
from overlap_spec_kernels.norm.normed import Norm, Normed
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, runs_hopper

SOURCE = Path(__file__).parent / "cuda" / "packed_chain.cu"
_ROWS = 1, 2, 4, 8  # of x, for which there is room
_FEW_ROWS, _PIECES = 2, 4  # more rows come in so many pieces
_WARPS, _OTHER_WARPS = 8, 2
_TILES = 8  # of an item, at most
_DEPTHS = 256, 128  # columns of a stage
_COLUMNS = TILE_ROWS * _TILES  # of a result, of an item
_BLOCK = 64  # columns whose squares are added up
_AHEAD = 512  # columns of W on their way
_SHARED_BYTES = 227 << 10  # of a program
_OWN_BYTES = 2 << 10  # most of its own variables
_MOST_STAGES = 18
_MOST_COUNTERS = 4096
_LARGE = 8 << 20  # bytes in 16 bits of a weight that multiplies rows before their scale (ordered_quantized.py)


class _Phase(ctypes.Structure):
    """`Phase` of packed_chain.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "weight", "scales", "residual", "norm", "out", "weighted", "sums", "parts")
        ),
        ("counters", ctypes.c_void_p),
        *(
            (name, ctypes.c_int)
            for name in ("x_stride", "residual_stride", "size_n", "size_k", "tiles", "items", "splits")
        ),
    )


class _Work(ctypes.Structure):
    """`Work` of packed_chain.cu."""

    _fields_ = (
        ("phases", _Phase * 3),
        *((name, ctypes.c_void_p) for name in ("squares", "ended")),
        *((name, ctypes.c_int) for name in ("num_squares", "num_rows")),
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
    """How shared memory is divided."""

    rows: int  # of x
    x_columns: int  # the most of an item
    depth: int = _DEPTHS[0]  # columns of a stage
    warps: int = _WARPS  # that multiply
    tiles: int = _TILES // _WARPS  # of each
    stages: int = 0
    ahead: int = _AHEAD  # columns of W on their way: with more, all else that is read waits
    pieces: int = 1  # of an item's x

    def run(self, x: Tensor, residual: Tensor, layer: Layer) -> Normed:
        """Launch. Sync: never. Shapes: x [T, I], residual [T, H] -> [T, H]."""
        num_rows, device = len(x), x.device
        middle, out = _normed(residual, layer.norm), _normed(residual, layer.next_norm)
        gates = x.new_empty((num_rows, num_columns(layer.gate_up.data, True)))
        parts = _room_for_parts(layer, residual)  # no program reads those of output when down's are written
        phases = (
            _addition(x, layer.output, residual, layer.norm, middle, parts, 0),
            _product(middle.weighted, layer.gate_up, gates),
            _addition(gates, layer.down, middle.values, layer.next_norm, out, parts, 1),
        )
        assert middle.squares is not None
        ended, of_middle = _counters(device).data_ptr(), (len(middle.squares), num_rows, middle.eps)
        work = _Work((_Phase * 3)(*phases), middle.squares.data_ptr(), ended, *of_middle)
        kernel = _kernel(self, device)
        most = min(num_multiprocessors(device), kernel.clusters_at_once(1))
        kernel.launch(min(most, max(phase.items for phase in phases)), (work,))
        return out

    def defines(self) -> tuple[str, ...]:
        """For the compiler."""
        names = {
            "WARPS": self.warps,
            "TILES": self.tiles,
            "STAGES": self.stages,
            "AHEAD": min(self.ahead // self.depth, self.stages),
            "ROWS": self.rows,
            "X_COLUMNS": self.x_columns,
            "DEPTH": self.depth,
            "PIECES": self.pieces,
        }
        return tuple(f"{name}={value}" for name, value in names.items())

    @property
    def x_bytes(self) -> int:
        """Rows of x, in whole lines."""
        return ceil_div(self.rows * (2 * self.x_columns + 16), 128) * 128

    @property
    def stage_bytes(self) -> int:
        """Tiles of all warps that multiply."""
        return self.warps * self.tiles * TILE_ROWS * self.depth

    def with_stages(self) -> Chain:
        """As many as there is room for."""
        stages = (_SHARED_BYTES - _OWN_BYTES - self.x_bytes) // self.stage_bytes
        return self._replace(stages=min(stages, _MOST_STAGES))


def chain_for(x: Tensor, layer: Layer) -> Chain | None:
    """The division for these shapes; None where the kernel does not apply."""
    output, norm, gate_up, down, next_norm = layer
    hidden = len(output.data)
    if not _takes_rows(x) or not all(map(_takes, (output, gate_up, down))):
        return None
    if hidden % _COLUMNS or gate_up.size_k != hidden or len(down.data) != hidden or norm.weight.dtype != x.dtype:
        return None
    if 2 * gate_up.data.numel() < _LARGE:
        return None
    fits = next_norm.weight.dtype == x.dtype and down.size_k == num_columns(gate_up.data, True)
    parts = [(output.size_k, _splits(output)), (hidden, 1), (down.size_k, _splits(down))]
    whole = (depth for depth in _DEPTHS if all(size_k % (depth * splits) == 0 for size_k, splits in parts))
    if not fits:
        return None
    depth = next(whole, _DEPTHS[-1])
    columns = max(ceil_div(size_k // depth, splits) * depth for size_k, splits in parts)
    return _with_room(Chain(_padded(len(x)), columns, depth, pieces=1 if len(x) <= _FEW_ROWS else _PIECES))


def _takes_rows(x: Tensor) -> bool:
    aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x.dtype == torch.bfloat16 and len(x) <= _ROWS[-1] and aligned and runs_hopper(x.device)


def _takes(weight: Weight) -> bool:
    packing = weight.packing
    by_rows = packing.bits == 8 and packing.group == 0 and packing.scales.dtype == torch.float32
    return by_rows and packing.order is Order.FRAGMENTS and weight.size_k % _DEPTHS[-1] == 0


def _with_room(chain: Chain) -> Chain | None:
    """None if x leaves no room for a ring."""
    chain = chain.with_stages()
    return chain if chain.stages >= 3 else None


def _padded(num_rows: int) -> int:
    return next(rows for rows in _ROWS if rows >= num_rows)


def _tiles(size_n: int, device: torch.device) -> int:
    """Tiles of a program, of 16 columns: as many for each."""
    return min(ceil_div(size_n // TILE_ROWS, num_multiprocessors(device)), _TILES)


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


def _addition(
    x: Tensor, weight: Weight, residual: Tensor, norm: Norm, out: Normed, parts: Tensor, number: int
) -> _Phase:
    size_n, size_k = weight.data.shape
    groups, splits = size_n // _COLUMNS, _splits(weight)
    assert out.squares is not None
    counters = _counters(residual.device)[_BLOCK + number * (_MOST_COUNTERS // 2) :]
    return _Phase(
        x=x.data_ptr(),
        weight=weight.data.data_ptr(),
        scales=weight.packing.scales.data_ptr(),
        residual=residual.data_ptr(),
        norm=norm.weight.data_ptr(),
        out=out.values.data_ptr(),
        weighted=out.weighted.data_ptr(),
        sums=out.squares.data_ptr(),
        parts=parts.data_ptr(),
        counters=counters.data_ptr(),
        x_stride=x.stride(0),
        residual_stride=residual.stride(0),
        size_n=size_n,
        size_k=size_k,
        tiles=_TILES,
        items=groups * splits,
        splits=splits,
    )


def _product(x: Tensor, weight: Weight, out: Tensor) -> _Phase:
    """In tiles of 16 columns, as many for each program."""
    size_n = out.shape[1]
    tiles = _tiles(size_n, x.device)
    return _Phase(
        x=x.data_ptr(),
        weight=weight.data.data_ptr(),
        scales=weight.packing.scales.data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0),
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
    threads = 32 * (cut.warps + _OTHER_WARPS)
    return CudaKernel(code, "packed_chain", threads, cut.x_bytes + cut.stages * cut.stage_bytes)
