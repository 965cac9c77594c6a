"""Decoder layers one after another in one call of the C++ kernel, for linears of integers with scales.

    values --> qkv --> attention --> output, + --> norm --> silu(gate) * up --> down, + --> next norm --> values ..

It computes what the kernel's single calls do, to the bit. A step of a small model has five calls for each of its
layers, and their way through Python takes as long as their work does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap_spec_kernels.attention.rows_on_cpu import HeadsArgument, RowsArgument
from overlap_spec_kernels.launch import require
from overlap_spec_kernels.linear.grouped import GroupedKernel, GroupedWeight, MatrixArgument, NormArgument
from overlap_spec_kernels.norm.normed import Norm, Normed


@dataclass(frozen=True, slots=True)
class LayerOnCpu:
    """What a layer is made of."""

    qkv: GroupedWeight
    output: GroupedWeight
    gate_up: GroupedWeight  # `halves`
    down: GroupedWeight
    mlp_norm: Norm
    next_norm: Norm  # of the next layer's input
    heads: HeadsArgument


class _Layer(ctypes.Structure):
    """`Layer` of the C++ source."""

    _fields_ = (
        ("qkv", MatrixArgument),
        ("output", MatrixArgument),
        ("gate_up", MatrixArgument),
        ("down", MatrixArgument),
        ("mlp_norm", NormArgument),
        ("next_norm", NormArgument),
        ("heads", HeadsArgument),
        ("kept", ctypes.c_void_p),
    )


class _Stack(ctypes.Structure):
    """`Stack` of the C++ source."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("hidden_size", ctypes.c_int64),
        ("threads", ctypes.c_int32),
    )


class LayersOnCpu:
    """Layers, attached to the caches that their `heads` name."""

    def __init__(self, kernel: GroupedKernel, layers: Sequence[LayerOnCpu], kept: Sequence[int] = ()) -> None:
        """`kept`: the layers whose results are returned, ascending. Raises: ValueError naming the argument."""
        require(all(layer.gate_up.halves for layer in layers), "gate_up", "one format, of twice a multiple of 64 rows")
        self._run = kernel.compiled.run_layers
        self._run.argtypes = 6 * [ctypes.c_void_p]
        self._run.restype = None
        self._of = tuple(layers)  # the structures hold addresses
        self._layers = (_Layer * len(layers))(*(_described(layer) for layer in layers))
        self._hidden_size = layers[0].down.shape[0]
        self._kept = tuple(kept)

    def __call__(self, x: Normed, rows: RowsArgument) -> tuple[Normed, list[Tensor]]:
        """The last layer's result past its `next_norm`, and those that are kept.

        Shapes: x [T, H] past the first layer's norm, which has the columns of the first qkv -> [T, H], [T, H] each.
        Raises: ValueError naming the argument. Sync: never on CUDA.
        """
        values, normed = x.values.contiguous(), x.normalised().contiguous()
        shape, first = (rows.num_rows, self._hidden_size), self._of[0].qkv
        require(values.shape == shape and values.dtype == torch.float32, "x", "[T, H] float32")
        require(normed.shape == (shape[0], first.size_k) and normed.dtype == torch.float32, "x", "norms that qkv reads")
        out, out_normed, *kept = values.new_empty(2 + len(self._kept), *shape).unbind(0)
        for index, result in zip(self._kept, kept, strict=True):
            self._layers[index].kept = result.data_ptr()
        stack = _Stack(ctypes.addressof(self._layers), len(self._of), self._hidden_size, torch.get_num_threads())
        pointers = (tensor.data_ptr() for tensor in (values, normed, out, out_normed))
        self._run(ctypes.byref(stack), ctypes.byref(rows), *pointers)
        return Normed(out, out_normed), kept


def _described(layer: LayerOnCpu) -> _Layer:
    matrices = (weight.matrix for weight in (layer.qkv, layer.output, layer.gate_up, layer.down))
    norms = (NormArgument(norm.weight.data_ptr(), norm.eps) for norm in (layer.mlp_norm, layer.next_norm))
    return _Layer(*matrices, *norms, layer.heads, None)
