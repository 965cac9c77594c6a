"""How a quantised weight is stored for the kernels: bytes, scales and zero points, and the plain operations on them.

    W[n, k] = scale[group of k, block of n] * (value[n, k] - zero[group of k, n])

A value of 8 bits is a float8 (e4m3) without a zero point. Two values of 4 bits are a byte. They lie in one of two
orders, which decides what kernels multiply by the weight:

    rows        of 4 bits, in each run of `part` columns, byte j holds column j (low bits) and column part / 2 + j (high
                bits), so that no bits move between columns when a run is unpacked
    fragments   tiles of 16 rows x 64 columns, see fragments.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel
from overlap_spec_kernels.linear.fragments import TILE_ROWS, fits_tiles, fragments_of, tiled, untiled, values_of

ZERO = 8  # of a symmetric 4-bit weight, whose values are 0..15
BIASED = 128  # is added to stored zero points: bfloat16 holds 128..143 exactly, and 128 + v is cheap to make of v
_E4M3 = torch.float8_e4m3fn


class Order(Enum):
    """In which a weight lies in memory."""

    ROWS = "rows"
    FRAGMENTS = "fragments"


@dataclass(frozen=True, slots=True)
class Packing:
    """A weight's scales, zero points and layout: all but its bytes.

    In fragment order, what belongs to groups lies by tiles of 16 rows: zero points and scales [O / 16, groups, 8, 2],
    scales of blocks [O / 16, groups, 4], four times the same, because the copy engine brings no less than 16 bytes.
    """

    scales: Tensor  # [groups, ceil(O / scale_rows)], any float type
    zeros: Tensor | None  # [groups, O] bf16: 128 + zero point; None: 0, or 8 of 4 bits
    bits: int
    part: int  # columns of a run
    group: int  # columns that share a scale; 0: a row has one
    scale_rows: int = 1  # rows that share a scale
    order: Order = Order.ROWS

    @property
    def scales_per_part(self) -> int:
        """Groups in a run of columns; 0: a row has one scale."""
        return self.part // self.group if self.group else 0

    def rows(self, ids: Tensor | slice, num_rows: int) -> Packing:
        """That of some of `num_rows` rows. Blocks of rows become single rows."""
        assert self.order is Order.ROWS
        scales = self.row_scales(num_rows)[:, ids].contiguous()
        zeros = None if self.zeros is None else self.zeros[:, ids].contiguous()
        return replace(self, scales=scales, zeros=zeros, scale_rows=1)

    def row_scales(self, num_rows: int) -> Tensor:
        """A scale for each group and row. Shapes: -> [groups, O]."""
        if self.order is Order.FRAGMENTS and self.group:
            blocks = self.scales.dim() == 3
            return self.scales[:, :, 0].t().repeat_interleave(TILE_ROWS, dim=1) if blocks else untiled(self.scales)
        if self.scale_rows == 1:
            return self.scales
        return self.scales.repeat_interleave(self.scale_rows, dim=1)[:, :num_rows]

    def row_zeros(self) -> Tensor | None:
        """128 + zero point of each group and row. Shapes: -> [groups, O]."""
        return self.zeros if self.zeros is None or self.order is Order.ROWS else untiled(self.zeros)


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


def fits_fragments(shape: tuple[int, int], packing: Packing) -> bool:
    """Whether a weight of this shape can lie in fragment order: whole tiles, each with its own scales."""
    whole = packing.group == 0 or shape[1] % packing.group == 0
    return fits_tiles(*shape) and whole and (packing.scale_rows == 1 or packing.scale_rows % TILE_ROWS == 0)


def in_fragments(data: Tensor, packing: Packing) -> tuple[Tensor, Packing]:
    """A weight in fragment order, which it must fit. Shapes: data [O, bytes of a row] u8."""
    assert packing.order is Order.ROWS
    if data.is_meta:
        return data, _without_values(packing, data.shape[0] // TILE_ROWS)
    values = data if packing.bits == 8 else unpacked(data, packing.part)
    scales = packing.scales
    if packing.group:
        scales = tiled(packing.row_scales(data.shape[0]))
        scales = scales if packing.scale_rows == 1 else scales[:, :, 0].repeat(1, 1, 2)
    zeros = None if packing.zeros is None else tiled(packing.zeros)
    return fragments_of(values, packing.bits), replace(packing, scales=scales, zeros=zeros, order=Order.FRAGMENTS)


def _without_values(packing: Packing, tiles: int) -> Packing:
    """`in_fragments` by hand: to move values of `meta`, torch would load a compiler, which takes seconds."""
    scales, zeros = packing.scales, packing.zeros
    if packing.group:
        scales = scales.new_empty((tiles, len(scales), *((8, 2) if packing.scale_rows == 1 else (4,))))
    if zeros is not None:
        zeros = zeros.new_empty((tiles, len(zeros), 8, 2))
    return replace(packing, scales=scales, zeros=zeros, order=Order.FRAGMENTS)


def in_rows(data: Tensor, packing: Packing) -> tuple[Tensor, Packing]:
    """The inverse of `in_fragments`; blocks of rows become single rows."""
    assert packing.order is Order.FRAGMENTS
    values = values_of(data, packing.bits)
    scales = packing.row_scales(data.shape[0])
    rows = replace(packing, scales=scales, zeros=packing.row_zeros(), scale_rows=1, order=Order.ROWS)
    return values if packing.bits == 8 else packed(values, packing.part), rows


def stored_values(data: Tensor, packing: Packing) -> Tensor:
    """Each value in a byte of its own, as it is stored. Shapes: data [O, bytes of a row] u8 -> [O, I] u8."""
    if packing.order is Order.FRAGMENTS:
        return values_of(data, packing.bits)
    return data if packing.bits == 8 else unpacked(data, packing.part)


def dequantised(data: Tensor, packing: Packing, dtype: torch.dtype, scaled: bool = True) -> Tensor:
    """The weight, each value one product in `dtype`, or not `scaled`. Shapes: data [O, bytes of a row] u8 -> [O, I]."""
    stored, biased = stored_values(data, packing), packing.row_zeros()
    values = stored.view(_E4M3).to(dtype) if packing.bits == 8 else stored.to(dtype)
    if biased is not None:
        values -= (biased - BIASED).to(dtype).t().repeat_interleave(packing.group, dim=1)
    elif packing.bits == 4:
        values -= ZERO
    if not scaled:
        return values
    scales = packing.row_scales(data.shape[0]).to(dtype).t()
    matrix: Tensor = values * (scales.repeat_interleave(packing.group, dim=1) if packing.group else scales)
    return matrix


@TritonKernel
def widened(
    w: tl.tensor, half: tl.constexpr, zeros: tl.tensor, TYPE: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr
) -> tl.tensor:
    """Values less their zero points, of 4 bits those of the low or high half. Shapes: w [N, K] u8, zeros [N]."""
    if BITS == 8:
        values = of_8_bits(w, TYPE)
    else:
        values = of_4_bits(w, half, TYPE)
        if ZEROS:
            values -= tl.load(zeros)[:, None].to(TYPE)
        else:
            values -= 136
    return values


@TritonKernel
def of_8_bits(w: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Values of float8 e4m3. In bfloat16 two at a time, whose exponents are 120 too small at first; NaN becomes 480."""
    if tl.bfloat16 == TYPE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, f, z;
            mov.b32 f, 0x7b807b80;
            mov.b32 z, 0x80008000;
            prmt.b32 a, $1, 0, 0x1804;
            shr.s32 a, a, 4;
            and.b32 a, a, 0x87f087f0;
            fma.rn.bf16x2 $0, a, f, z;
            }""",
            "=r,r",
            [w],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return w.to(tl.float8e4nv, bitcast=True).to(TYPE)


@TritonKernel
def of_4_bits(w: tl.tensor, half: tl.constexpr, TYPE: tl.constexpr) -> tl.tensor:
    """128 + the low or high 4 bits, as zero points have it. In bfloat16 two at a time: 0x4300 + v is 128 + v."""
    if tl.bfloat16 == TYPE and half == 0:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, e;
            mov.b32 e, 0x43004300;
            prmt.b32 a, $1, 0, 0x4140;
            lop3.b32 $0, a, 0x000f000f, e, 0xea;
            }""",
            "=r,r",
            [w],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    if tl.bfloat16 == TYPE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, e;
            mov.b32 e, 0x43004300;
            prmt.b32 a, $1, 0, 0x4140;
            shr.b32 a, a, 4;
            lop3.b32 $0, a, 0x000f000f, e, 0xea;
            }""",
            "=r,r",
            [w],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return ((w >> (4 * half)) & 15).to(TYPE) + 128
