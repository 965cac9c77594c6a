"""A linear whose weight stays in 8 or 4 bits."""

from dataclasses import dataclass

import torch
from overlap_spec_kernels import Norm, Normed, QuantizedWeight, fused_linear, linear_add, linear_logits
from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear


@dataclass(frozen=True, slots=True)
class QuantizedLinear(AnyLinear):
    """8 or 4 bits: on Hopper they become bfloat16 in registers, elsewhere a matrix while loading.

    It computes `x @ W.T + bias`; without a bias its neighbours are fused with it.
    """

    operand: QuantizedWeight  # [O, I]
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
        return self.operand.data.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.operand.dtype

    def rows(self, ids: Tensor | slice) -> "QuantizedLinear":
        return QuantizedLinear(self.operand.rows(ids), None if self.bias is None else self.bias[ids])

    def __call__(self, x: Tensor | Normed) -> Tensor:
        return self.biased(fused_linear(x, self.operand))

    def biased(self, product: Tensor) -> Tensor:
        """The result, from the product with the weight. Shapes: [T, O]."""
        return product if self.bias is None else product + self.bias

    def gated(self, x: Normed) -> Tensor:
        return fused_linear(x, self.operand, gated=True) if self.bias is None else AnyLinear.gated(self, x)

    def add(self, x: Tensor, residual: Tensor, norm: Norm) -> Normed:
        if self.bias is None:
            return linear_add(x, self.operand, residual, norm)
        return AnyLinear.add(self, x, residual, norm)

    def logits(self, x: Tensor | Normed) -> Tensor:
        return self.biased(linear_logits(x, self.operand))
