"""The kernel of `ngram_merge`: one program per request builds its tree in registers, then picks the best nodes in turn.

Paths are the rows of [C, C] and [C, L] blocks; a path's rank is the number of paths with a larger key.
"""

from __future__ import annotations

from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, dependent_launch, next_power_of_2
from overlap_spec_kernels.ngram.ngram_log import BANDS, HASH_STEP, PAGE, NgramLimits, NgramLog
from overlap_spec_kernels.ngram.ngram_match import MATCH_SHIFT, OWN_BIT, OWN_MATCHES

_NO_RANK = 64


def merge_on_device(
    keys: Tensor,
    log: NgramLog,
    limits: NgramLimits,
    pool: Tensor,
    page_table: Tensor,
    page_size: int,
    slots: Tensor,
    lengths: Tensor,
    num_guesses: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel. Shapes: as `ngram_merge` -> the fields of `MergedGuesses`."""
    num_rows, num_keys = keys.shape
    tokens, parents = keys.new_empty(num_guesses, num_rows), keys.new_empty(num_guesses, num_rows)
    levels, strength = keys.new_empty(num_rows), keys.new_empty(num_rows)
    num_levels = min(limits.branch, num_guesses)
    _ngram_merge_kernel[(num_rows,)](
        keys,
        *(log.tokens, log.fill, log.places, log.pages, log.owners, log.owner, log.bands),
        pool,
        page_table,
        slots,
        lengths,
        tokens,
        parents,
        levels,
        strength,
        num_rows,
        num_keys,
        page_table.stride(0),
        len(log.fill),
        len(log.places) - 1,
        limits.min_match,
        limits.min_breadth,
        limits.max_breadth,
        max(1, limits.branch - 1),
        num_guesses,
        PAGE_SIZE=page_size,
        SIZES=sum(1 << size for size in limits.sizes),
        MAX_MATCH=limits.max_match,
        NUM_LEVELS=num_levels,
        BY_FREQUENCY=limits.by_frequency,
        HASH_STEP=HASH_STEP,
        PAGE=PAGE,
        BANDS=BANDS,
        OWN=OWN_MATCHES,
        MATCH_SHIFT=MATCH_SHIFT,
        OWN_BIT=OWN_BIT,
        NO_RANK=_NO_RANK,
        BLOCK_N=next_power_of_2(num_keys),
        BLOCK_M=next_power_of_2(limits.max_match),
        BLOCK_C=2 * OWN_MATCHES,
        BLOCK_L=next_power_of_2(num_levels),
        num_warps=4,
        **dependent_launch(pool.device),
    )
    return tokens, parents, levels, strength


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def _ngram_merge_kernel(
    keys_ptr: tl.tensor, log_tokens_ptr: tl.tensor, fill_ptr: tl.tensor, index_ptr: tl.tensor, numbers_ptr: tl.tensor,
    owners_ptr: tl.tensor, owner_ptr: tl.tensor, bands_ptr: tl.tensor, pool_ptr: tl.tensor, page_table_ptr: tl.tensor,
    slots_ptr: tl.tensor, lengths_ptr: tl.tensor, tokens_ptr: tl.tensor, parents_ptr: tl.tensor, levels_ptr: tl.tensor,
    strength_ptr: tl.tensor,
    num_rows: int, num_keys: int, table_stride: int, num_pages: int, index_mask: int, min_match: int, min_breadth: int,
    max_breadth: int, longest: int, num_guesses: int,
    PAGE_SIZE: tl.constexpr, SIZES: tl.constexpr, MAX_MATCH: tl.constexpr, NUM_LEVELS: tl.constexpr,
    BY_FREQUENCY: tl.constexpr, HASH_STEP: tl.constexpr, PAGE: tl.constexpr, BANDS: tl.constexpr, OWN: tl.constexpr,
    MATCH_SHIFT: tl.constexpr, OWN_BIT: tl.constexpr, NO_RANK: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    length = tl.load(lengths_ptr + row)
    pages_ptr = page_table_ptr + row * table_stride
    key = _best_own(keys_ptr + row * num_keys, num_keys, OWN, BLOCK_N, BLOCK_C)
    slot = tl.load(slots_ptr + row)
    key = _with_shared(
        key, log_tokens_ptr, index_ptr, numbers_ptr, owners_ptr, tl.load(owner_ptr + slot), tl.load(bands_ptr + slot),
        pool_ptr, pages_ptr, length, num_pages, index_mask, min_match,
        PAGE_SIZE, SIZES, MAX_MATCH, HASH_STEP, PAGE, BANDS, OWN, MATCH_SHIFT, BLOCK_M, BLOCK_C,
    )  # fmt: skip
    path = tl.arange(0, BLOCK_C)
    twice = (key[:, None] == key[None, :]) & (path[None, :] < path[:, None])
    key = tl.where(tl.max(twice.to(tl.int32), axis=1) > 0, -1, key)
    rank = tl.sum((key[None, :] > key[:, None]).to(tl.int64), axis=1)
    matched = tl.where(key < 0, 0, key >> MATCH_SHIFT)
    order, tokens, parent = _levels(
        key, matched, rank, log_tokens_ptr, fill_ptr, pool_ptr, pages_ptr, length, num_pages, min_breadth, max_breadth,
        longest, PAGE_SIZE, NUM_LEVELS, BY_FREQUENCY, PAGE, OWN_BIT, NO_RANK, BLOCK_C, BLOCK_L,
    )  # fmt: skip
    deepest = _take(order, tokens, parent, tokens_ptr + row, parents_ptr + row, num_rows, num_guesses, BLOCK_C, BLOCK_L)
    tl.store(levels_ptr + row, deepest)
    tl.store(strength_ptr + row, tl.where(deepest > 0, tl.max(matched, axis=0), 0))


@TritonKernel
def _levels(
    key: tl.tensor, matched: tl.tensor, rank: tl.tensor, log_tokens_ptr: tl.tensor, fill_ptr: tl.tensor,
    pool_ptr: tl.tensor, pages_ptr: tl.tensor, length: tl.tensor,
    num_pages: int, min_breadth: int, max_breadth: int, longest: int,
    PAGE_SIZE: tl.constexpr, NUM_LEVELS: tl.constexpr, BY_FREQUENCY: tl.constexpr, PAGE: tl.constexpr,
    OWN_BIT: tl.constexpr, NO_RANK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The tree, level by level: order of nodes (-1: none), tokens, rank of the parent's owner. Each [C, L] i64."""
    level_of = tl.arange(0, BLOCK_L)[None, :]
    tokens = tl.full([BLOCK_C, BLOCK_L], -1, tl.int64)
    order = tl.full([BLOCK_C, BLOCK_L], -1, tl.int64)
    parent = tl.zeros([BLOCK_C, BLOCK_L], tl.int64)
    owner = tl.zeros([BLOCK_C], tl.int64)
    alive = matched > 0
    probability = tl.full([BLOCK_C], 1 << 20, tl.int64)
    for level in range(NUM_LEVELS):
        token = _following(
            key, level, log_tokens_ptr, fill_ptr, pool_ptr, pages_ptr, length, num_pages, PAGE_SIZE, PAGE, OWN_BIT
        )
        alive = alive & (token >= 0)
        siblings = (owner[:, None] == owner[None, :]) & alive[None, :]
        same = siblings & (token[:, None] == token[None, :]) & alive[:, None]
        first = tl.min(tl.where(same, rank[None, :], NO_RANK), axis=1)
        is_node = alive & (first == rank)
        weight = tl.sum(tl.where(same, matched[None, :], 0), axis=1)
        before = rank[None, :] < rank[:, None]
        if BY_FREQUENCY:
            before = (weight[None, :] > weight[:, None]) | ((weight[None, :] == weight[:, None]) & before)
            breadth = tl.zeros([BLOCK_C], tl.int64) + max_breadth
        else:
            breadth = min_breadth + tl.maximum(longest - (matched + level), 0) * (max_breadth - min_breadth) // longest
        number = tl.sum((is_node[None, :] & siblings & before).to(tl.int64), axis=1)
        kept = is_node & (number < breadth)
        total = tl.maximum(tl.sum(tl.where(kept[None, :] & siblings, weight[None, :], 0), axis=1), 1)
        probability = probability * ((weight << 20) // total) >> 20
        value = probability if BY_FREQUENCY else matched
        node_order = tl.where(kept, (value << 12) | ((62 - level) << 6) | (63 - rank), -1)
        at_level = level_of == level
        order = tl.where(at_level, node_order[:, None], order)
        tokens = tl.where(at_level, token[:, None], tokens)
        parent = tl.where(at_level, owner[:, None], parent)
        owned = (first[:, None] == rank[None, :]) & kept[None, :]
        alive = alive & (tl.max(owned.to(tl.int32), axis=1) > 0)
        owner = first
    return order, tokens, parent


@TritonKernel
def _take(
    order: tl.tensor, tokens: tl.tensor, parent: tl.tensor, tokens_ptr: tl.tensor, parents_ptr: tl.tensor, stride: int,
    num_guesses: int, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Write the best nodes, one after the other. Returns the level of the deepest one."""
    level_of = tl.arange(0, BLOCK_L)[None, :]
    column_above = tl.zeros([BLOCK_C, BLOCK_L], tl.int64)
    deepest = tl.full([], 0, tl.int64)
    for guess in range(num_guesses):
        best = tl.max(tl.max(order, axis=1), axis=0)
        is_best = (order == best) & (best >= 0)
        guessed = tl.sum(tl.sum(tl.where(is_best, tokens, 0), axis=1), axis=0)
        above = tl.sum(tl.sum(tl.where(is_best, column_above, 0), axis=1), axis=0)
        tl.store(tokens_ptr + guess * stride, tl.where(best >= 0, guessed, -1))
        tl.store(parents_ptr + guess * stride, above)
        depth = 63 - ((best >> 6) & 63)
        below = (level_of == depth) & (parent == 63 - (best & 63)) & (best >= 0)
        column_above = tl.where(below, guess + 1, column_above)
        deepest = tl.maximum(deepest, tl.where(best >= 0, depth, 0))
        order = tl.where(is_best, -1, order)
    return deepest


@TritonKernel
def _best_own(
    keys_ptr: tl.tensor, num_keys: int, OWN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
) -> tl.tensor:
    """The largest keys of a row, in the first OWN entries of [C]."""
    path, column = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    found = tl.load(keys_ptr + column, mask=column < num_keys, other=-1)
    key = tl.full([BLOCK_C], -1, tl.int64)
    for index in range(OWN):
        largest = tl.max(found, axis=0)
        key = tl.where(path == index, largest, key)
        found = tl.where(found == largest, -1, found)
    return key


@TritonKernel
def _with_shared(
    key: tl.tensor, log_tokens_ptr: tl.tensor, index_ptr: tl.tensor, numbers_ptr: tl.tensor, owners_ptr: tl.tensor,
    owner: tl.tensor, bands: tl.tensor, pool_ptr: tl.tensor, pages_ptr: tl.tensor, length: tl.tensor,
    num_pages: int, index_mask: int, min_match: int,
    PAGE_SIZE: tl.constexpr, SIZES: tl.constexpr, MAX_MATCH: tl.constexpr, HASH_STEP: tl.constexpr, PAGE: tl.constexpr,
    BANDS: tl.constexpr, OWN: tl.constexpr, MATCH_SHIFT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Put the owner's matches in the log into the entries from OWN on: one for each indexed n-gram size."""
    path, back = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_M)
    here = length - back
    is_known = (here >= 0) & (back < MAX_MATCH)
    page = tl.load(pages_ptr + here // PAGE_SIZE, mask=is_known, other=0).to(tl.int64)
    known = tl.load(pool_ptr + page * PAGE_SIZE + here % PAGE_SIZE, mask=is_known, other=-1)
    state = tl.full([], 0, tl.int64) + owner * HASH_STEP
    place_of = OWN
    for size in tl.static_range(1, MAX_MATCH + 1):
        token = tl.sum(tl.where(back == size - 1, known, 0), axis=0)
        state = (state ^ (token.to(tl.int64) + 1)) * HASH_STEP
        state = state ^ (state >> 29)
        if (SIZES >> size) & 1 != 0:
            whole = (state >> 17) & index_mask
            band = (bands >> (4 * (whole & (BANDS - 1)))) & (BANDS - 1)
            place = tl.load(index_ptr + whole - (whole & (BANDS - 1)) + band) - 1
            number = place // PAGE
            offset = place % PAGE - back
            is_live = place >= 0
            is_live = is_live & (tl.load(numbers_ptr + number % num_pages, mask=is_live, other=-1) == number)
            is_live = is_live & (tl.load(owners_ptr + number % num_pages, mask=is_live, other=-1) == owner)
            row_ptr = log_tokens_ptr + (number % num_pages) * PAGE
            logged = tl.load(row_ptr + offset, mask=is_live & is_known & (offset >= 0), other=-2)
            matched = tl.min(tl.where(logged == known, MAX_MATCH, back), axis=0).to(tl.int64)
            found = tl.where(is_live & (matched >= min_match), (matched << MATCH_SHIFT) | place, -1)
            key = tl.where(path == place_of, found, key)
            place_of += 1
    return key


@TritonKernel
def _following(
    key: tl.tensor, level: int, log_tokens_ptr: tl.tensor, fill_ptr: tl.tensor, pool_ptr: tl.tensor,
    pages_ptr: tl.tensor, length: tl.tensor, num_pages: int, PAGE_SIZE: tl.constexpr, PAGE: tl.constexpr,
    OWN_BIT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The token `level` + 1 after each match, -1 where there is none. Shapes: [C] i64 -> [C] i64."""
    is_own = (key >= 0) & ((key & OWN_BIT) != 0)
    is_shared = (key >= 0) & ((key & OWN_BIT) == 0)
    place = key & (OWN_BIT - 1)
    position = place + 1 + level % tl.maximum(length - place, 1)
    page = tl.load(pages_ptr + position // PAGE_SIZE, mask=is_own, other=0).to(tl.int64)
    own = tl.load(pool_ptr + page * PAGE_SIZE + position % PAGE_SIZE, mask=is_own, other=-1)
    row = (place // PAGE) % num_pages
    offset = place % PAGE + 1 + level
    filled = tl.load(fill_ptr + row, mask=is_shared, other=0)
    shared = tl.load(log_tokens_ptr + row * PAGE + offset, mask=is_shared & (offset < filled), other=-1)
    return tl.where(is_own, own, shared).to(tl.int64)
