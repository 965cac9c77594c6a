"""How a quantised weight is stored for the kernels: bytes, scales and zero points, and the plain operations on them.

    W[n, k] = scale[group of k, block of n] * (value[n, k] - zero[group of k, n])

A value of 8 bits is a float8 (e4m3) without a zero point. Two values of 4 bits are a byte: in each run of `part`
columns, byte j holds column j (low bits) and column part / 2 + j (high bits), so that no bits move between columns when
a run is unpacked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

ZERO = 8  # of a symmetric 4-bit weight, whose values are 0..15
BIASED = 128  # is added to stored zero points: bfloat16 holds 128..143 exactly, and 128 + v is cheap to make of v
_E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Packing:
    """A weight's scales, zero points and layout: all but its bytes."""

    scales: Tensor  # [groups, ceil(O / scale_rows)], any float type
    zeros: Tensor | None  # [groups, O] bf16: 128 + zero point; None: 0, or 8 of 4 bits
    bits: int
    part: int  # columns of a run
    group: int  # columns that share a scale; 0: a row has one
    scale_rows: int = 1  # rows that share a scale

    @property
    def scales_per_part(self) -> int:
        """Groups in a run of columns; 0: a row has one scale."""
        return self.part // self.group if self.group else 0

    def rows(self, ids: Tensor | slice, num_rows: int) -> Packing:
        """That of some of `num_rows` rows. Blocks of rows become single rows."""
        scales = self.row_scales(num_rows)[:, ids].contiguous()
        zeros = None if self.zeros is None else self.zeros[:, ids].contiguous()
        return replace(self, scales=scales, zeros=zeros, scale_rows=1)

    def row_scales(self, num_rows: int) -> Tensor:
        """A scale for each group and row. Shapes: -> [groups, O]."""
        if self.scale_rows == 1:
            return self.scales
        return self.scales.repeat_interleave(self.scale_rows, dim=1)[:, :num_rows]


def part_of(bits: int, group: int, num_columns: int) -> int | None:
    """Columns of a run, which the kernels take at a time; None: they cannot divide these columns."""
    wanted = {32: 64, 64: 128, 128: 128, 0: 128}[group] if bits == 4 else 128
    if num_columns % wanted == 0:
        return wanted
    return 64 if bits == 8 and group == 0 and num_columns % 64 == 0 else None


def packed(values: Tensor, part: int) -> Tensor:
    """Two values of 4 bits in a byte. Shapes: [O, I] u8, 0..15 -> [O, I / 2] u8."""
    halves = values.unflatten(1, (-1, 2, part // 2))
    data: Tensor = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    return data


def unpacked(data: Tensor, part: int) -> Tensor:
    """The inverse of `packed`. Shapes: [O, I / 2] u8 -> [O, I] u8."""
    runs = data.unflatten(1, (-1, part // 2))
    return torch.stack((runs & 15, runs >> 4), dim=2).flatten(1)


def dequantised(data: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    """The weight, each value one product in `dtype`. Shapes: data [O, bytes of a row] u8 -> [O, I]."""
    if packing.bits == 8:
        values = data.view(_E4M3).to(dtype)
    elif packing.zeros is None:
        values = unpacked(data, packing.part).to(dtype) - ZERO
    else:
        zeros = (packing.zeros - BIASED).to(dtype).t()
        values = unpacked(data, packing.part).to(dtype) - zeros.repeat_interleave(packing.group, dim=1)
    scales = packing.row_scales(data.shape[0]).to(dtype).t()
    matrix: Tensor = values * (scales.repeat_interleave(packing.group, dim=1) if packing.group else scales)
    return matrix
