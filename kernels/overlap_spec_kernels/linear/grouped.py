"""A weight of 4- or 8-bit integers with a scale for each group of a row, for a CPU, and its kernel in C++.

    W[o, i] = scale[o, g] * values[o, i] + offset[o, g]        g = i / group

This is what a .gguf file stores, kept as it is: no value is rounded again. x is a float32, or where the processor is
faster with integers, one of 24 bits with a scale for each group (`cpu/fixed_point.h`): either way a group's sum is as
exact as float32 is. A row's result does not depend on the other rows of x, to the bit. A weight in bfloat16 is kept in
16 bits; one in float32 may be multiplied here too, for that promise.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.attention.rows_on_cpu import RowAttention
from overlap_spec_kernels.compiled_cpu import compiled_library
from overlap_spec_kernels.launch import require
from overlap_spec_kernels.limits import NO_TOKEN
from overlap_spec_kernels.linear.operand import LinearOperand
from overlap_spec_kernels.norm.normed import Norm, Normed, normalised
from overlap_spec_kernels.norm.silu_mul import silu_mul

PANEL = 64  # rows of W that the kernel takes at a time, in four vectors
SOURCE = Path(__file__).parent.parent / "cpu" / "decoder_layer.cpp"


class _Part(ctypes.Structure):
    """`Part` of the C++ source."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("panels", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("least", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("half", ctypes.c_int32),
    )


class MatrixArgument(ctypes.Structure):
    """`Matrix` of the C++ source; it keeps its parts."""

    _fields_ = (("parts", ctypes.POINTER(_Part)), ("num_parts", ctypes.c_int64), ("columns", ctypes.c_int64))


class NormArgument(ctypes.Structure):
    """`Norm` of the C++ source."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))


class GroupedKernel:
    """The compiled kernel, and that of attention, which is in the same library."""

    def __init__(self, cache: Path) -> None:
        """Compile it, unless `cache` has it. Raises: NoLibraryError."""
        self.compiled = compiled_library(SOURCE, cache)
        self.reads_half = bool(self.compiled.reads_half())
        self.attention = RowAttention(self.compiled)
        pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        of_rows = (pointer, pointer, size, size, pointer, size)
        self._linear, self._sum = self.compiled.grouped_linear, self.compiled.grouped_sum
        self._argmax = self.compiled.grouped_argmax
        self._linear.argtypes = [*of_rows, number, number]
        self._sum.argtypes = [*of_rows, number, pointer, size, pointer, pointer]
        self._argmax.argtypes = [pointer, pointer, size, size, pointer, size, number]
        self._linear.restype = self._sum.restype = self._argmax.restype = None

    def product(self, weight: GroupedWeight, x: Tensor, gated: bool) -> Tensor:
        """Shapes: x [T, I] f32 -> [T, O], or [T, O / 2] if gated."""
        out = x.new_empty((x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0]))
        self._linear(*_arguments(weight, x, out), gated, torch.get_num_threads())
        return out

    def sum(self, weight: GroupedWeight, x: Tensor, residual: Tensor, norm: Norm) -> Normed:
        """`residual + x W^T`, and its norm. Shapes: x [T, I] f32, residual [T, O]."""
        out, normed = x.new_empty((2, *residual.shape)).unbind(0)
        added = (residual.data_ptr(), residual.stride(0))
        of_norm = NormArgument(norm.weight.data_ptr(), norm.eps)
        arguments = _arguments(weight, x, out)
        self._sum(*arguments, torch.get_num_threads(), *added, ctypes.byref(of_norm), normed.data_ptr())
        return Normed(out, normed)

    def argmax(self, weight: GroupedWeight, x: Tensor) -> Tensor:
        """The column of each row's largest result; `NO_TOKEN` where that is not finite. Shapes: x [T, I] -> [T] i64."""
        columns = torch.empty(x.shape[0], dtype=torch.int64)
        self._argmax(*_inputs(weight, x), columns.data_ptr(), NO_TOKEN, torch.get_num_threads())
        return columns


