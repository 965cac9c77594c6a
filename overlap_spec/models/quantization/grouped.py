"""Linears that keep the integers of a .gguf file, and 16-bit weights in 16 bits, on a CPU.

At batch 1 a step of a small model is about as long as reading its weights takes, so fewer bytes are fewer milliseconds.
The weights' values are those of the file exactly; products are sums in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from overlap_spec_kernels import GroupedKernel, GroupedPart, GroupedWeight, Normed, linear_argmax
from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear, DenseLinear
from overlap_spec.models.layers.linear_forms import with_linears
from overlap_spec.models.quantization.linear import OperandLinear

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Groups:
    """A matrix as integers with a scale, and perhaps an offset, for each group of a row."""

    values: Tensor  # [O, I] i8
    scales: Tensor  # [O, I / group] f32
    offsets: Tensor | None  # [O, I / group] f32
    num_bits: int  # 4: integers from `least` to `least` + 15; 8: from -128 to 127
    least: int = 0

    @property
    def group(self) -> int:
        """Values that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def like(self, other: "Groups") -> bool:
        """Whether both are in one format."""
        mine = (self.num_bits, self.least, self.group, self.offsets is None)
        return mine == (other.num_bits, other.least, other.group, other.offsets is None)

    def above(self, other: "Groups") -> "Groups":
        """Both below one another, as they are `like`."""
        offsets = None
        if self.offsets is not None and other.offsets is not None:
            offsets = torch.cat((self.offsets, other.offsets))
        values, scales = torch.cat((self.values, other.values)), torch.cat((self.scales, other.scales))
        return Groups(values, scales, offsets, self.num_bits, self.least)

    def rows(self, order: Tensor) -> "Groups":
        """The rows in another order. Shapes: order [O] i64."""
        offsets = None if self.offsets is None else self.offsets[order]
        return Groups(self.values[order], self.scales[order], offsets, self.num_bits, self.least)

    def dequantised(self) -> Tensor:
        """Shapes: -> [O, I] f32."""
        grouped = self.values.view(*self.scales.shape, self.group)
        scaled = grouped * self.scales[:, :, None]
        whole = scaled if self.offsets is None else scaled.add_(self.offsets[:, :, None])
        return whole.view(self.values.shape)


@dataclass(frozen=True, slots=True)
class GroupedLinear(OperandLinear):
    """It reads and writes float32."""

    operand: GroupedWeight

    @property
    def device(self) -> torch.device:
        return self.operand.parts[0].values.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float32

    def argmax(self, x: Tensor | Normed, ids: Tensor | None = None) -> Tensor:
        return linear_argmax(x, self.operand, ids) if self.bias is None else AnyLinear.argmax(self, x, ids)


@dataclass(frozen=True, slots=True)
class KeptIntegers:
    """How linears get the integers of a file, instead of floats."""

    read: Callable[[str], Groups | None]  # a tensor by the name of its source; None if it is stored in floats
    kernel: GroupedKernel | None  # None: nothing is computed, tensors have no values


def grouped_linear(stacked: list[Groups], bias: Tensor | None, kernel: GroupedKernel | None) -> GroupedLinear:
    """A linear of matrices with the same input. Neighbours in one format become one part."""
    size_k = stacked[0].values.shape[1]
    if kernel is None:
        outlines = (
            GroupedPart.outlined(len(each.values), size_k, each.num_bits, each.group, each.scales, each.offsets)
            for each in stacked
        )
        return GroupedLinear(GroupedWeight(tuple(outlines), size_k, None), bias)
    merged: list[Groups] = []
    for groups in stacked:
        if merged and merged[-1].like(groups):
            merged[-1] = merged[-1].above(groups)
        else:
            merged.append(groups)
    parts = tuple(
        GroupedPart.packed(part.values, part.scales, part.offsets, part.num_bits, part.least, kernel.reads_half)
        for part in merged
    )
    return GroupedLinear(GroupedWeight(parts, size_k, kernel), bias)


def in_16_bits(node: T, kernel: GroupedKernel) -> T:
    """A model, with every dense float32 linear whose weights are bfloat16 numbers kept as such; others stay."""

    def narrowed(linear: DenseLinear, name: str) -> AnyLinear:
        return _of_floats(linear, kernel, 16) if _is_narrow(linear) else linear

    return with_linears(node, narrowed)


def by_kernel(node: T, kernel: GroupedKernel) -> T:
    """A model whose dense float32 linears all multiply with the kernel, in 16 bits where those are exact.

    A row's result then has the same bits in any company, which torch's BLAS does not promise.
    """

    def moved(linear: DenseLinear, name: str) -> AnyLinear:
        if linear.compute_dtype != torch.float32:
            return linear
        return _of_floats(linear, kernel, 16 if _is_narrow(linear) else 32)

    return with_linears(node, moved)


def _is_narrow(linear: DenseLinear) -> bool:
    """Whether its weights are bfloat16 numbers in float32."""
    if linear.compute_dtype != torch.float32:
        return False
    matrix = linear.matrix()
    return torch.equal(matrix.bfloat16().float(), matrix)


def _of_floats(linear: DenseLinear, kernel: GroupedKernel, num_bits: int) -> GroupedLinear:
    matrix = linear.matrix()
    values = matrix.bfloat16() if num_bits == 16 else matrix
    part = GroupedPart.packed(values, None, None, num_bits, 0, False)
    return GroupedLinear(GroupedWeight((part,), linear.in_features, kernel), linear.bias)
