"""The layers that every family shares: linear maps and norms over flattened rows.

A map knows what surrounds it in a layer, because on a GPU that is one kernel: `gated` is the first half of an MLP,
`add` adds to the residual stream and hands it to the next norm.

They hold loaded tensors and are called with [T, ...] rows; there is no module tree and no autograd.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from overlap_spec_kernels import (
    Norm,
    Normed,
    add_rms_norm,
    fused_linear,
    linear_add,
    linear_argmax,
    linear_logits,
    normalised,
    rms_norm,
    silu_mul,
)
from torch import Tensor

FEW_ROWS = 4  # fewer are padded to so many: they cost more than these


class RMSNorm(Norm):
    """Root-mean-square norm."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: [T, H] -> [T, H]."""
        return rms_norm(x, self.weight, self.eps)

    def enter(self, stream: Tensor) -> Normed:
        """A stream that no map has handed over. Shapes: [T, H]."""
        return Normed(stream, self(stream))


class TwoDimensional(ABC):
    """What every map can do, one operation after another."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, x: Tensor | Normed) -> Tensor:
        """Shapes: [T, I] -> [T, O]."""

    def gated(self, x: Normed) -> Tensor:
        """silu(first half) * second half. Shapes: [T, I] -> [T, O / 2]."""
        return silu_mul(self(x))

    def add(self, x: Tensor, residual: Tensor, norm: Norm) -> Normed:
        """The sum with the residual stream, on its way into `norm`. Shapes: x [T, I], residual [T, O]."""
        rows, stream = add_rms_norm(self(x), residual, norm.weight, norm.eps)
        return Normed(stream, rows)


@dataclass(frozen=True, slots=True)
class Linear(TwoDimensional):
    """`x @ weight.T + bias`. Rows are independent: what else is in the batch changes a row by rounding only."""

    weight: Tensor  # [O, I]
    bias: Tensor | None = None  # [O]

    @property
    def fused(self) -> bool:
        """True if a kernel takes what surrounds the map into it."""
        return self.weight.is_cuda and self.bias is None

    def __call__(self, x: Tensor | Normed) -> Tensor:
        """Shapes: [T, I] -> [T, O]."""
        return fused_linear(x, self.weight) if self.fused else self._alone(normalised(x))

    def gated(self, x: Normed) -> Tensor:
        """See `TwoDimensional`."""
        return fused_linear(x, self.weight, gated=True) if self.fused else TwoDimensional.gated(self, x)

    def add(self, x: Tensor, residual: Tensor, norm: Norm) -> Normed:
        """See `TwoDimensional`."""
        return linear_add(x, self.weight, residual, norm) if self.fused else TwoDimensional.add(self, x, residual, norm)

    def _alone(self, x: Tensor) -> Tensor:
        """On a CPU BLAS most often computes `weight @ x.T` at memory speed for few rows, `x @ weight.T` at half."""
        if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
            return F.linear(x, self.weight, self.bias)
        return linear_columns(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class PackedLinear(TwoDimensional):
    """A linear map in float32 for a CPU, its weight in the layout that oneDNN likes best. The plain one is not kept."""

    packed: Tensor  # [O, I], opaque
    bias: Tensor | None = None  # [O]

    def __call__(self, x: Tensor | Normed) -> Tensor:
        """Shapes: [T, I] -> [T, O]."""
        return linear_packed(normalised(x), self.packed, self.bias, FEW_ROWS)


def linear_columns(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`weight @ x.T`; one row is a matrix-vector product, slow in either form, so it is computed twice."""
    columns = (x.expand(2, -1) if x.shape[0] == 1 else x).contiguous().t()
    y = (weight @ columns).t()[: x.shape[0]].contiguous()
    return y if bias is None else y.add_(bias)


def linear_packed(x: Tensor, packed: Tensor, bias: Tensor | None, least_rows: int = 1) -> Tensor:
    """By a weight in oneDNN's layout, with fewer rows than `least_rows` padded to so many."""
    num_rows = x.shape[0]
    if num_rows < least_rows:
        x = F.pad(x, (0, 0, 0, least_rows - num_rows))
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, bias, "none", [], "")
    return y if y.shape[0] == num_rows else y[:num_rows]


AnyLinear = Linear | PackedLinear


def linear_map(weight: Tensor, bias: Tensor | None = None) -> AnyLinear:
    """The form that is fastest where the weight is. Shapes: weight [O, I], bias [O].

    Two cores of an AMD EPYC, float32, the four maps of SmolLM2's 30 layers (425 MB), ms a pass; a busy host, so only
    the ratios count (benchmarks/cpu_linear.py, results/linear_cpu.json):

        rows               1     2     4     6    16    64
        weight @ x.T    33.1  39.5  33.7  64.2  58.7   135
        packed          31.6  30.5  26.9  29.7  30.6    80
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight, FEW_ROWS), bias)
    return Linear(weight, bias)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(silu(gate(x)) * up(x))`, gate and up as one map."""

    gate_up: AnyLinear  # [2I, H], gate first
    down: AnyLinear  # [H, I]

    def add(self, x: Normed, norm: Norm) -> Normed:
        """Adds its result to the stream that it reads, on its way into `norm`. Shapes: [T, H]."""
        return self.down.add(self.gate_up.gated(x), x.values, norm)


@dataclass(frozen=True, slots=True)
class HeadLogits:
    """`LazyLogits` of a head: who wants the largest logit alone needs none of the others."""

    head: Linear  # [V, H]
    rows: Tensor | Normed  # [R, H]

    def compute(self) -> Tensor:
        """Shapes: -> [R, V], float32 or wider."""
        if self.head.fused:
            return linear_logits(self.rows, self.head.weight)
        logits = self.head(self.rows)
        return logits.float() if logits.element_size() == 2 else logits

    def argmax(self, ids: Tensor | None = None) -> Tensor:
        """The column of each row's largest logit, looked up in `ids` if given. Shapes: ids [V] i64 -> [R] i64."""
        if self.head.fused:
            return linear_argmax(self.rows, self.head.weight, ids)
        columns = self.compute().argmax(-1)
        return columns if ids is None else ids[columns]
