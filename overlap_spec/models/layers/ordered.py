"""Linears whose rows have the same bits in any company, on a GPU, for `--enable-deterministic-inference`.

They are chosen once, when a model is loaded. What multiplies is chosen by the weight and not by a flag.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from overlap_spec_kernels import OrderedQuantizedWeight, OrderedWeight, QuantizedWeight
from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear, DenseLinear, FusedLinear
from overlap_spec.models.layers.linear_forms import with_linears, with_nodes
from overlap_spec.models.quantization.linear import QuantizedLinear

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OrderedLinear(FusedLinear, DenseLinear):
    """A linear in 16 bits that adds up K in one order, for any number of rows."""

    bias: Tensor | None = None  # [O]

    @property
    def operand(self) -> OrderedWeight:
        return OrderedWeight(self.stored)

    def rows(self, ids: Tensor | slice) -> AnyLinear:
        return OrderedLinear(self.stored[ids], None if self.bias is None else self.bias[ids])


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
