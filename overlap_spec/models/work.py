"""Counts the bytes and operations of a forward, and the memory of weights. Layers count; a model adds them up."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import reduce

import torch
from torch import Tensor


@dataclass(frozen=True)
class ForwardWork:
    """The work of a forward. It becomes a `messages.ForwardShape` once the KV dtype is known."""

    weight_bytes: int = 0
    row_flop: int = 0
    head_flop: int = 0
    pair_flop: int = 0

    def __add__(self, other: "ForwardWork") -> "ForwardWork":
        return ForwardWork(
            self.weight_bytes + other.weight_bytes,
            self.row_flop + other.row_flop,
            self.head_flop + other.head_flop,
            self.pair_flop + other.pair_flop,
        )

    def as_head(self) -> "ForwardWork":
        """The same for rows that get logits alone."""
        return replace(self, row_flop=0, head_flop=self.row_flop)


def product_work(num_bytes: int, num_weights: int) -> ForwardWork:
    """Two operations for each weight and row, in any format of weights. Norms are small enough to count as products."""
    return ForwardWork(weight_bytes=num_bytes, row_flop=2 * num_weights)


def attention_work(num_heads: int, head_dim: int) -> ForwardWork:
    """The attention of one layer: for each (row, key), products with key and value are 2 * 2 operations per column."""
    return ForwardWork(pair_flop=4 * num_heads * head_dim)


def total_work(parts: Iterable[ForwardWork]) -> ForwardWork:
    """The sum."""
    return reduce(ForwardWork.__add__, parts, ForwardWork())


def count_bytes(weights: object) -> int:
    """Memory of all tensors below a tree of dataclasses and tuples, shared ones counted once."""
    return sum(tensor.nbytes for tensor in {address(tensor): tensor for tensor in tensors_in(weights)}.values())


def address(tensor: Tensor) -> tuple[int, int]:
    """Equal for tensors that begin at the same place of the same memory, also where there is none (`meta`).

    A tensor in an opaque layout shares memory with no other.
    """
    if tensor.layout is not torch.strided:
        return id(tensor), 0
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * tensor.itemsize


def tensors_in(node: object) -> list[Tensor]:
    """All tensors below a tree of dataclasses and tuples, shared ones as often as they are there."""
    if isinstance(node, Tensor):
        return [node]
    if isinstance(node, tuple):
        return [tensor for child in node for tensor in tensors_in(child)]
    if is_dataclass(node):
        return [tensor for field in fields(node) for tensor in tensors_in(getattr(node, field.name))]
    return []
