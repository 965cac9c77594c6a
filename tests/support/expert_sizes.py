"""Layers of experts for the kernels of few rows: their sizes, random weights, a routing, and exact products."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from emulators.cuda import guarded
from overlap_spec_kernels import QuantizedStack, Routing
from torch import Tensor

from support.quantized_cases import Case, weight_of


class Sizes(NamedTuple):
    """Of a layer whose experts are chosen by some rows."""

    rows: int
    top_k: int
    hidden: int
    inner: int
    scale_rows: int = 128
    experts: int = 6
    bits: int = 8


def stack_of(sizes: Sizes, rows: int, columns: int) -> QuantizedStack:
    case = Case(0, rows, columns, sizes.bits, 128, sizes.scale_rows)
    weights = [weight_of(case, torch.float32) for _ in range(sizes.experts)]
    stack = QuantizedStack.of([(weight.data, weight.packing) for weight in weights])
    stack.data.copy_(guarded(stack.data))
    return stack


def routing_of(sizes: Sizes) -> Routing:
    """The last expert is one that all rows have, and some have others together."""
    others = torch.stack([torch.randperm(sizes.experts - 1) for _ in range(sizes.rows)])[:, : sizes.top_k - 1]
    experts = F.pad(others, (0, 1), value=sizes.experts - 1).contiguous()
    return Routing(experts, torch.rand(experts.shape))


def of_places(x: Tensor, weight: QuantizedStack, experts: Tensor) -> Tensor:
    """Shapes: x [T * k, I] -> [T * k, O], float64."""
    matrices = (weight.matrix(int(expert), torch.float64) for expert in experts.flatten())
    return torch.stack([matrix @ row for matrix, row in zip(matrices, x.double(), strict=True)])
