"""The entry of requests' new tokens into the log of all requests (`ngram_log` describes its layout, and its owners).

An n-gram is entered one token late, when something follows it: so no request finds the end of what was said, which
continues nowhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, dependent_launch, require, runs_triton
from overlap_spec_kernels.ngram.ngram_log import (
    BANDS,
    HASH_STEP,
    PAGE,
    NgramLimits,
    NgramLog,
    band_of,
    entry_of,
    first_hash,
    next_hash,
)
from overlap_spec_kernels.window.store_tokens import cache_rows


def ngram_absorb(
    log: NgramLog,
    limits: NgramLimits,
    pool: Tensor,
    page_table: Tensor,
    page_size: int,
    slots: Tensor,
    starts: Tensor,
    ends: Tensor,
    dummy: int,
    most: int,
) -> None:
    """Enter the tokens at positions starts..ends of each slot, in place; none for `dummy` or where ends < starts.

    Earlier calls entered the tokens before `starts`; a start of 0 is a new request. A call enters at most `most` tokens
    of a slot. A slot whose page was evicted meanwhile gets a new one.
    Shapes: pool [R] i32, page_table [B, P] i32, slots, starts, ends [B] i64. No slot but `dummy` may occur twice.
    Raises: ValueError naming the argument. Sync: never.
    """
    require(pool.dim() == 1 and pool.dtype == torch.int32 and pool.is_contiguous(), "pool", "[R] int32")
    require(page_table.dim() == 2 and page_table.dtype == torch.int32, "page_table", "[B, P] int32")
    require(page_table.stride(1) == 1, "page_table", "contiguous rows")
    for name, value in {"slots": slots, "starts": starts, "ends": ends}.items():
        require(value.shape == page_table.shape[:1] and value.is_contiguous(), name, "[B], contiguous")
        require(value.dtype == torch.int64, name, "int64")
    require(2 * limits.context <= PAGE, "limits", f"max_match + branch of at most {PAGE // 2}")
    run = _ngram_absorb_triton if runs_triton(pool) else ngram_absorb_reference
    run(log, limits, pool, page_table, page_size, slots, starts, ends, dummy, most)


_BLOCK_B = 64


class _Pages(NamedTuple):
    """The pages that each row writes, counted from the request's first page. Shapes: [B] i64."""

    first_new: Tensor  # pages before it are already open
    last: Tensor
    base: Tensor  # from where on page `first_new` takes a number
    live_from: Tensor  # [1]: new pages before it are evicted once all new ones are open
    taken: Tensor  # [1]: numbers that this call takes