def _arguments(weight: GroupedWeight, x: Tensor, out: Tensor) -> tuple[Any, ...]:
    """The first arguments of a linear."""
    return *_inputs(weight, x), out.data_ptr(), out.shape[1]


def _inputs(weight: GroupedWeight, x: Tensor) -> tuple[Any, ...]:
    return ctypes.byref(weight.matrix), x.data_ptr(), x.shape[0], x.stride(0)


@dataclass(frozen=True, slots=True)
class GroupedPart:
    """Rows of W in one format, in the kernel's layout: 64 of them side by side."""

    values: Tensor  # i32 of 4 bytes [panels, I / 4, 64], of 8 nibbles [panels, I / 8, 64]; bf16 or f32 [panels, I, 64]
    scales: Tensor | None  # [panels, I / group, 64] f16 or f32; None: bfloat16 or float32
    offsets: Tensor | None  # like scales
    num_rows: int
    bits: int
    least: int  # what 0 of 4 bits means
    group: int

    @classmethod
    def packed(
        cls, values: Tensor, scales: Tensor | None, offsets: Tensor | None, bits: int, least: int, halves: bool
    ) -> GroupedPart:
        """`halves`: keep scales in 16 bits if they are exact. Shapes: values [O, I], scales [O, I / group] f32."""
        num_rows, size_k = values.shape
        both = [part for part in (scales, offsets) if part is not None]
        narrow = halves and all(torch.equal(part.half().float(), part) for part in both)
        scales, offsets = (
            None if part is None else _in_panels(part.half() if narrow else part.float()) for part in (scales, offsets)
        )
        laid_out = _in_panels(values - least if bits == 4 else values)
        group = size_k if scales is None else size_k // scales.shape[1]
        if bits < 16:
            laid_out = _packed(laid_out, bits)
        return cls(laid_out, scales, offsets, num_rows, bits, least, group)

    @classmethod
    def outlined(
        cls, num_rows: int, size_k: int, bits: int, group: int, scales: Tensor, offsets: Tensor | None
    ) -> GroupedPart:
        """One without values, on the device `meta`, with scales in 16 bits. Shapes: scales, offsets [O, I / group]."""
        panels = -(-num_rows // PANEL)
        values = scales.new_empty(panels, size_k * bits // 32, PANEL, dtype=torch.int32)
        per_group = scales.new_empty(panels, size_k // group, PANEL, dtype=torch.float16)
        return cls(
            values,
            per_group,
            None if offsets is None else per_group.new_empty(per_group.shape),
            num_rows,
            bits,
            0,
            group,
        )

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.values, self.scales, self.offsets) if tensor is not None]

    def unpacked(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Values, scales and offsets by row. Shapes: [O, I] i8 or bf16, [O, I / group] f32."""
        values = _unpacked(self.values, self.bits) if self.bits < 16 else self.values
        values = values + self.least if self.bits == 4 else values
        parts = (values, self.scales, self.offsets)
        rows = [None if part is None else part.transpose(1, 2).flatten(0, 1)[: self.num_rows] for part in parts]
        scales, offsets = (None if part is None else part.float() for part in rows[1:])
        assert rows[0] is not None
        return rows[0], scales, offsets

    def dequantised(self) -> Tensor:
        """Shapes: -> [O, I] f32."""
        values, scales, offsets = self.unpacked()
        if scales is None:
            return values.float()
        whole = values.float().view(*scales.shape, -1) * scales[:, :, None]
        return (whole if offsets is None else whole + offsets[:, :, None]).flatten(1)

    def rows(self, ids: Tensor | slice) -> GroupedPart:
        """Some rows of W, packed again."""
        values, scales, offsets = (None if part is None else part[ids] for part in self.unpacked())
        assert values is not None
        halves = self.scales is not None and self.scales.dtype == torch.float16
        return GroupedPart.packed(values, scales, offsets, self.bits, self.least, halves)

    def described(self) -> _Part:
        pointers = (0 if part is None else part.data_ptr() for part in (self.values, self.scales, self.offsets))
        half = self.scales is not None and self.scales.dtype == torch.float16
        return _Part(*pointers, len(self.values), self.num_rows, self.bits, self.least, self.group, half)


@dataclass(frozen=True, slots=True)
class GroupedWeight(LinearOperand):
    """W [O, I]: parts below one another, each in a format of its own. Without a kernel its reference runs."""

    parts: tuple[GroupedPart, ...]
    size_k: int
    kernel: GroupedKernel | None
    matrix: MatrixArgument = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = [part.described() for part in self.parts]
        object.__setattr__(self, "matrix", MatrixArgument((_Part * len(parts))(*parts), len(parts), self.size_k))

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.num_rows for part in self.parts), self.size_k

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for part in self.parts for tensor in part.tensors)

    @property
    def halves(self) -> bool:
        """Whether the kernel can take it for two matrices, of a gate and what it multiplies."""
        return len(self.parts) == 1 and self.shape[0] % (2 * PANEL) == 0

    def rows(self, ids: Tensor | slice) -> GroupedWeight:
        """Some rows of W, which is a single part: a copy."""
        assert len(self.parts) == 1, "a stacked weight is used as a whole"
        return GroupedWeight((self.parts[0].rows(ids),), self.size_k, self.kernel)

    def check(self, x: Tensor) -> None:
        require(self.size_k == x.shape[1], "weight", "[O, I]")
        require(x.dtype == torch.float32 and not x.is_cuda, "x", "float32 on a CPU")

    def product(self, x: Tensor | Normed) -> Tensor:
        rows = normalised(x)
        return grouped_linear_reference(rows, self) if self.kernel is None else self.kernel.product(self, rows, False)

    def logits(self, x: Tensor | Normed) -> Tensor:
        return self.product(x)

    def gated(self, x: Tensor | Normed) -> Tensor:
        if self.kernel is None or not self.halves:
            return silu_mul(self.product(x))
        return self.kernel.product(self, normalised(x), True)

    def argmax(self, x: Tensor | Normed, ids: Tensor | None) -> Tensor:
        if self.kernel is None or len(self.parts) > 1:
            return LinearOperand.argmax(self, x, ids)
        columns = self.kernel.argmax(self, normalised(x))
        return columns if ids is None else ids[columns.clamp(min=0)]

    def add(self, x: Tensor, residual: Tensor, norm: Norm, take: bool = False) -> Normed:
        if self.kernel is None:
            return LinearOperand.add(self, x, residual, norm)
        return self.kernel.sum(self, x, residual, norm)


def grouped_linear_reference(x: Tensor, weight: GroupedWeight) -> Tensor:
    return torch.cat([F.linear(x, part.dequantised()) for part in weight.parts], dim=1)


def _in_panels(rows: Tensor) -> Tensor:
    """Shapes: [O, n] -> [panels, n, 64], O filled up with zeros to a multiple of 64."""
    padded = F.pad(rows, (0, 0, 0, -len(rows) % PANEL))
    return padded.view(-1, PANEL, rows.shape[1]).transpose(1, 2).contiguous()


def _packed(values: Tensor, bits: int) -> Tensor:
    """Bytes of four columns, or of eight: the second four are the high nibbles. Shapes: [panels, I, 64] -> i32."""
    columns = values.unflatten(1, (-1, 32 // bits)).int()
    packed: Tensor = torch.zeros_like(columns[:, :, 0])
    for place, shift in enumerate(_shifts(bits)):
        packed |= (columns[:, :, place] & ((1 << bits) - 1)) << shift
    return packed


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """The reverse; bytes have a sign. Shapes: -> [panels, I, 64] i8."""
    columns = packed[:, :, None] >> torch.tensor(_shifts(bits), dtype=torch.int32)[:, None]
    return (columns & ((1 << bits) - 1)).flatten(1, 2).to(torch.int8)


def _shifts(bits: int) -> list[int]:
    return [8 * place + high for high in range(0, 8, bits) for place in range(4)]
