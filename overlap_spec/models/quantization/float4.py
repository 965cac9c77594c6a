"""Weights of 4-bit floats as checkpoints hold them (OCP MX 1.0's mxfp4, NVIDIA's nvfp4): one class for each format.

W[n, k] = value[n, k] * scale[group of k, n] * factor[n]

Values are e2m1, one in a byte. The kernels' `float4.py` multiplies by them on any GPU, in all types but float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from overlap_spec_kernels import Float4Matrices, Float4Weight, Scratch, dequantised_float4
from overlap_spec_kernels.launch import capability_of
from overlap_spec_kernels.linear.float4 import FLOATS, LARGEST_POWER, POWERS
from torch import Tensor

from overlap_spec.models.quantization.linear import StoredWeight


@dataclass(frozen=True, slots=True)
class StoredFloat4(StoredWeight):
    """`scales`: bytes [groups, O] u8, as stored."""

    factors: Tensor | None = None  # [O] f32; None: 1

    def matrix(self, dtype: torch.dtype) -> Tensor:
        wide = dtype if dtype.itemsize > 2 else torch.float32
        return dequantised_float4(self.values, self.scales.t(), self.factors, wide).to(dtype)

    def in_order(self, rows: Tensor) -> Self:
        if self.values.is_meta:
            return self
        factors = None if self.factors is None else self.factors[rows]
        return replace(self, values=self.values[rows], scales=self.scales[:, rows], factors=factors)

    @classmethod
    def joined(cls, parts: Sequence["StoredWeight"]) -> "StoredWeight":
        same = [part for part in parts if isinstance(part, cls)]
        factors = [part.factors for part in same if part.factors is not None]
        return replace(
            same[0],
            values=torch.cat([part.values for part in same]),
            scales=torch.cat([part.scales for part in same], dim=1),
            factors=torch.cat(factors) if factors else None,
        )

    def outlined(self, rows: int) -> Self:
        factors = None if self.factors is None else self.factors.new_empty(rows)
        values = self.values.new_empty((rows, self.shape[1]))
        return replace(self, values=values, scales=self.scales.new_empty((len(self.scales), rows)), factors=factors)

    def _has_kernel(self, device: torch.device, dtype: torch.dtype) -> bool:
        return capability_of(device) is not None and dtype != torch.float64

    def _has_stack(self, device: torch.device) -> bool:
        return self._has_kernel(device, torch.bfloat16)

    def stack(self, experts: Sequence[StoredWeight], dtype: torch.dtype, parts: int) -> Float4Matrices:
        return Float4Matrices.stacked(
            [each.in_parts(dtype, parts) for each in experts if isinstance(each, StoredFloat4)]
        )

    def operand(self, dtype: torch.dtype, scratch: Scratch | None = None) -> Float4Weight:
        """The weight in the layout of the kernels, which need no scratch."""
        return Float4Weight(self.in_parts(dtype))

    def in_parts(self, dtype: torch.dtype, parts: int = 1) -> Float4Matrices:
        """The same, as one of the matrices of experts, whose rows are in so many parts."""
        return Float4Matrices.packed(self.values, self.scales.t(), self.factors, parts, dtype)


@dataclass(frozen=True, slots=True)
class Mxfp4Weight(StoredFloat4):
    """Scales are powers of two, each with 127 added, of 32 columns."""

    @classmethod
    def unpacked(cls, pairs: Tensor, scales: Tensor) -> "Mxfp4Weight":
        """Shapes: pairs [O, I / 2] u8, the first of two columns in the lower bits, scales [O, I / 32] u8."""
        return cls(values_of(pairs), scales.t(), None, 4, POWERS)

    def _has_kernel(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Not where a scale is above 2: kernels would leave the range of floats."""
        runs = StoredFloat4._has_kernel(self, device, dtype)
        return runs and (self.scales.is_meta or int(self.scales.amax()) <= LARGEST_POWER)


@dataclass(frozen=True, slots=True)
class Nvfp4Weight(StoredFloat4):
    """Scales are float8 (e4m3), of 16 columns; a linear has one factor."""

    @classmethod
    def unpacked(cls, pairs: Tensor, scales: Tensor, factor: Tensor) -> "Nvfp4Weight":
        """Shapes: pairs [O, I / 2] u8, as mxfp4 has them, scales [O, I / 16] e4m3, factor [] f32."""
        return cls(values_of(pairs), scales.view(torch.uint8).t(), None, 4, FLOATS, 1, factor.expand(len(pairs)))


def values_of(pairs: Tensor) -> Tensor:
    """One value in a byte. Shapes: [O, I / 2] u8 -> [O, I] u8."""
    if pairs.is_meta:
        return pairs.new_empty((len(pairs), 2 * pairs.shape[1]))
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
