"""The layers that every family shares: linear maps and norms over flattened rows. Not here: attention, loading.

They hold loaded tensors and are called with [T, ...] rows; there is no module tree and no autograd.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from overlap_spec_kernels import add_rms_norm, rms_norm, silu_mul
from torch import Tensor

FEW_ROWS = 4  # fewer are padded to so many: they cost more than these


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight.T + bias`. Rows are independent: what else is in the batch changes a row by rounding only."""

    weight: Tensor  # [O, I]
    bias: Tensor | None = None  # [O]

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: [T, I] -> [T, O].

        On a CPU BLAS computes `weight @ x.T` at memory speed for few rows, and `x @ weight.T` at less than half; one
        row is a matrix-vector product, slow in either form, so it is computed twice.
        """
        if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
            return F.linear(x, self.weight, self.bias)
        columns = (x.expand(2, -1) if x.shape[0] == 1 else x).contiguous().t()
        y = (self.weight @ columns).t()[: x.shape[0]].contiguous()
        return y if self.bias is None else y.add_(self.bias)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear map in float32 for a CPU, its weight in the layout that oneDNN likes best. The plain one is not kept."""

    packed: Tensor  # [O, I], opaque
    bias: Tensor | None = None  # [O]

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: [T, I] -> [T, O]."""
        num_rows = x.shape[0]
        if num_rows < FEW_ROWS:
            x = F.pad(x, (0, 0, 0, FEW_ROWS - num_rows))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), self.packed, self.bias, "none", [], "")
        return y[:num_rows]


LinearMap = Linear | PackedLinear


def linear_map(weight: Tensor, bias: Tensor | None = None) -> LinearMap:
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
class RMSNorm:
    """Root-mean-square norm; `add` folds the residual addition before it into the same pass."""

    weight: Tensor  # [H]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: [T, H] -> [T, H]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the norm of x + residual, and x + residual."""
        return add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(silu(gate(x)) * up(x))`, gate and up as one map."""

    gate_up: LinearMap  # [2I, H], gate first
    down: LinearMap  # [H, I]

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: [T, H] -> [T, H]."""
        return self.down(silu_mul(self.gate_up(x)))
