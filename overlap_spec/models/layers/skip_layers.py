"""Forwards that are run for their launches alone: to compile and load kernels, and to take memory, before serving.

The layers of a model are mostly alike: they launch the same kernels on tensors of the same sizes. So such a forward
leaves most of them out, and takes a quarter of the time. What it computes means nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

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
