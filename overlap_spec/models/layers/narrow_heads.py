"""Attention whose heads are fewer than those of its cache, or whose values have fewer columns than keys (MiMo-V2).

A cache holds one size of heads for all layers of a model, and K as large as V. So a head of keys and values is stored
as often as the layer has fewer of them than the others, and values are filled up with zeros:

    the linear gives    k0 k1        v0 v1          2 heads, where other layers have 4
    the cache has       k0 k0 k1 k1  v0. v0. v1. v1.

A query finds in its copy what it would find in the one head, and the columns that were filled up are left out of what
it found.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from overlap_spec_kernels import Normed
from torch import Tensor

from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import Attend, SelfAttention
from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.work import ForwardWork


@dataclass(frozen=True, slots=True)
class NarrowHeads:
    """The heads of keys and values that a layer's linear gives."""

    num_kv_heads: int  # the cache has a multiple
    value_dim: int  # columns of a value; the cache has as many as a key has
    value_scale: float = 1.0  # factor of values


@dataclass(frozen=True, slots=True)
class NarrowHeadsLinear:
    """`Projection` of such a layer."""

    qkv: AnyLinear  # [n d + k (d + dv), H], of k heads
    heads: NarrowHeads
    shape: AttentionShape  # as the cache has it

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""
        return self.qkv.work

    def __call__(self, x: Tensor | Normed) -> Tensor:
        """Shapes: [T, H] -> [T, (n + 2 nkv) d]."""
        shape, heads, projected = self.shape, self.heads, self.qkv(x)
        dim, values = shape.head_dim, heads.num_kv_heads * heads.value_dim
        keys = heads.num_kv_heads * dim
        q, k, v = projected.split((shape.num_heads * dim, keys, values), dim=1)
        filled = F.pad(v.unflatten(1, (-1, heads.value_dim)) * heads.value_scale, (0, dim - heads.value_dim))
        copies = shape.num_kv_heads // heads.num_kv_heads
        both = torch.stack((k.unflatten(1, (-1, dim)), filled), dim=1)
        return torch.cat((q, both.repeat_interleave(copies, dim=2).flatten(1)), dim=1)


@dataclass(frozen=True, slots=True)
class NarrowAttention(SelfAttention):
    """`Attention` of such a layer."""

    value_dim: int  # dv; the second linear is [H, n dv]

    def _attended(self, x: Normed, attend: Attend) -> Tensor:
        """Shapes: [T, H] -> [R, n dv]."""
        found = attend(self.qkv(x))
        by_head = found.view(len(found), self.shape.num_heads, -1)
        return by_head[:, :, : self.value_dim].flatten(1)
