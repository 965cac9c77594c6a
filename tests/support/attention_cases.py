"""Shapes that attention must take, chosen so that each costs a compilation of its own and no two are alike.

Head dims 64, 96 and 128, query heads per KV head 1 to 8, pages of 16 and 64, float32 and bfloat16; the pairs that
models have, and around them one each of what is rare. And what a 16-bit decode kernel is compared with.
"""

from typing import NamedTuple

import torch
from kernel_cases.inputs import DecodeInputs, HeadShape, decode_inputs
from overlap_spec_kernels.attention.kv_format import NO_SCALES, KVScales
from overlap_spec_kernels.attention.paged_attention import paged_attention_reference
from overlap_spec_kernels.attention.rope_kv_write import rope_kv_write_reference
from overlap_spec_kernels.attention.tree_attention import tree_attention_reference
from torch import Tensor

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
CLOSE = {
    FLOAT: {"rtol": 1e-5, "atol": 2e-6},
    BFLOAT: {"rtol": 2**-7, "atol": 4e-3},
    HALF: {"rtol": 2**-10, "atol": 1e-3},
}
SMOL, LLAMA = HeadShape(9, 3, 64), HeadShape(32, 8, 128)
# Every number of query heads per KV head, with every head dim at both ends.
GROUPS = [
    HeadShape(8, 8, 64),
    HeadShape(4, 4, 96),
    HeadShape(2, 2, 128),
    HeadShape(4, 2, 96),
    SMOL,
    LLAMA,
    HeadShape(5, 1, 96),
    HeadShape(6, 1, 128),
    HeadShape(14, 2, 64),
    HeadShape(8, 1, 64),
    HeadShape(8, 1, 96),
    HeadShape(16, 2, 128),
]


class Case(NamedTuple):
    """Heads, rows of each request, page size, dtype."""

    heads: HeadShape
    width: int
    page_size: int
    dtype: torch.dtype


def every_group() -> list[Case]:
    """Windows of 4, page sizes in turn, the other way round in the other dtype."""
    return [
        Case(heads, 4, (16, 64)[(index + turn) % 2], dtype)
        for turn, dtype in enumerate((FLOAT, BFLOAT))
        for index, heads in enumerate(GROUPS)
    ]


def other_widths() -> list[Case]:
    """One row, and windows that fill a tile, or more than one."""
    few = [Case(heads, 1, 16, dtype) for heads in (SMOL, LLAMA) for dtype in (FLOAT, BFLOAT)]
    smol = [Case(SMOL, width, 16, BFLOAT) for width in (2, 5, 8, 16)]
    return [
        *few,
        *smol,
        Case(SMOL, 16, 64, FLOAT),
        Case(LLAMA, 11, 64, BFLOAT),
        Case(HeadShape(8, 1, 96), 16, 16, FLOAT),
    ]


def rare() -> list[Case]:
    """Pages of one token, odd head dims, float16."""
    return [
        Case(HeadShape(2, 2, 8), 4, 1, FLOAT),
        Case(HeadShape(5, 1, 80), 3, 1, BFLOAT),
        Case(SMOL, 4, 16, HALF),
        Case(HeadShape(8, 1, 96), 1, 64, HALF),
    ]


def name(value: object) -> str | None:
    """A case as a test's name."""
    if not isinstance(value, Case):
        return None
    heads = value.heads
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{heads.num_heads}x{heads.num_kv_heads}x{heads.head_dim}-{value.width}rows-{value.page_size}page-{dtype}"


# A dtype, heads and a page size for contexts to 128k; then the requests' cached tokens.
LONG = [
    Case(HeadShape(4, 1, 64), 4, 16, FLOAT),
    Case(HeadShape(4, 1, 64), 4, 64, BFLOAT),
    Case(HeadShape(2, 1, 96), 4, 16, BFLOAT),
    Case(HeadShape(8, 2, 128), 4, 64, FLOAT),
    Case(HeadShape(8, 2, 128), 4, 16, BFLOAT),
]
LONG_LENGTHS = [[131068], [32765, 3], [130]]  # the last: a short request in a page table for 128k


def decode_reference(
    inputs: DecodeInputs, scales: KVScales = NO_SCALES, window: int | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Decode attention to q and k rounded in the dtype, in float32; and the caches after the write."""
    (num_requests, _), (_, page_size, num_kv_heads, head_dim) = inputs.page_table.shape, inputs.k_cache.shape
    k_cache, v_cache = inputs.k_cache.clone(), inputs.v_cache.clone()
    heads = inputs.qkv.unflatten(1, (-1, head_dim))
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    places = inputs.positions.view(num_requests, -1)
    cache_rows = (inputs.page_table.gather(1, places // page_size) * page_size + places % page_size).flatten()
    q = rope_kv_write_reference(q, k, v, inputs.cos_sin, inputs.positions, cache_rows.long(), k_cache, v_cache, scales)
    row_starts = torch.arange(num_requests + 1, dtype=torch.int32) * places.shape[1]
    wide = (tensor.float() for tensor in (q, k_cache, v_cache))  # values of 8 bits too, which are not rounded again
    rows = (inputs.page_table, row_starts, inputs.positions)
    out = paged_attention_reference(*wide, *rows, inputs.scale, window, scales, sinks)
    return out.flatten(1), k_cache, v_cache


class TreeWindow(NamedTuple):
    """One step's arguments: the new rows are columns of trees behind `prefix`, at the positions of their depths."""

    inputs: DecodeInputs
    prefix: Tensor
    mask: Tensor


def tree_window(heads: HeadShape, width: int, prefixes: list[int], page_size: int, spare_pages: int = 2) -> TreeWindow:
    """Trees that are drawn: each column's parent is one before it."""
    inputs = decode_inputs(heads, width, prefixes, page_size, BFLOAT, spare_pages)
    mask = torch.ones(len(prefixes), width, 1, dtype=torch.int64)
    for column in range(1, width):
        parents = torch.randint(0, column, (len(prefixes),))
        mask[:, column, 0] = mask[torch.arange(len(prefixes)), parents, 0] | 1 << column
    depths = (mask >> torch.arange(width) & 1).sum(2) - 1
    prefix = torch.tensor(prefixes)
    return TreeWindow(inputs._replace(positions=(prefix[:, None] + depths).flatten()), prefix, mask)


def tree_window_reference(window: TreeWindow) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to q and k rounded in the dtype, in float32; and the caches after the write."""
    inputs, width = window.inputs, window.mask.shape[1]
    (_, page_size, num_kv_heads, head_dim), table = inputs.k_cache.shape, inputs.page_table
    k_cache, v_cache = inputs.k_cache.clone(), inputs.v_cache.clone()
    heads = inputs.qkv.unflatten(1, (-1, head_dim))
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    places = window.prefix[:, None] + torch.arange(width)
    rows = table.gather(1, places // page_size).long() * page_size + places % page_size
    q = rope_kv_write_reference(q, k, v, inputs.cos_sin, inputs.positions, rows.flatten(), k_cache, v_cache)
    wide = (tensor.float() for tensor in (q, k_cache, v_cache))
    out = tree_attention_reference(*wide, table, window.prefix, rows, window.mask, inputs.positions, inputs.scale)
    return out.flatten(1), k_cache, v_cache
