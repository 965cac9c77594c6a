"""What a run of quantised linears computes, from its definition."""

import torch
import torch.nn.functional as F
from overlap_spec_kernels import Norm, QuantizedRun, QuantizedWeight
from overlap_spec_kernels.linear.packing import dequantised
from torch import Tensor


def run_by_definition(run: QuantizedRun, x: Tensor, residual: Tensor) -> list[Tensor]:
    """The residual behind the layer, its norm and the next layer's qkv if the run reaches it, in float64."""
    middle = residual.double() + _product(x.double(), run.output)
    gate, up = _product(_normed(middle, run.norm), run.gate_up).chunk(2, dim=1)
    after = middle + _product(F.silu(gate) * up, run.down)
    normed = _normed(after, run.next_norm)
    if run.next_qkv is None or not run.reaches_qkv:
        return [after, normed]
    return [after, normed, _product(normed, run.next_qkv)]


def _product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    return x @ dequantised(weight.data, weight.packing, torch.float64).t()


def _normed(x: Tensor, norm: Norm) -> Tensor:
    return F.rms_norm(x, x.shape[1:], norm.weight.double(), norm.eps)
