"""Runs all layers of a model: in one call of a CPU's kernel where it has one for them, else one after another.

Some forwards are run for their launches alone: to compile and load kernels, and to take memory, before serving. The
layers of a model are mostly alike: they launch the same kernels on tensors of the same sizes. So such a forward leaves
most of them out, and takes a quarter of the time. What it computes means nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import cached_property

import torch
from overlap_spec_kernels import LayerOnCpu, LayersOnCpu, Normed, RowsArgument
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, near_keys, starts_on_cpu
from overlap_spec.models.layers.attention import PagedAttention
from overlap_spec.models.layers.decoder import DecoderLayer, PreNormLayer, SelfAttention, run_layers
from overlap_spec.models.layers.mlp import GatedMLP
from overlap_spec.models.layers.norm import Norm, RMSNorm
from overlap_spec.models.quantization.grouped import GroupedLinear

ALIKE = 4  # layers of a kind that are run: in this many, the places where tensors lie repeat themselves
ALIGNMENT = 16  # bytes: kernels are compiled for addresses that are a multiple of it, and for others

_SKIPS_LAYERS: ContextVar[bool] = ContextVar("skips_layers", default=False)


@contextmanager
def skipping_layers() -> Iterator[None]:
    """In this block a forward leaves out layers that would launch what it launches anyway."""
    token = _SKIPS_LAYERS.set(True)
    try:
        yield
    finally:
        _SKIPS_LAYERS.reset(token)


def skips_layers() -> bool:
    """Whether this is in such a block."""
    return _SKIPS_LAYERS.get()


def dispensable(layers: Sequence[object], aux_layers: frozenset[int]) -> frozenset[int]:
    """The layers that such a forward leaves out: those of which it has run enough like them.

    It runs the last layer, of which not all rows may be read, and the aux layers. It also runs the layer after each of
    these: it is the first that needs other memory than what is kept.
    """
    kinds = [described(layer) for layer in layers]
    run = {len(layers) - 1, *aux_layers, *(index + 1 for index in aux_layers)}
    run |= {index for index, kind in enumerate(kinds) if kinds[:index].count(kind) < ALIKE}
    return frozenset(range(len(layers))) - run


def described(node: object) -> object:
    """Equal for weights and constants with which the same kernels are launched: all but the values in tensors.

    What is neither a tensor nor a tree of dataclasses and tuples is equal to itself.
    """
    if isinstance(node, Tensor):
        return _described_tensor(node)
    if isinstance(node, tuple):
        return type(node), *map(described, node)
    if is_dataclass(node) and not isinstance(node, type):
        return type(node), *(described(getattr(node, field.name)) for field in fields(node))
    return node


def _described_tensor(tensor: Tensor) -> object:
    sizes = tensor.dtype, tensor.layout, tuple(tensor.shape)
    if tensor.layout is not torch.strided:
        return sizes
    return *sizes, tensor.stride(), tensor.data_ptr() % ALIGNMENT


class LayerRun:
    """The layers of a model that is attached to its cache."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        final_norm: Norm,
        attention: PagedAttention,
        aux_layers: frozenset[int] = frozenset(),
    ) -> None:
        """`aux_layers`: those whose results are returned beside the last one's."""
        self._layers, self._final_norm, self._attention = layers, final_norm, attention
        self._aux_layers = aux_layers
        self._whole = _whole(layers, final_norm, attention, aux_layers)

    def __call__(
        self, x: Normed, rows: RowBatch, read_before_wait: bool = False, added: Tensor | None = None
    ) -> tuple[Normed, list[Tensor]]:
        placed = rows.cache_rows is not None and (rows.row_starts is not None or rows.tree is not None)
        if self._whole is None or not placed:
            return run_layers(
                x,
                self._layers,
                self._final_norm,
                self._attention,
                rows,
                aux_layers=self._aux_layers,
                read_before_wait=read_before_wait,
                left_out=self._dispensable if skips_layers() else frozenset(),
                added=added,
            )
        assert rows.cache_rows is not None
        starts, near = starts_on_cpu(rows), near_keys(rows)
        places = (rows.positions, rows.cache_rows, starts, rows.page_table)
        output, aux_hidden = self._whole(x, RowsArgument.of(*places, self._attention.page_size, near))
        if rows.read is not None:
            output = Normed(rows.read.of(output.values), rows.read.of(output.weighted))
        return output, aux_hidden

    @cached_property
    def _dispensable(self) -> frozenset[int]:
        """Layers without which a forward launches the same."""
        with_neighbours = [
            (layer, next_norm, self._attention.constants(index))
            for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True))
        ]
        return dispensable(with_neighbours, self._aux_layers)

    @property
    def _next_norms(self) -> list[Norm]:
        """By layer: the norm that prepares its result."""
        return [*(layer.input_norm for layer in self._layers[1:]), self._final_norm]


class KVRun:
    """Runs layers for the K/V of rows alone, which rows after them will attend to.

    Of the last layer, keys and values are all that is computed.
    """

    def __init__(self, layers: Sequence[DecoderLayer], attention: PagedAttention, first: int = 0) -> None:
        """`first`: place in `attention` of the first layer's KV cache."""
        self._before, self._last = layers[:-1], layers[-1]
        self._keys_values = layers[-1].attention.keys_values
        self._attention, self._first = attention, first

    def __call__(self, x: Normed, rows: RowBatch) -> None:
        """`rows` have all fields. Shapes: x [T, H], past the first layer's `input_norm`. Sync: never on CUDA."""
        if self._before:
            x, _ = run_layers(x, self._before, self._last.input_norm, self._attention, rows, first=self._first)
        self._attention.write(self._first + len(self._before), self._keys_values(x), rows)


def _whole(
    layers: Sequence[DecoderLayer], final_norm: Norm, attention: PagedAttention, aux_layers: frozenset[int]
) -> LayersOnCpu | None:
    """The kernel's call for these layers; None if some part of them is not in it."""
    next_norms = [*(layer.input_norm for layer in layers[1:]), final_norm]
    described = [
        _described(layer, next_norm, attention, index)
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True))
    ]
    known = [layer for layer in described if layer is not None]
    kernel = known[0].qkv.kernel if len(known) == len(layers) else None
    return None if kernel is None else LayersOnCpu(kernel, known, sorted(aux_layers))


def _described(layer: DecoderLayer, next_norm: Norm, attention: PagedAttention, index: int) -> LayerOnCpu | None:
    """A layer for the kernel. Derived classes compute something else."""
    heads = attention.heads_on_cpu(index)
    if heads is None or type(layer) is not PreNormLayer or type(layer.mlp) is not GatedMLP:
        return None
    if type(layer.attention) is not SelfAttention:
        return None
    linears = (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    operands = [linear.operand for linear in linears if isinstance(linear, GroupedLinear) and linear.bias is None]
    norms = [norm for norm in (layer.mlp_norm, next_norm) if isinstance(norm, RMSNorm)]
    if len(operands) < len(linears) or len(norms) < 2 or not operands[2].halves:
        return None
    qkv, output, gate_up, down = operands
    mlp_norm, after = norms
    return LayerOnCpu(qkv, output, gate_up, down, mlp_norm, after, heads)
