"""A matrix of every expert of a layer as one tensor: of the type of x, or in 8 or 4 bits (`linear/float4.py`: floats).

In few bits it lies in the order of rows (`linear/packing.py`), with the number of the expert before all other indices.
Scales and zero points are float32: loads of fewer than 4 bytes cannot be in flight while tensor cores multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from overlap_spec_kernels.launch import capability_of
from overlap_spec_kernels.linear.float4 import Float4Matrices
from overlap_spec_kernels.linear.packing import BIASED, ZERO, Order, Packing, dequantised, part_of

_FLOAT8_SINCE = (8, 9)  # the first GPUs that convert float8


@dataclass(frozen=True, slots=True)
class QuantizedStack:
    """W [E, O, I] in 8 or 4 bits."""

    data: Tensor  # [E, O, bytes of a row] u8
    packing: Packing  # scales [E, groups, ceil(O / scale_rows)] f32, zeros [E, groups, O] f32

    @classmethod
    def of(cls, experts: Sequence[tuple[Tensor, Packing]]) -> QuantizedStack:
        """All experts, each as `Packing` describes it in row order; all alike but for zero points, which may be none.

        Tensors without values (`meta`) are not stacked, as torch would load a compiler for them.
        """
        data, first = experts[0]
        scales, zeros = _stacked([packing.scales for _, packing in experts]), None
        if any(packing.zeros is not None for _, packing in experts):
            shape = len(first.scales), len(data)
            middle = torch.full(shape, BIASED + ZERO, dtype=torch.float32, device=data.device)
            zeros = _stacked([middle if packing.zeros is None else packing.zeros for _, packing in experts])
        return cls(_stacked([each for each, _ in experts], data.dtype), replace(first, scales=scales, zeros=zeros))

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, O and I."""
        return self.data.shape[0], self.data.shape[1], self.data.shape[2] * 8 // self.packing.bits

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        zeros = self.packing.zeros
        return self.data.nbytes + self.packing.scales.nbytes + (0 if zeros is None else zeros.nbytes)

    def matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        """One expert's weight, computed in float32 or wider. Shapes: -> [O, I]."""
        zeros = self.packing.zeros
        packing = replace(
            self.packing, scales=self.packing.scales[expert], zeros=None if zeros is None else zeros[expert]
        )
        wide = dtype if dtype.itemsize > 2 else torch.float32
        return dequantised(self.data[expert], packing, wide).to(dtype)


ExpertWeight = Tensor | QuantizedStack | Float4Matrices


def matrix_of(weight: ExpertWeight, expert: int, dtype: torch.dtype) -> Tensor:
    """The weight of one expert. Shapes: -> [O, I]."""
    return weight[expert].to(dtype) if isinstance(weight, Tensor) else weight.matrix(expert, dtype)


def takes_stack(bits: int, group: int, num_columns: int, device: torch.device) -> bool:
    """Whether the kernel of experts multiplies by such weights on a GPU; a group of 0 is a whole row."""
    capability, part = capability_of(device), part_of(bits, group, num_columns)
    if capability is None or part is None:
        return False
    return bits == 4 or (capability >= _FLOAT8_SINCE and group % part == 0)


def fits_stack(weight: QuantizedStack) -> bool:
    """Whether the tensors are as the kernel reads them."""
    packing, (num_experts, rows, columns) = weight.packing, weight.shape
    groups = columns // packing.group if packing.group else 1
    scales = num_experts, groups, -(-rows // packing.scale_rows)
    zeros = packing.zeros
    return (
        packing.order is Order.ROWS
        and (packing.scales.shape, packing.scales.dtype) == (scales, torch.float32)
        and (zeros is None or (zeros.shape, zeros.dtype) == ((num_experts, groups, rows), torch.float32))
        and all(each.is_contiguous() for each in (weight.data, packing.scales) + (() if zeros is None else (zeros,)))
    )


def _stacked(tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    first = tensors[0]
    if first.is_meta:
        return first.new_empty((len(tensors), *first.shape), dtype=dtype)
    return torch.stack([each.to(dtype) for each in tensors])
