"""What one model keeps of requests: K and V of their tokens in pages, and a state of each slot for recurrent layers.

    k[layer]: [num_pages, page_size, num_kv_heads, head_dim], v[layer] alike

Layers may have heads of different sizes, and some attend to what an earlier one has written.

Of latent attention a token has one row for all heads, and its value is the first columns of it: `v` is a view of `k`.
A cache row is `page * page_size + offset`. Target and draft use the same page ids, each in its own cache.

A recurrent layer has no K and V. Its state grows with the slots, not with the tokens (`recurrent_state.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from overlap_spec_kernels import move_cache_rows
from torch import Tensor

from overlap_spec.models.recurrent_state import NO_STATE, RecurrentState, StateShape

LINE = 64  # bytes of a CPU cache line


@dataclass(frozen=True)
class KVShape:
    """The sizes of a model's cache: those of a token, and of a slot."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    latent_rank: int | None = None  # columns of a key that are its value, too; None: values are of their own
    state: StateShape = NO_STATE  # of recurrent layers, which are not among `num_layers`
    sizes: tuple[tuple[int, int], ...] = ()  # by layer: heads and their columns, where layers are not alike
    places: tuple[int, ...] = ()  # by layer of the model, which of these it attends to, where some have none

    @property
    def num_tensors(self) -> int:
        """K and V, or one for both."""
        return 2 if self.latent_rank is None else 1

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """K and V of all layers, in bytes."""
        if not self.sizes:
            return self.num_layers * self.bytes_per_layer(dtype)
        return sum(self.num_tensors * heads * columns * dtype.itemsize for heads, columns in self.sizes)

    def bytes_per_layer(self, dtype: torch.dtype) -> int:
        """K and V of a token in one layer, of layers that are not alike in the largest one."""
        return self.num_tensors * self.num_kv_heads * self.head_dim * dtype.itemsize

    def bytes_per_slot(self, width: int, dtype: torch.dtype) -> int:
        """The state of a request whose windows have up to `width` columns. `dtype`: the model's."""
        return self.state.bytes_per_slot(width, dtype)


@dataclass(frozen=True)
class SlotSizes:
    """For whom states are kept."""

    num_slots: int  # the dummy slot included
    width: int  # columns of a window, at most
    dtype: torch.dtype  # the model's, which KV pages need not have


@dataclass(frozen=True)
class KVCache:
    """K and V of every layer of one model that attends, and the states of those that recur."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    stacks: tuple[tuple[Tensor, ...], ...]
    """The same memory: K and V of layers that are alike, or one for both, [L, num_pages, page_size, nkv, d] each."""
    state: RecurrentState

    @property
    def stacked(self) -> tuple[Tensor, ...]:
        """All of that memory, one after another."""
        return tuple(chain.from_iterable(self.stacks))

    @classmethod
    def allocate(
        cls,
        shape: KVShape,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scratch_rows: int = 0,
        slots: "SlotSizes | None" = None,
    ) -> "KVCache":
        """Take the memory of `num_pages` pages, and of `scratch_rows` cache rows behind them, which belong to no page.

        `slots`: whose states are kept; None: no layer recurs.

        The memory is zeroed, because a masked key has weight 0, and 0 times a NaN in unwritten memory is NaN. On a CPU,
        zeroed pages take no memory until they are written.
        """
        num_pages += -(-scratch_rows // page_size)
        sizes = shape.sizes or ((shape.num_kv_heads, shape.head_dim),) * shape.num_layers
        stacks = {
            size: tuple(
                _zeros((sizes.count(size), num_pages, page_size, *size), dtype, device)
                for _ in range(shape.num_tensors)
            )
            for size in dict.fromkeys(sizes)
        }
        k = _by_layer(sizes, {size: stack[0] for size, stack in stacks.items()})
        v = _by_layer(sizes, {size: stack[-1][..., : shape.latent_rank] for size, stack in stacks.items()})
        places = shape.places or range(len(sizes))
        slots = slots or SlotSizes(0, 0, dtype)
        state = RecurrentState.allocate(shape.state, slots.num_slots, slots.width, slots.dtype, device)
        return cls(
            tuple(k[place] for place in places),
            tuple(v[place] for place in places),
            tuple(stacks.values()),
            state,
        )

    def of_layers(self, layers: Sequence[int]) -> "KVCache":
        """The same memory, as a model reads it whose layers attend to what these have written, and write nothing."""
        return KVCache(tuple(self.k[i] for i in layers), tuple(self.v[i] for i in layers), (), self.state)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy K and V of some tokens within all layers, as if all were read first. Sync: never.

        Shapes: source, target [B, D] i64, cache rows. Rows of one b may overlap; rows of different b do not.
        """
        for k, *v in self.stacks:
            move_cache_rows(k, v[0] if v else None, source, target)


def _by_layer(sizes: Sequence[tuple[int, int]], stacks: Mapping[tuple[int, int], Tensor]) -> list[Tensor]:
    """The layers of all stacks, in their order in the model."""
    layers = {size: iter(stack.unbind(0)) for size, stack in stacks.items()}
    return [next(layers[size]) for size in sizes]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros without writing them: on a CPU, torch writes zeros, but numpy maps pages that are zero when first read."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(num_bytes + LINE, np.uint8))
    start = -memory.data_ptr() % LINE
    return memory[start : start + num_bytes].view(dtype).view(size)
