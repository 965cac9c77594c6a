"""The paged KV cache of one model.

    k[layer]: [num_pages, page_size, num_kv_heads, head_dim], v[layer] alike

Of latent attention a token has one row for all heads, and its value is the first columns of it: `v` is a view of `k`.
A cache row is `page * page_size + offset`. Target and draft use the same page ids, each in its own cache.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from overlap_spec_kernels import move_cache_rows
from torch import Tensor

LINE = 64  # bytes of a CPU cache line


@dataclass(frozen=True)
class KVShape:
    """The size of one token in a model's KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    latent_rank: int | None = None  # columns of a key that are its value, too; None: values are of their own

    @property
    def num_tensors(self) -> int:
        """K and V, or one for both."""
        return 2 if self.latent_rank is None else 1

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """K and V of all layers, in bytes."""
        return self.num_layers * self.bytes_per_layer(dtype)

    def bytes_per_layer(self, dtype: torch.dtype) -> int:
        """K and V of a token in one layer."""
        return self.num_tensors * self.num_kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class KVCache:
    """K and V of every layer of one model."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    stacked: tuple[Tensor, ...]  # the same memory: K and V, or one for both, [L, num_pages, page_size, nkv, d]

    @classmethod
    def allocate(
        cls,
        shape: KVShape,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scratch_rows: int = 0,
    ) -> "KVCache":
        """Take the memory of `num_pages` pages, and of `scratch_rows` cache rows behind them, which belong to no page.

        The memory is zeroed, because a masked key has weight 0, and 0 times a NaN in unwritten memory is NaN. On a CPU,
        zeroed pages take no memory until they are written.
        """
        num_pages += -(-scratch_rows // page_size)
        size = (shape.num_layers, num_pages, page_size, shape.num_kv_heads, shape.head_dim)
        stacked = tuple(_zeros(size, dtype, device) for _ in range(shape.num_tensors))
        k, v = stacked[0], stacked[-1][..., : shape.latent_rank]
        return cls(k.unbind(0), v.unbind(0), stacked)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy K and V of some tokens within all layers, as if all were read first. Sync: never.

        Shapes: source, target [B, D] i64, cache rows. Rows of one b may overlap; rows of different b do not.
        """
        k, *v = self.stacked
        move_cache_rows(k, v[0] if v else None, source, target)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros without writing them: on a CPU, torch writes zeros, but numpy maps pages that are zero when first read."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(num_bytes + LINE, np.uint8))
    start = -memory.data_ptr() % LINE
    return memory[start : start + num_bytes].view(dtype).view(size)
