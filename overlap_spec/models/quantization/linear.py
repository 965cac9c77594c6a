"""A linear's weight in 8 or 4 bits as a checkpoint holds it, in one form for all formats, and the linear that keeps it.

W[n, k] = scale[group of k, block of n] * (value[n, k] - zero[group of k, n])

Values are float8, or integers of 4 bits; `float4.py` has those of floats of 4 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from overlap_spec_kernels import (
    BIASED,
    ExpertWeight,
    Float4Weight,
    GroupedWeight,
    Norm,
    Normed,
    OrderedQuantizedWeight,
    Packing,
    QuantizedStack,
    QuantizedWeight,
    Scratch,
    packed,
    part_of,
    runs_gluon,
    takes_stack,
)
from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear, FusedLinear

LARGEST = 448.0  # float8 e4m3


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Values of 8 bits are float8 (e4m3); those of 4 bits are 0..15, one in a byte."""

    values: Tensor  # [O, I] u8
    scales: Tensor  # [groups, ceil(O / scale_rows)], as stored: float16, bfloat16 or float32
    zeros: Tensor | None  # [groups, O] u8; None: 0, or 8 of 4 bits
    bits: int
    group: int  # columns that share a scale; 0: whole rows
    scale_rows: int = 1  # rows that share a scale

    @classmethod
    def rounded(cls, weight: Tensor) -> "StoredWeight":
        """A weight in float8, each row as multiples of its largest magnitude / 448. Shapes: [O, I]."""
        wide = weight if weight.element_size() > 2 else weight.float()
        largest = wide.abs().amax(1, keepdim=True)
        scales = torch.where(largest > 0, largest / LARGEST, 1).float()
        values = (wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return cls(values.view(torch.uint8), scales.t().contiguous(), None, 8, 0)

    @property
    def shape(self) -> tuple[int, int]:
        """O and I."""
        return self.values.shape[0], self.values.shape[1]

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The weight itself, computed in float32 or wider. Shapes: -> [O, I]."""
        wide = dtype if dtype.itemsize > 2 else torch.float32
        return (self._unscaled(wide) * self._by_column(self._row_scales().to(wide))).to(dtype)

    def in_order(self, rows: Tensor) -> Self:
        """The same rows in another order. Shapes: rows [O] i64."""
        if self.values.is_meta:
            return self
        zeros = None if self.zeros is None else self.zeros[:, rows]
        scales = self._row_scales()[:, rows].contiguous()
        return replace(self, values=self.values[rows], scales=scales, zeros=zeros, scale_rows=1)

    @classmethod
    def joined(cls, parts: Sequence["StoredWeight"]) -> "StoredWeight":
        """Weights below one another. Rows that share a scale are told apart where blocks do not fit."""
        if not all(part.shape[0] % part.scale_rows == 0 for part in parts):
            parts = [replace(part, scales=part._row_scales(), scale_rows=1) for part in parts]
        wide = torch.promote_types(parts[0].scales.dtype, parts[-1].scales.dtype)
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return replace(
            parts[0],
            values=torch.cat([part.values for part in parts]),
            scales=torch.cat([part.scales.to(wide) for part in parts], dim=1),
            zeros=torch.cat(zeros, dim=1) if zeros else None,
        )

    def outlined(self, rows: int) -> Self:
        """One like this with so many rows, without values: torch.cat would load a compiler for `meta`."""
        return replace(
            self,
            values=self.values.new_empty((rows, self.shape[1])),
            scales=self.scales.new_empty((len(self.scales), -(-rows // self.scale_rows))),
            zeros=None if self.zeros is None else self.zeros.new_empty((len(self.zeros), rows)),
        )

    def runs_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a kernel multiplies by it as it is."""
        return self._has_kernel(device, dtype)

    def _has_stack(self, device: torch.device) -> bool:
        return takes_stack(self.bits, self.group, self.shape[1], device)

    def _has_kernel(self, device: torch.device, dtype: torch.dtype) -> bool:
        """For bfloat16 on Hopper, columns in whole runs."""
        part = part_of(self.bits, self.group, self.shape[1])
        return dtype == torch.bfloat16 and part is not None and self.shape[0] % 32 == 0 and runs_gluon(device)

    def stacks_on(self, device: torch.device) -> bool:
        """Whether the kernel of experts multiplies by it as it is."""
        return self._has_stack(device)

    def operand(self, dtype: torch.dtype, scratch: Scratch | None = None) -> QuantizedWeight | Float4Weight:
        """The weight in the layout of its device's kernels. `scratch`: see `QuantizedWeight`."""
        if self.values.is_meta:
            return self._without_values(dtype, scratch)
        return QuantizedWeight(*self.in_rows(), dtype, scratch).in_order_of_device()

    def stack(self, experts: Sequence["StoredWeight"], dtype: torch.dtype, parts: int) -> ExpertWeight:
        """The weights of all experts, which are like this one, for rows in `dtype`. `parts`: of the rows of each."""
        if self.values.is_meta:
            return self._stack_without_values(len(experts))
        return QuantizedStack.of([each.in_rows() for each in experts])

    def in_rows(self) -> tuple[Tensor, Packing]:
        """The weight in row order. Shapes: -> [O, bytes of a row] u8."""
        scales, zeros, group = self.scales, self.zeros, self.group
        if self.bits == 4 and group == 0:  # the kernels know groups of 4 bits only
            group = 128 if self.shape[1] % 128 == 0 else 64
            count = self.shape[1] // group
            scales = scales.repeat(count, 1)
            zeros = None if zeros is None else zeros.repeat(count, 1)
        part = part_of(self.bits, group, self.shape[1])
        assert part is not None
        data = self.values if self.bits == 8 else packed(self.values, part)
        biased = None if zeros is None else (zeros.to(torch.int16) + BIASED).to(torch.bfloat16).contiguous()
        return data.contiguous(), Packing(scales.contiguous(), biased, self.bits, part, group, self.scale_rows)

    def _without_values(self, dtype: torch.dtype, scratch: Scratch | None) -> QuantizedWeight:
        """`operand` by hand: to move values of `meta`, torch would load a compiler, which takes seconds."""
        rows, columns = self.shape
        part = part_of(self.bits, self.group, columns)
        assert part is not None
        data = self.values.new_empty((rows, columns * self.bits // 8))
        zeros = None if self.zeros is None else self.zeros.new_empty(self.zeros.shape, dtype=torch.bfloat16)
        packing = Packing(self.scales, zeros, self.bits, part, self.group, self.scale_rows)
        return QuantizedWeight(data, packing, dtype, scratch).in_order_of_device()

    def _stack_without_values(self, num_experts: int) -> QuantizedStack:
        """As large as so many experts are."""
        (rows, columns), part = self.shape, part_of(self.bits, self.group, self.shape[1])
        assert part is not None
        group = part if self.bits == 4 and not self.group else self.group
        sizes = num_experts, columns // group if group else 1
        scales = self.values.new_empty((*sizes, -(-rows // self.scale_rows)), dtype=torch.float32)
        zeros = None if self.zeros is None else self.values.new_empty((*sizes, rows), dtype=torch.float32)
        packing = Packing(scales, zeros, self.bits, part, group, self.scale_rows)
        return QuantizedStack(self.values.new_empty((num_experts, rows, columns * self.bits // 8)), packing)

    def _unscaled(self, dtype: torch.dtype) -> Tensor:
        """Shapes: -> [O, I]."""
        values = self.values.view(torch.float8_e4m3fn) if self.bits == 8 else self.values
        matrix = values.to(dtype)
        if self.bits == 4:
            matrix -= 8 if self.zeros is None else self._by_column(self.zeros.to(dtype))
        return matrix

    def _row_scales(self) -> Tensor:
        """Shapes: -> [groups, O]."""
        if self.scale_rows == 1:
            return self.scales
        return self.scales.repeat_interleave(self.scale_rows, dim=1)[:, : self.shape[0]]

    def _by_column(self, grouped: Tensor) -> Tensor:
        """Shapes: [groups, O] -> [O, I], or [O, 1] of whole rows."""
        return grouped.t().repeat_interleave(self.group, dim=1)[:, : self.shape[1]] if self.group else grouped.t()


def stacked(parts: Sequence[StoredWeight]) -> StoredWeight:
    """Weights with the same input as one, all in one format."""
    return parts[0] if len(parts) == 1 else type(parts[0]).joined(parts)


@dataclass
class LinearForms:
    """Of one model. `kept`, `dequantised`: linears that stay as they are stored, or become matrices of `dtype`."""

    dtype: torch.dtype
    device: torch.device
    kept: int = 0
    dequantised: int = 0
    always_keeps: bool = False  # also where only the reference multiplies: tests
    _scratch: list[Scratch] = field(default_factory=list)

    def keeps(self, stored: StoredWeight) -> bool:
        """Whether a linear stays as it is stored: where a kernel multiplies by it."""
        keeps = self.always_keeps or stored.runs_on(self.device, self.dtype)
        self.kept, self.dequantised = self.kept + keeps, self.dequantised + (not keeps)
        return keeps

    def keeps_stack(self, experts: Sequence[StoredWeight]) -> bool:
        """The same of the experts of a layer."""
        keeps = all(stored.stacks_on(self.device) for stored in experts)
        self.kept, self.dequantised = self.kept + keeps, self.dequantised + (not keeps)
        return keeps

    def scratch_for(self, shape: tuple[int, int]) -> Scratch | None:
        """The buffer that all linears of the model share, with room for one of this shape; None on a CPU."""
        if self.device.type == "cpu":
            return None
        if not self._scratch:
            self._scratch.append(Scratch(torch.empty(0, dtype=self.dtype, device=self.device)))
        self._scratch[0].reserve(shape[0] * shape[1])
        return self._scratch[0]


@dataclass(frozen=True, slots=True)
class OperandLinear(FusedLinear):
    """A `FusedLinear` that owns its operand."""

    operand: QuantizedWeight | Float4Weight | GroupedWeight | OrderedQuantizedWeight  # [O, I]
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

    def rows(self, ids: Tensor | slice) -> Self:
        return replace(self, operand=self.operand.rows(ids), bias=None if self.bias is None else self.bias[ids])


@dataclass(frozen=True, slots=True)
class QuantizedLinear(OperandLinear):
    """8 or 4 bits, which become 16 bits in registers where a kernel does that, elsewhere a matrix while loading."""

    operand: QuantizedWeight | Float4Weight | OrderedQuantizedWeight

    @property
    def device(self) -> torch.device:
        return self.operand.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.operand.dtype

    def add_mlp(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Norm,
        gate_up: AnyLinear,
        down: AnyLinear,
        next_norm: Norm,
        take: bool = False,
    ) -> Normed:
        own, first, last = map(_ordered, (self, gate_up, down))
        if own is not None and first is not None and last is not None:
            added = own.add_mlp(x, residual, norm, first, last, next_norm)
            if added is not None:
                return added
        return FusedLinear.add_mlp(self, x, residual, norm, gate_up, down, next_norm, take)


def _ordered(linear: AnyLinear) -> OrderedQuantizedWeight | None:
    """The operand of a linear that is nothing else."""
    if not isinstance(linear, QuantizedLinear) or linear.bias is not None:
        return None
    return linear.operand if isinstance(linear.operand, OrderedQuantizedWeight) else None
