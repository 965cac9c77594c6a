"""The layers that every family shares: linear maps and norms over flattened rows. Not here: attention, loading.

They hold loaded tensors and are called with [T, ...] rows; there is no module tree and no autograd.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from overlap_spec_kernels import add_rms_norm, rms_norm, silu_mul
from torch import Tensor

BLOCK_WIDTHS = range(512, 1025)


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight.T + bias`. Rows are independent: what else is in the batch changes a row by rounding only."""

    weight: Tensor  # [O, I]
    bias: Tensor | None = None  # [O]

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: [T, I] -> [T, O]."""
        if not _left_is_faster(x):
            return F.linear(x, self.weight, self.bias)
        y = (self.weight @ _at_least_two(x).t()).t()[: x.shape[0]].contiguous()
        return y if self.bias is None else y.add_(self.bias)


@dataclass(frozen=True, slots=True)
class WideLinear:
    """A linear map of wide rows for a CPU, cut into blocks of columns whose products are summed."""

    blocks: Tensor  # [n, O, I / n]
    bias: Tensor | None = None  # [O]

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: [T, I] -> [T, O]."""
        num_blocks, _, width = self.blocks.shape
        columns = _at_least_two(x).view(-1, num_blocks, width).permute(1, 2, 0)
        y = torch.bmm(self.blocks, columns).sum(0).t()[: x.shape[0]].contiguous()
        return y if self.bias is None else y.add_(self.bias)


LinearMap = Linear | WideLinear


def linear_map(weight: Tensor, bias: Tensor | None = None) -> LinearMap:
    """The form that is fastest where the weight is. Shapes: weight [O, I], bias [O]."""
    size, width = weight.shape
    block = next((block for block in reversed(BLOCK_WIDTHS) if width % block == 0), width)
    if block == width or not _left_is_faster(weight):
        return Linear(weight, bias)
    return WideLinear(weight.view(size, -1, block).transpose(0, 1).contiguous(), bias)


def _left_is_faster(x: Tensor) -> bool:
    """On a CPU BLAS computes `weight @ x.T` at memory speed for few rows, and `x @ weight.T` at less than half.

    Two cores of an AMD EPYC, float32, ms a call for SmolLM2's head (49152 x 576, 3.8 ms to read):

        rows               1     2     4     6     8    16    64
        F.linear         9.3  19.6  15.6  19.1  14.4  16.6  31.0
        weight @ x.T     9.3   4.3   4.0   6.9   7.4  12.9  25.7

    One row is a matrix-vector product, slow in either form, so it is computed twice. x must be contiguous: from a
    transposed x both forms are slow. Wide rows cost too much again (576 x 1536, 0.12 ms to read, at 2, 4 and 8 rows:
    0.21, 0.33, 0.70 ms) unless they are cut into blocks of columns (0.16, 0.18, 0.41 ms with two).
    """
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def _at_least_two(x: Tensor) -> Tensor:
    return (x.expand(2, -1) if x.shape[0] == 1 else x).contiguous()


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
