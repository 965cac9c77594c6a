"""Where the end of each request's own tokens occurred before in them: every place, by the length of the match.

tokens   a b c d . . b c d . . x c d       the last token is at position `length`
match          3         3       ^         at places 3 and 8, three tokens agree when read backwards
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton
from overlap_spec_kernels.limits import MAX_MATCH
from overlap_spec_kernels.ngram.ngram_log import NgramLimits

OWN_MATCHES = 16  # only the best ones are used
MATCH_SHIFT, OWN_BIT = 48, 1 << 47  # a key's fields: the length of the match; set if it is in the request's own tokens
_LEAST_BLOCK, _MOST_BLOCKS = 1024, 64


def ngram_match(pool: Tensor, page_table: Tensor, page_size: int, lengths: Tensor, limits: NgramLimits) -> Tensor:
    """The best 16 matches of each request, as keys: length of the match, 1 (own), position of its end.

    A longer match is better, then a later one. A match has at least `min_match` tokens, of which at most `max_match`
    count; it ends before the last token. Shapes: pool [R] i32 (`store_tokens`), page_table [B, P] i32, lengths [B]
    i64: position of the last token -> [B, n] i64, -1: none, in no order, the best 16 among them.
    Raises: ValueError naming the argument. Sync: never.
    """
    require(pool.dim() == 1 and pool.dtype == torch.int32 and pool.is_contiguous(), "pool", "[R] int32")
    require(page_table.dim() == 2 and page_table.dtype == torch.int32, "page_table", "[B, P] int32")
    require(page_table.stride(1) == 1, "page_table", "contiguous rows")
    require(lengths.shape == page_table.shape[:1] and lengths.dtype == torch.int64, "lengths", "[B] int64")
    require(lengths.is_contiguous(), "lengths", "contiguous")
    require(
        1 <= limits.min_match <= limits.max_match <= MAX_MATCH, "limits", f"1 <= min_match <= max_match <= {MAX_MATCH}"
    )
    run = _ngram_match_triton if runs_triton(pool) else ngram_match_reference
    return run(pool, page_table, page_size, lengths, limits)


def ngram_match_reference(
    pool: Tensor, page_table: Tensor, page_size: int, lengths: Tensor, limits: NgramLimits
) -> Tensor:
    rows = page_table.long()[:, :, None] * page_size + torch.arange(page_size, device=pool.device)
    tokens = pool[rows.flatten(1)]
    places = torch.arange(tokens.shape[1], device=pool.device)
    alive = places < lengths[:, None]
    matched = torch.zeros_like(tokens)
    for back in range(limits.max_match):
        last = tokens.gather(1, (lengths[:, None] - back).clamp(min=0))
        alive = alive & (F.pad(tokens, (back, 0))[:, : len(places)] == last) & (places >= back)
        matched += alive
    keys = (matched.long() << MATCH_SHIFT | OWN_BIT | places).masked_fill(matched < limits.min_match, -1)
    return keys.topk(min(OWN_MATCHES, len(places)), dim=1).values


def _ngram_match_triton(
    pool: Tensor, page_table: Tensor, page_size: int, lengths: Tensor, limits: NgramLimits
) -> Tensor:
    num_rows, num_pages = page_table.shape
    num_places = num_pages * page_size
    block = max(_LEAST_BLOCK, next_power_of_2(ceil_div(num_places, _MOST_BLOCKS)))
    num_blocks = ceil_div(num_places, block)
    keys = lengths.new_empty(num_rows, num_blocks, OWN_MATCHES)
    _ngram_match_kernel[(num_rows, num_blocks)](
        pool,
        page_table,
        lengths,
        keys,
        page_table.stride(0),
        num_blocks,
        limits.min_match,
        PAGE_SIZE=page_size,
        MAX_MATCH=limits.max_match,
        COUNT=OWN_MATCHES,
        MATCH_SHIFT=MATCH_SHIFT,
        OWN_BIT=OWN_BIT,
        BLOCK=block,
        num_warps=4,
        **dependent_launch(pool.device),
    )
    return keys.flatten(1)


@TritonKernel
def _ngram_match_kernel(
    pool_ptr: tl.tensor, page_table_ptr: tl.tensor, lengths_ptr: tl.tensor, keys_ptr: tl.tensor,
    table_stride: int, num_blocks: int, min_match: int,
    PAGE_SIZE: tl.constexpr, MAX_MATCH: tl.constexpr, COUNT: tl.constexpr, MATCH_SHIFT: tl.constexpr,
    OWN_BIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (request, block of its places) finds the best matches of its block."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    wait_for_inputs(PDL)
    length = tl.load(lengths_ptr + row)
    pages_ptr = page_table_ptr + row * table_stride
    out_ptr = keys_ptr + (row * num_blocks + block) * COUNT
    best = tl.arange(0, COUNT)
    if block * BLOCK >= length:
        tl.store(out_ptr + best, tl.full([COUNT], -1, tl.int64))
    else:
        place = block * BLOCK + tl.arange(0, BLOCK)
        alive = place < length
        matched = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(MAX_MATCH):
            here = place - back
            alive = alive & (here >= 0)
            page = tl.load(pages_ptr + here // PAGE_SIZE, mask=alive, other=0).to(tl.int64)
            token = tl.load(pool_ptr + page * PAGE_SIZE + here % PAGE_SIZE, mask=alive, other=-1)
            last = tl.maximum(length - back, 0)
            last_page = tl.load(pages_ptr + last // PAGE_SIZE).to(tl.int64)
            alive = alive & (token == tl.load(pool_ptr + last_page * PAGE_SIZE + last % PAGE_SIZE))
            matched += alive.to(tl.int64)
        key = (matched << MATCH_SHIFT) | OWN_BIT | place.to(tl.int64)
        key = tl.where(matched >= min_match, key, -1)
        for index in range(COUNT):
            largest = tl.max(key, axis=0)
            tl.store(out_ptr + index, largest)
            key = tl.where(key == largest, -1, key)
