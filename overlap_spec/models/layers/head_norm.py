"""Linears of queries, keys and values, followed by norms of queries and keys."""

from dataclasses import dataclass

import torch
from overlap_spec_kernels import Normed, norm_heads
from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.layers.norm import Norm
from overlap_spec.models.work import ForwardWork, product_work, total_work


@dataclass(frozen=True, slots=True)
class HeadNormLinear:
    """Normalises each query and key head before rotation (Qwen3), in one kernel."""

    qkv: AnyLinear  # [(n + 2 nkv) d, H]
    query: Tensor  # [d]
    key: Tensor  # [d]
    num_kv_heads: int
    eps: float

    @property
    def work(self) -> ForwardWork:
        norms = (self.query, self.key)
        return self.qkv.work + total_work(product_work(norm.nbytes, norm.numel()) for norm in norms)

    def __call__(self, x: Tensor | Normed) -> Tensor:
        """Shapes: [T, H] -> [T, (n + 2 nkv) d]."""
        return self.normed(self.qkv(x))

    def normed(self, qkv: Tensor) -> Tensor:
        """Of what the linear computes. Shapes: [T, (n + 2 nkv) d]."""
        return norm_heads(qkv, self.query, self.key, self.num_kv_heads, self.eps)


@dataclass(frozen=True, slots=True)
class QueryKeyNormLinear:
    """Applies any norms to queries and keys before rotation, one operation after another."""

    qkv: AnyLinear  # [(n + 2 nkv) d, H]
    query: Norm
    key: Norm
    sizes: tuple[int, int, int]  # columns of queries, keys and values
    groups: tuple[int, int] = (1, 1)  # parts of queries and of keys, each with a norm of its own

    @property
    def work(self) -> ForwardWork:
        return self.qkv.work + self.query.work + self.key.work

    def __call__(self, x: Tensor | Normed) -> Tensor:
        """Shapes: [T, H] -> [T, (n + 2 nkv) d]."""
        q, k, v = self.qkv(x).split(self.sizes, dim=1)
        parts = zip((q, k), (self.query, self.key), self.groups, strict=True)
        normed = (norm(part.reshape(len(part) * groups, -1)).view(part.shape) for part, norm, groups in parts)
        return torch.cat((*normed, v), dim=1)