def _pages(log: NgramLog, fresh: int, slots: Tensor, starts: Tensor, ends: Tensor, dummy: int) -> _Pages:
    # A page that this call might evict does not count as open: a row opens at most two pages in a decode step.
    page, num_pages = log.open_page[slots], len(log.fill)
    row = page.clamp(min=0) % num_pages
    is_own = (log.pages[row] == page) & (log.owners[row] == log.owner[slots])
    is_open = (starts % fresh != 0) & is_own & _is_kept(log, page, 2 * len(slots) * log.stride)
    first_new = starts // fresh + is_open
    last = torch.where((slots == dummy) | (ends < starts), -1, ends // fresh)
    opened = (last + 1 - first_new).clamp(min=0) * log.stride
    taken = opened.sum(0, keepdim=True)
    base = log.opened + opened.cumsum(0) - opened
    return _Pages(first_new, last, base, log.opened + taken - num_pages, taken)


def _is_kept(log: NgramLog, page: Tensor, taken: Tensor) -> Tensor:
    """Whether no page takes the row of an open one while so many numbers are taken. Shapes: [B], [1] -> [B]."""
    return (log.opened - 1 - page) % len(log.fill) + taken < len(log.fill)


def _number(log: NgramLog, bands: Tensor | None, cursor: Tensor) -> Tensor:
    """The number that a page takes, of those from `cursor` on. Shapes: bands [B], the others [B, N]."""
    if bands is None:
        return cursor
    # A band comes at other rows each time that the numbers have gone through all rows.
    band = band_of(bands[:, None], cursor // BANDS + cursor // len(log.fill))
    return cursor + ((band - cursor) & (log.stride - 1))


def ngram_absorb_reference(
    log: NgramLog,
    limits: NgramLimits,
    pool: Tensor,
    page_table: Tensor,
    page_size: int,
    slots: Tensor,
    starts: Tensor,
    ends: Tensor,
    dummy: int,
    most: int,
) -> None:
    context, fresh = limits.context, PAGE - limits.context
    pages, open_page, owner = _pages(log, fresh, slots, starts, ends, dummy), log.open_page[slots], log.owner[slots]
    bands = None if int(log.stride) == 1 else log.bands[slots]
    page = starts[:, None] // fresh + torch.arange(2 + most // fresh, device=pool.device)  # [B, N]
    is_new = page >= pages.first_new[:, None]
    cursor = pages.base[:, None] + (page - pages.first_new[:, None]) * log.stride
    number = torch.where(is_new, _number(log, bands, cursor), open_page[:, None])
    is_kept = torch.where(is_new, number >= pages.live_from, _is_kept(log, open_page, pages.taken)[:, None])
    alive = (page <= pages.last[:, None]) & is_kept
    offset = torch.arange(PAGE, device=pool.device)
    position = page[:, :, None] * fresh + offset - context  # [B, N, PAGE]
    start, end, begin = starts[:, None, None], ends[:, None, None], page[:, :, None] * fresh

    def tokens_at(row: Tensor, position: Tensor) -> Tensor:
        return torch.where(position >= 0, pool[cache_rows(page_table[row], position[:, None], page_size)[:, 0]], -1)

    written = alive[:, :, None] & (position <= end) & (is_new[:, :, None] | (position >= start))
    row, nth, column = written.nonzero(as_tuple=True)  # usually few
    log.tokens[number[row, nth] % len(log.fill), column] = tokens_at(row, position[row, nth, column])
    filled = torch.minimum(ends[:, None], page * fresh + fresh - 1) - page * fresh + context + 1
    log.fill[(number % len(log.fill))[alive]] = filled[alive].int()
    row, nth = (alive & is_new).nonzero(as_tuple=True)
    if len(row):
        opened = number[row, nth]
        log.pages[opened % len(log.fill)], log.owners[opened % len(log.fill)] = opened, owner[row]
    entered_from = torch.where(is_new[:, :, None], begin - limits.branch, start - 1)
    row, nth, column = (alive[:, :, None] & (position >= 0) & (position < end) & (position >= entered_from)).nonzero(
        as_tuple=True
    )
    last, place = position[row, nth, column], number[row, nth] * PAGE + column + 1
    state, bands_of_row = first_hash(owner)[row], None if bands is None else bands[row]
    for back in range(limits.max_match):
        state = next_hash(state, tokens_at(row, last - back).long())
        if back + 1 in limits.sizes:
            whole = (last >= back) & (column >= back)
            entry = entry_of(state, bands_of_row, log.places)
            log.places.scatter_reduce_(0, entry[whole], place[whole], "amax")
    newest = number.gather(1, (pages.last - starts // fresh).clamp(min=0)[:, None])[:, 0]
    newest = torch.where(pages.last >= pages.first_new, newest, open_page)
    log.open_page.index_copy_(0, slots, newest)
    log.opened.add_(pages.taken)


def _ngram_absorb_triton(
    log: NgramLog,
    limits: NgramLimits,
    pool: Tensor,
    page_table: Tensor,
    page_size: int,
    slots: Tensor,
    starts: Tensor,
    ends: Tensor,
    dummy: int,
    most: int,
) -> None:
    num_rows = len(slots)
    taken, newest = torch.empty_like(log.opened), torch.empty_like(slots)
    _ngram_absorb_kernel[(num_rows,)](
        *log,
        pool,
        page_table,
        slots,
        starts,
        ends,
        taken,
        newest,
        num_rows,
        page_table.stride(0),
        len(log.fill),
        len(log.places) - 1,
        dummy,
        PAGE_SIZE=page_size,
        CONTEXT=limits.context,
        BRANCH=limits.branch,
        SIZES=sum(1 << size for size in limits.sizes),
        MAX_MATCH=limits.max_match,
        HASH_STEP=HASH_STEP,
        PAGE=PAGE,
        BANDS=BANDS,
        BLOCK_B=_BLOCK_B,
        num_warps=4,
        **dependent_launch(pool.device),
    )
    log.open_page.index_copy_(0, slots, newest)  # not in the kernel, whose programs all read every row's open page
    log.opened.add_(taken)


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def _ngram_absorb_kernel(
    tokens_ptr: tl.tensor, fill_ptr: tl.tensor, index_ptr: tl.tensor, open_page_ptr: tl.tensor, count_ptr: tl.tensor,
    numbers_ptr: tl.tensor, owners_ptr: tl.tensor, owner_ptr: tl.tensor, bands_ptr: tl.tensor, stride_ptr: tl.tensor,
    pool_ptr: tl.tensor, page_table_ptr: tl.tensor, slots_ptr: tl.tensor, starts_ptr: tl.tensor, ends_ptr: tl.tensor,
    taken_ptr: tl.tensor, newest_ptr: tl.tensor,
    num_rows: int, table_stride: int, num_pages: int, index_mask: int, dummy: int,
    PAGE_SIZE: tl.constexpr, CONTEXT: tl.constexpr, BRANCH: tl.constexpr, SIZES: tl.constexpr, MAX_MATCH: tl.constexpr,
    HASH_STEP: tl.constexpr, PAGE: tl.constexpr, BANDS: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row writes page after page. It computes how many pages the rows before it open."""
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    FRESH: tl.constexpr = PAGE - CONTEXT
    count, stride = tl.load(count_ptr), tl.load(stride_ptr)
    taken = tl.full([], 0, tl.int64)
    before, first_new, last, open_page = taken, taken, taken, taken
    for first_row in range(0, num_rows, BLOCK_B):  # a loop, so that no number of rows compiles again
        rows = first_row + tl.arange(0, BLOCK_B)
        inside = rows < num_rows
        slots = tl.load(slots_ptr + rows, mask=inside, other=dummy)
        starts = tl.load(starts_ptr + rows, mask=inside, other=0)
        ends = tl.load(ends_ptr + rows, mask=inside, other=-1)
        open_pages = tl.load(open_page_ptr + slots, mask=inside, other=0)
        kept = inside & (open_pages >= 0)
        numbers = tl.load(numbers_ptr + open_pages % num_pages, mask=kept, other=-1)
        owners = tl.load(owners_ptr + open_pages % num_pages, mask=kept, other=-1)
        kept = kept & (numbers == open_pages) & (owners == tl.load(owner_ptr + slots, mask=inside, other=0))
        kept = kept & ((count - 1 - open_pages) % num_pages + 2 * num_rows * stride < num_pages)
        is_open = (starts % FRESH != 0) & kept
        firsts_new = starts // FRESH + is_open.to(tl.int64)
        lasts = tl.where((slots == dummy) | (ends < starts), -1, ends // FRESH)
        opened = tl.maximum(lasts + 1 - firsts_new, 0) * stride
        taken += tl.sum(opened, axis=0)
        before += tl.sum(tl.where(rows < row, opened, 0), axis=0)
        own = rows == row
        first_new += tl.sum(tl.where(own, firsts_new, 0), axis=0)
        last += tl.sum(tl.where(own, lasts, 0), axis=0)
        open_page += tl.sum(tl.where(own, open_pages, 0), axis=0)
    live_from, base = count + taken - num_pages, count + before
    start, end = tl.load(starts_ptr + row), tl.load(ends_ptr + row)
    if row == 0:
        tl.store(taken_ptr, taken)
    pages_ptr = page_table_ptr + row.to(tl.int64) * table_stride
    slot = tl.load(slots_ptr + row)
    owner, bands = tl.load(owner_ptr + slot), tl.load(bands_ptr + slot)
    newest = open_page
    for page in range(start // FRESH, last + 1):
        is_new = page >= first_new
        number = open_page
        if is_new:
            cursor = base + (page - first_new) * stride
            band = (bands >> (4 * ((cursor // BANDS + cursor // num_pages) & (BANDS - 1)))) & (BANDS - 1)
            number = cursor + ((band - cursor) & (stride - 1))
            newest = number
        if tl.where(is_new, number >= live_from, (count - 1 - number) % num_pages + taken < num_pages):
            if is_new:
                tl.store(numbers_ptr + number % num_pages, number)
                tl.store(owners_ptr + number % num_pages, owner)
            _absorb_page(
                tokens_ptr, fill_ptr, index_ptr, pool_ptr, pages_ptr, num_pages, index_mask, page, number, start, end,
                is_new, owner, bands, PAGE_SIZE, CONTEXT, BRANCH, SIZES, MAX_MATCH, HASH_STEP, PAGE, BANDS,
            )  # fmt: skip
    tl.store(newest_ptr + row, newest)


@TritonKernel
def _absorb_page(
    tokens_ptr: tl.tensor, fill_ptr: tl.tensor, index_ptr: tl.tensor, pool_ptr: tl.tensor, pages_ptr: tl.tensor,
    num_pages: int, index_mask: int, page: tl.tensor, number: tl.tensor, start: tl.tensor, end: tl.tensor,
    is_new: tl.tensor, owner: tl.tensor, bands: tl.tensor, PAGE_SIZE: tl.constexpr, CONTEXT: tl.constexpr,
    BRANCH: tl.constexpr, SIZES: tl.constexpr, MAX_MATCH: tl.constexpr, HASH_STEP: tl.constexpr, PAGE: tl.constexpr,
    BANDS: tl.constexpr,
) -> None:  # fmt: skip
    """Write tokens start..end to a request's n-th page, n = `page`, whose number in the log is `number`."""
    FRESH: tl.constexpr = PAGE - CONTEXT
    offset = tl.arange(0, PAGE)
    position = page * FRESH + offset - CONTEXT
    known = (position >= 0) & (position <= end)
    pool_page = tl.load(pages_ptr + position // PAGE_SIZE, mask=known, other=0).to(tl.int64)
    token = tl.load(pool_ptr + pool_page * PAGE_SIZE + position % PAGE_SIZE, mask=known, other=-1)
    written = (position <= end) & (is_new | (position >= start))
    tl.store(tokens_ptr + (number % num_pages) * PAGE + offset, token, mask=written)
    filled = tl.minimum(end, page * FRESH + FRESH - 1) - page * FRESH + CONTEXT + 1
    tl.store(fill_ptr + number % num_pages, filled.to(tl.int32))
    entered = (position < end) & (position >= tl.where(is_new, page * FRESH - BRANCH, start - 1))
    state = tl.zeros([PAGE], tl.int64) + owner * HASH_STEP
    for back in tl.static_range(MAX_MATCH):
        here = position - back
        whole = entered & (here >= 0) & (offset >= back)
        pool_page = tl.load(pages_ptr + here // PAGE_SIZE, mask=whole, other=0).to(tl.int64)
        token = tl.load(pool_ptr + pool_page * PAGE_SIZE + here % PAGE_SIZE, mask=whole, other=0)
        state = (state ^ (token.to(tl.int64) + 1)) * HASH_STEP
        state = state ^ (state >> 29)
        if (SIZES >> (back + 1)) & 1 != 0:
            place = (state >> 17) & index_mask
            band = (bands >> (4 * (place & (BANDS - 1)))) & (BANDS - 1)
            entry = place - (place & (BANDS - 1)) + band
            tl.atomic_max(index_ptr + entry, number * PAGE + offset + 1, mask=whole)
