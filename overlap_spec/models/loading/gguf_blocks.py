"""The block formats of ggml: integers of few bits, a scale for each group of them, and for some formats an offset.

    value = integer * scale + offset

A row of a tensor is a run of blocks. Blocks of 32 values are one group; blocks of 256 ("k-quants") have groups of 16 or
32, whose scales are themselves small integers times a 16-bit float. Integers, scales and products are exact in float32;
only adding the offset rounds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from overlap_spec.models.quantization.grouped import Groups

Parts = tuple[Tensor, Tensor, Tensor | None]  # [N, size] i8, [N, groups] f32, offsets like scales


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A block, and how to take it apart."""

    num_bytes: int
    size: int  # values
    num_bits: int
    least: int
    parts: Callable[[Tensor], Parts]  # [N, num_bytes] u8

    def groups(self, data: Tensor, num_rows: int) -> Groups:
        """Shapes: data [bytes] u8."""
        values, scales, offsets = self.parts(data.view(-1, self.num_bytes))
        values, scales = values.reshape(num_rows, -1), scales.reshape(num_rows, -1)
        offsets = None if offsets is None else offsets.reshape(num_rows, -1)
        return Groups(values, scales, offsets, self.num_bits, self.least)

    def outline(self, num_rows: int, num_columns: int) -> Groups:
        """The groups of a matrix without values, on the device `meta`."""
        _, scales, offsets = self.parts(torch.zeros(1, self.num_bytes, dtype=torch.uint8))
        values = torch.empty(num_rows, num_columns, dtype=torch.int8, device="meta")
        per_row = values.new_empty(num_rows, num_columns // (self.size // scales.shape[1]), dtype=torch.float32)
        return Groups(
            values, per_row, None if offsets is None else per_row.new_empty(per_row.shape), self.num_bits, self.least
        )


def _half(block: Tensor, first: int) -> Tensor:
    """The 16-bit float at a byte. Shapes: -> [N, 1] f32."""
    return block[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The low halves of all bytes, then the high ones. Shapes: [N, n] u8 -> [N, 2 n] u8."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _fifth_bits(block: Tensor, first: int) -> Tensor:
    """One bit for each of 32 values, as 16. Shapes: -> [N, 32] u8."""
    bits = block[:, first : first + 4, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits.flatten(1) & 1) << 4


def _q4_0(block: Tensor) -> Parts:
    return _nibbles(block[:, 2:]).char() - 8, _half(block, 0), None


def _q4_1(block: Tensor) -> Parts:
    return _nibbles(block[:, 4:]).char(), _half(block, 0), _half(block, 2)


def _q5_0(block: Tensor) -> Parts:
    return (_nibbles(block[:, 6:]) | _fifth_bits(block, 2)).char() - 16, _half(block, 0), None


def _q5_1(block: Tensor) -> Parts:
    return (_nibbles(block[:, 8:]) | _fifth_bits(block, 4)).char(), _half(block, 0), _half(block, 2)


def _q8_0(block: Tensor) -> Parts:
    return block[:, 2:].contiguous().view(torch.int8), _half(block, 0), None


def _q2_k(block: Tensor) -> Parts:
    small, scale, least = block[:, :16], _half(block, 80), _half(block, 82)
    return _pairs_of_bits(block[:, 16:80]).char(), scale * (small & 15), -(least * (small >> 4))


def _q3_k(block: Tensor) -> Parts:
    """The third bit has an array of its own, and 4 is subtracted where it is not set."""
    third = (block[:, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    values = (_pairs_of_bits(block[:, 32:96]) | third.flatten(1) << 2).char() - 4
    low, high = _nibbles(block[:, 96:104]), block[:, None, 104:108] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    small = (low | (high.flatten(1) & 3) << 4).char() - 32
    return values, _half(block, 108) * small, None


def _pairs_of_bits(packed: Tensor) -> Tensor:
    """Each 32 bytes hold 128 values: the low two bits of all bytes, then the next. Shapes: [N, 64] -> [N, 256] u8."""
    halves = packed.view(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return (halves & 3).flatten(1)


def _q4_k(block: Tensor) -> Parts:
    scales, offsets = _scales_of_k(block)
    return _nibbles_of_k(block[:, 16:]).char(), scales, offsets


def _q5_k(block: Tensor) -> Parts:
    scales, offsets = _scales_of_k(block)
    fifth = (block[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return (_nibbles_of_k(block[:, 48:]) | fifth.flatten(1) << 4).char(), scales, offsets


def _nibbles_of_k(packed: Tensor) -> Tensor:
    """Each 32 bytes hold two groups. Shapes: [N, 128] -> [N, 256] u8."""
    return _nibbles(packed.reshape(-1, 32)).view(len(packed), -1)


def _scales_of_k(block: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and offsets of 6 bits in 12 bytes: four of each whole, whose top bits belong to the other four."""
    first, second, rest = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=1)
    least = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=1)
    return _half(block, 0) * scales, -(_half(block, 2) * least)


def _q6_k(block: Tensor) -> Parts:
    low = block[:, :128].view(-1, 2, 1, 64) >> torch.tensor([0, 4], dtype=torch.uint8)[:, None] & 15
    high = block[:, 128:192].view(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    values = (low.flatten(1) | high.flatten(1) << 4).char() - 32
    return values, _half(block, 208) * block[:, 192:208].contiguous().view(torch.int8), None


_KIND = GGMLQuantizationType
FORMATS = {
    _KIND.Q4_0: BlockFormat(18, 32, 4, -8, _q4_0),
    _KIND.Q4_1: BlockFormat(20, 32, 4, 0, _q4_1),
    _KIND.Q5_0: BlockFormat(22, 32, 8, 0, _q5_0),
    _KIND.Q5_1: BlockFormat(24, 32, 8, 0, _q5_1),
    _KIND.Q8_0: BlockFormat(34, 32, 8, 0, _q8_0),
    _KIND.Q2_K: BlockFormat(84, 256, 4, 0, _q2_k),
    _KIND.Q3_K: BlockFormat(110, 256, 4, -4, _q3_k),
    _KIND.Q4_K: BlockFormat(144, 256, 4, 0, _q4_k),
    _KIND.Q5_K: BlockFormat(176, 256, 8, 0, _q5_k),
    _KIND.Q6_K: BlockFormat(210, 256, 8, 0, _q6_k),
}
