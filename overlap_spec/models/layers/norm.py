"""Norms over flattened rows, and linears of queries, keys and values with norms of queries and keys after them.

A norm has three forms: of rows (`__call__`), of a residual that no linear has just added to (`enter`), and of the sum
of a linear's result and the residual (`join`), which on a GPU is fused with the linear if that has such a kernel.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from overlap_spec_kernels import Norm as KernelNorm, Normed, add_rms_norm, rms_norm
from overlap_spec_kernels.launch import runs_triton
from overlap_spec_kernels.linear.quantized import QuantizedWeight
from overlap_spec_kernels.norm.norm_heads import HeadNorms, UnnormedHeads
from overlap_spec_kernels.norm.rms_norm import rms_norm_reference
from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear, FusedLinear, Linear
from overlap_spec.models.work import ForwardWork, product_work, total_work


class Norm(Protocol):
    """A norm of a layer. It owns its weight."""

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: [T, H] -> [T, H]."""

    def enter(self, residual: Tensor) -> Normed:
        """The residual, and the norm of it. Shapes: [T, H]."""

    def join(self, linear: AnyLinear, x: Tensor, residual: Tensor, take: bool = False) -> Normed:
        """`residual + linear(x)`, and its norm; `take`: see `AnyLinear.add`. Shapes: x [T, I], residual [T, H]."""


class RMSNorm(KernelNorm):
    """Root-mean-square norm in the model's type. The kernel that writes the residual can compute a part of it."""

    __slots__ = ()

    @property
    def work(self) -> ForwardWork:
        return product_work(self.weight.nbytes, self.weight.numel())

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def enter(self, residual: Tensor) -> Normed:
        return Normed(residual, self(residual))

    def join(self, linear: AnyLinear, x: Tensor, residual: Tensor, take: bool = False) -> Normed:
        return linear.add(x, residual, self, take)


@dataclass(frozen=True, slots=True)
class WideRMSNorm:
    """Root-mean-square norm with a weight in float32 or wider, rounded once after it (Gemma: the weight is 1 + w).

    Of linears, those of a type's own width take such a weight into their kernels, and those of few bits with few rows.
    """

    weight: Tensor  # [H] f32 or f64
    eps: float

    @property
    def work(self) -> ForwardWork:
        return product_work(self.weight.nbytes, self.weight.numel())

    def __call__(self, x: Tensor) -> Tensor:
        if runs_triton(x):
            return rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)
        return rms_norm_reference(x, self.weight, self.eps)

    def enter(self, residual: Tensor) -> Normed:
        return Normed(residual, self(residual))

    def join(self, linear: AnyLinear, x: Tensor, residual: Tensor, take: bool = False) -> Normed:
        is_packed = isinstance(linear, FusedLinear) and isinstance(linear.operand, QuantizedWeight)
        if is_packed or (isinstance(linear, Linear) and linear.fused):
            return linear.add(x, residual, KernelNorm(self.weight, self.eps), take)
        rows, values = add_rms_norm(linear(x), residual, self.weight, self.eps)
        return Normed(values, rows)


@dataclass(frozen=True, slots=True)
class NoNorm:
    """Placeholder for a norm that a layer does not have."""

    @property
    def work(self) -> ForwardWork:
        return ForwardWork()

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def enter(self, residual: Tensor) -> Normed:
        return Normed(residual, self(residual))

    def join(self, linear: AnyLinear, x: Tensor, residual: Tensor, take: bool = False) -> Normed:
        return self.enter(residual + linear(x))


@dataclass(frozen=True, slots=True)
class Scaled(NoNorm):
    """A number in the place of a norm."""

    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that norms are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class HeadNormLinear:
    """Normalises each query and key head before rotation (Qwen3), in one kernel."""

    qkv: AnyLinear  # [m + (n + 2 nkv) d, H]
    query: Tensor  # [d]
    key: Tensor  # [d]
    num_kv_heads: int
    eps: float
    before: int = 0  # m, columns that are left as they are

    @property
    def work(self) -> ForwardWork:
        norms = (self.query, self.key)
        return self.qkv.work + total_work(product_work(norm.nbytes, norm.numel()) for norm in norms)

    def __call__(self, x: Tensor | Normed) -> Tensor:
        """Shapes: [T, H] -> [T, m + (n + 2 nkv) d]."""
        columns, heads = self.unnormed(x)
        heads.normed()
        return columns

    def unnormed(self, x: Tensor | Normed) -> tuple[Tensor, UnnormedHeads]:
        """The same before the norms, and the heads in it, which their attention may norm."""
        columns = self.qkv(x)
        norms = HeadNorms(self.query, self.key, self.eps)
        return columns, UnnormedHeads(columns[:, self.before :], norms, self.num_kv_heads)


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
