"""Quantised weights in the order in which tensor cores take them: each thread's operands lie side by side.

W is cut into tiles of 16 rows x 64 columns, a row of tiles after the other, so 16 rows of W are one run of memory. A
tile is four slices of 16 columns. A slice is the left operand of a product m16n8k16 (and of a warp of a warpgroup's
m64k16). Of it, lane 4 g + t of a warp has four pairs of neighbouring columns:

    a0  row g,     columns 2 t, 2 t + 1        a2  row g,     columns 2 t + 8, 2 t + 9
    a1  row g + 8, columns 2 t, 2 t + 1        a3  row g + 8, columns 2 t + 8, 2 t + 9

    4 bits   512 bytes: a lane's 16 bytes are four words, one for each slice. In a word, bits 4 i hold the low column of
             a_i and bits 16 + 4 i its high one: `(word >> 4 i) & 0x000f000f` is a pair.
    8 bits   two runs of 512 bytes, each of two slices: a lane's 16 bytes of a run are two words for each slice. Word j
             holds a_2j and a_(2j + 1), the low column in its low half. Of a half, a_2j has the bits of a bfloat16:

                 bit       15   14 13 12     11   10 9 8 7   6 5 4   3      2 1 0
                 a_2j      sign                   exponent   mantissa
                 a_2j+1         exponent     sign                    exp.   mantissa

             so `word & 0x87f087f0` is a pair, and the other one needs two shifts. (Its exponent's low bit is bit 3.)

What belongs to a group of columns, a scale or a zero point, lies as [tile of rows, group, 8, 2]: rows g and g + 8 side
by side, since a lane needs both.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS = 16
TILE_COLUMNS = 64


def fits_tiles(size_n: int, size_k: int) -> bool:
    """Whether tiles cover a weight [O, I] exactly."""
    return size_n % TILE_ROWS == 0 and size_k % TILE_COLUMNS == 0


def fragments_of(values: Tensor, bits: int) -> Tensor:
    """Put values, one in a byte, into fragment order.

    Shapes: [O, I] u8 -> [O, bytes of a row] u8, where 16 rows together are a row of tiles.
    """
    size_n = values.shape[0]
    if bits == 8:
        pairs = _by_lane(values, 2).permute(1, 0, 3, 4, 2, 7, 5, 6, 8)
        tiles = _interleaved(*pairs.to(torch.int16)).contiguous().view(torch.uint8)
    else:
        upper, lower = _by_lane(values, 1).permute(1, 0, 3, 4, 2, 7, 5, 8, 6)
        tiles = upper | lower << 4
    return tiles.reshape(size_n, -1)


def values_of(data: Tensor, bits: int) -> Tensor:
    """The inverse of `fragments_of`. Shapes: [O, bytes of a row] u8 -> [O, I] u8."""
    size_n, size_k = data.shape[0], data.shape[1] * 8 // bits
    tiles, columns = size_n // TILE_ROWS, size_k // TILE_COLUMNS
    if bits == 8:
        halves = data.view(torch.int16).view(tiles, columns, 2, 8, 4, 2, 2, 2)
        lanes = torch.stack(_apart(halves)).to(torch.uint8).permute(1, 0, 4, 2, 3, 6, 7, 5, 8)
    else:
        pairs = data.view(tiles, columns, 1, 8, 4, 4, 2, 2)
        lanes = torch.stack((pairs & 15, pairs >> 4)).permute(1, 0, 4, 2, 3, 6, 8, 5, 7)
    return lanes.reshape(size_n, size_k)


def tiled(grouped: Tensor) -> Tensor:
    """What belongs to groups of columns, for each tile. Shapes: [groups, O] -> [O / 16, groups, 8, 2]."""
    return grouped.reshape(len(grouped), -1, 2, 8).permute(1, 0, 3, 2).contiguous()


def untiled(grouped: Tensor) -> Tensor:
    """The inverse of `tiled`. Shapes: [O / 16, groups, 8, 2] -> [groups, O]."""
    return grouped.permute(1, 0, 3, 2).reshape(grouped.shape[1], -1)


def _interleaved(first: Tensor, second: Tensor) -> Tensor:
    """Two values of 8 bits in the bits of a half of a word. Shapes: i16 of any shape, twice -> i16."""
    upper = (first & 0x80) << 8 | (first & 0x7F) << 4
    return upper | (second & 0x80) << 4 | (second & 0x70) << 8 | second & 0x0F


def _apart(halves: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `_interleaved`."""
    first = halves >> 8 & 0x80 | halves >> 4 & 0x7F
    second = halves >> 4 & 0x80 | halves >> 8 & 0x70 | halves & 0x0F
    return first, second


def _by_lane(values: Tensor, runs: int) -> Tensor:
    """Shapes: [O, I] -> [tile, row / 8, g, tile of columns, run, slice, pair / 4, t, column of a pair]."""
    size_n, size_k = values.shape
    return values.view(size_n // TILE_ROWS, 2, 8, size_k // TILE_COLUMNS, runs, 4 // runs, 2, 4, 2)
