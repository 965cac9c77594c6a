"""Quantised weights in the order in which tensor cores take them: each thread's operands lie side by side.

W is cut into tiles of 16 rows x 64 columns, a row of tiles after the other, so 16 rows of W are one run of memory. A
tile is four slices of 16 columns. A slice is the left operand of a product m16n8k16 (and of a warp of a warpgroup's
m64k16). Of it, lane 4 g + t of a warp has four pairs of neighbouring columns:

    a0  row g,     columns 2 t, 2 t + 1        a2  row g,     columns 2 t + 8, 2 t + 9
    a1  row g + 8, columns 2 t, 2 t + 1        a3  row g + 8, columns 2 t + 8, 2 t + 9

    4 bits   512 bytes: a lane's 16 bytes are four words, one for each slice. In a word, bits 4 i hold the low column of
             a_i and bits 16 + 4 i its high one: `(word >> 4 i) & 0x000f000f` is a pair.
    8 bits   two runs of 512 bytes, each of two slices: a lane's 16 bytes of a run are two words for each slice. In
             word j, bytes 1 and 3 hold a_2j and bytes 0 and 2 hold a_(2j + 1), low column first.

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
        tiles = _by_lane(values, 2).permute(0, 3, 4, 2, 7, 5, 6, 8, 1).flip(-1)
    else:
        upper, lower = _by_lane(values, 1).permute(1, 0, 3, 4, 2, 7, 5, 8, 6)
        tiles = upper | lower << 4
    return tiles.reshape(size_n, -1)


def values_of(data: Tensor, bits: int) -> Tensor:
    """The inverse of `fragments_of`. Shapes: [O, bytes of a row] u8 -> [O, I] u8."""
    size_n, size_k = data.shape[0], data.shape[1] * 8 // bits
    tiles, columns = size_n // TILE_ROWS, size_k // TILE_COLUMNS
    if bits == 8:
        lanes = data.view(tiles, columns, 2, 8, 4, 2, 2, 2, 2).flip(-1).permute(0, 8, 3, 1, 2, 5, 6, 4, 7)
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


def _by_lane(values: Tensor, runs: int) -> Tensor:
    """Shapes: [O, I] -> [tile, row / 8, g, tile of columns, run, slice, pair / 4, t, column of a pair]."""
    size_n, size_k = values.shape
    return values.view(size_n // TILE_ROWS, 2, 8, size_k // TILE_COLUMNS, runs, 4 // runs, 2, 4, 2)
