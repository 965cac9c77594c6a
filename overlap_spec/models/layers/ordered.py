"""Linears whose rows have the same bits in any company, on a GPU, for `--enable-deterministic-inference`.

They are chosen once, when a model is loaded. What multiplies is chosen by the weight and not by a flag.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from overlap_spec_kernels import (
    Norm,
    Normed,
    OrderedQuantizedWeight,
    OrderedWeight,
    QuantizedWeight,
    fused_linear,
    linear_add,
    linear_logits,
)
from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear, DenseLinear
from overlap_spec.models.layers.linear_forms import with_linears, with_nodes
from overlap_spec.models.quantization.linear import QuantizedLinear

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OrderedLinear(DenseLinear):
    """A linear in 16 bits that adds up K in one order, for any number of rows."""

    bias: Tensor | None = None  # [O]

    @property
    def operand(self) -> OrderedWeight:
        return OrderedWeight(self.stored)

    def rows(self, ids: Tensor | slice) -> AnyLinear:
        return OrderedLinear(self.stored[ids], None if self.bias is None else self.bias[ids])

    def __call__(self, x: Tensor | Normed) -> Tensor:
        return self._biased(fused_linear(x, self.operand))

    def gated(self, x: Normed) -> Tensor:
        return fused_linear(x, self.operand, gated=True) if self.bias is None else AnyLinear.gated(self, x)

    def add(self, x: Tensor, residual: Tensor, norm: Norm) -> Normed:
        if self.bias is None:
            return linear_add(x, self.operand, residual, norm)
        return AnyLinear.add(self, x, residual, norm)

    def logits(self, x: Tensor | Normed) -> Tensor:
        return self._biased(linear_logits(x, self.operand))

    def _biased(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y.add_(self.bias)


def in_one_order(node: T) -> T:
    """A model, all of whose linears in 16, 8 and 4 bits are ordered ones. Only weights in fragment order are copied."""

    def of_few_bits(linear: QuantizedLinear) -> QuantizedLinear:
        weight = linear.operand
        if not isinstance(weight, QuantizedWeight) or weight.device.type == "meta":
            return linear
        return replace(linear, operand=OrderedQuantizedWeight.of(weight))

    def ordered(linear: DenseLinear, name: str) -> AnyLinear:
        if linear.compute_dtype not in (torch.bfloat16, torch.float16):
            return linear
        return OrderedLinear(linear.stored, linear.bias)

    return with_nodes(with_linears(node, ordered), QuantizedLinear, of_few_bits)
