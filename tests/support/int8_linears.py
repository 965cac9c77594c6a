"""Linears of 8-bit integers with a scale for each row of the weight, made from loaded ones.

It shows what a format takes: an operand with its kernels (`Int8Weight`), a linear that owns it, and the conversion. It
is a toy: no flag selects it, and no speed is claimed for it. `test_smollm2_int8.py` serves a model with it.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from overlap_spec_kernels import Normed, fused_linear, linear_logits
from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear, DenseLinear
from overlap_spec.models.layers.linear_forms import with_linears
from support.int8_weight import Int8Weight

T = TypeVar("T")
LARGEST = 127  # symmetric: -128 is not used


@dataclass(frozen=True, slots=True)
class Int8Linear(AnyLinear):
    """`x @ (scales * values).T + bias`."""

    operand: Int8Weight  # [O, I]
    bias: Tensor | None = None  # [O]

    @property
    def out_features(self) -> int:
        return self.operand.shape[0]

    @property
    def in_features(self) -> int:
        return self.operand.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.operand.num_bytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def device(self) -> torch.device:
        return self.operand.values.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.operand.dtype

    def rows(self, ids: Tensor | slice) -> "Int8Linear":
        return Int8Linear(self.operand.rows(ids), None if self.bias is None else self.bias[ids])

    def __call__(self, x: Tensor | Normed) -> Tensor:
        y = fused_linear(x, self.operand)
        return y if self.bias is None else y + self.bias

    def logits(self, x: Tensor | Normed) -> Tensor:
        y = linear_logits(x, self.operand)
        return y if self.bias is None else y + self.bias


def quantize(linear: DenseLinear) -> Int8Linear:
    """Round each row of the weight to multiples of its largest magnitude / 127."""
    matrix = linear.matrix()
    wide = matrix if matrix.element_size() > 2 else matrix.float()
    largest = wide.abs().amax(1)
    scales = torch.where(largest > 0, largest / LARGEST, 1)
    values = (wide / scales[:, None]).round().to(torch.int8)
    return Int8Linear(Int8Weight(values, scales, linear.compute_dtype), linear.bias)


def with_int8_linears(weights: T) -> T:
    """A model with every dense linear quantized. Embeddings and norms stay, so a tied head has its own memory."""
    return with_linears(weights, lambda linear, name: quantize(linear))
