"""The log of all requests' tokens, bounded and paged, and the index of its n-grams: their tensors and arithmetic.

A page is a row of PAGE tokens of one request:

    [ H tokens before | G tokens, at positions n G .. n G + G - 1 of the request ]       H + G = PAGE

so a match and what follows it are always in one row, whatever was written between two steps of the request. Pages are
numbered as they are opened, page i is row i modulo the rows: a new page evicts the oldest. A place is page * PAGE +
offset, so a later place is a later token. The index holds, by the hash of an n-gram, 1 + the latest place where it
ended and was followed by something; a reader compares the tokens, so a hash that two of them share only loses one.

**Owners.** A request finds only what requests of its owner have said. The hash of an n-gram begins with the owner, and
a page has its owner's number, which a reader compares: no collision of hashes leads to another's text.

**Bands.** Rows and entries are BANDS groups, each every BANDS-th one. A slot writes in its bands, and evicts pages
there only. Its `bands` are 16 numbers of 4 bits: what would be in band i if it had them all (ALL_BANDS) is in the i-th
of these. While some slot does not have all bands, a page takes the next number in one of its slot's bands, out of
`stride` = BANDS numbers; else it takes the next one.

    numbers    32 .. 47    48 .. 63    64 .. 79         one page in each 16 numbers
    band of         5          11          5            slots with bands 5 and 11
"""

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import next_power_of_2

PAGE = 256
HASH_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed 64-bit integer: products wrap
NO_PAGE = -(1 << 40)
BANDS = 16
ALL_BANDS = 0xFEDCBA9876543210 - (1 << 64)  # as a signed 64-bit integer: band i is the i-th


class NgramLimits(NamedTuple):
    """Limits on the length of matches and on the width of trees."""

    min_match: int
    max_match: int
    branch: int  # most tokens that are taken after a match
    min_breadth: int
    max_breadth: int
    by_frequency: bool  # else by recency

    @property
    def context(self) -> int:
        """H: the number of tokens at the start of a page that repeat the end of the previous page."""
        return self.max_match + self.branch

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the n-grams in the index, at most 6: the shortest, the longest, and some between."""
        between = (size for size in (2, 4, 8, 16) if self.min_match < size < self.max_match)
        return tuple(sorted({self.min_match, *between, self.max_match}))


class NgramLog(NamedTuple):
    """The log's tensors. It has P rows of PAGE tokens; the engine has S slots."""

    tokens: Tensor  # [P, PAGE] i32; -1 before a request's first token
    fill: Tensor  # [P] i32: tokens in the row
    places: Tensor  # [T] i64, the index: 1 + place, 0: none; T is a power of two, and twice the capacity
    open_page: Tensor  # [S] i64: the page of each slot's last token
    opened: Tensor  # [1] i64: the number of the next page
    pages: Tensor  # [P] i64: the number of the page in each row, -1: none
    owners: Tensor  # [P] i64: whose it is
    owner: Tensor  # [S] i64: whose request is in the slot; 0: no particular one's
    bands: Tensor  # [S] i64: 16 bands, 4 bits each
    stride: Tensor  # [1] i64: numbers that a page takes, 1 or BANDS; BANDS if any slot has not ALL_BANDS

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self)


def allocate_log(capacity: int, device: torch.device) -> NgramLog:
    """An empty log of at most `capacity` tokens, at least one page, without slots yet."""
    num_pages = max(capacity // PAGE, 1)
    if num_pages > BANDS:
        num_pages -= num_pages % BANDS  # so that a band's numbers are its rows'
    return NgramLog(
        tokens=torch.full((num_pages, PAGE), -1, dtype=torch.int32, device=device),
        fill=torch.zeros(num_pages, dtype=torch.int32, device=device),
        places=torch.zeros(next_power_of_2(2 * capacity), dtype=torch.int64, device=device),
        open_page=torch.zeros(0, dtype=torch.int64, device=device),
        opened=torch.zeros(1, dtype=torch.int64, device=device),
        pages=torch.full((num_pages,), -1, dtype=torch.int64, device=device),
        owners=torch.zeros(num_pages, dtype=torch.int64, device=device),
        owner=torch.zeros(0, dtype=torch.int64, device=device),
        bands=torch.zeros(0, dtype=torch.int64, device=device),
        stride=torch.ones(1, dtype=torch.int64, device=device),
    )


def with_slots(log: NgramLog, num_slots: int) -> NgramLog:
    """The same log for `num_slots` slots, none of which has a page, or an owner."""
    return log._replace(
        open_page=log.opened.new_full((num_slots,), NO_PAGE),
        owner=log.opened.new_zeros(num_slots),
        bands=log.opened.new_full((num_slots,), ALL_BANDS),
    )


def clear_log(log: NgramLog) -> None:
    """Empty the log in place. Slots in use open new pages."""
    log.places.zero_()
    log.open_page.fill_(NO_PAGE)


def next_hash(state: Tensor, tokens: Tensor) -> Tensor:
    """Extend the hash of an n-gram by the token before it. Shapes: alike, i64."""
    state = (state ^ (tokens + 1)) * HASH_STEP
    return state ^ (state >> 29)


def first_hash(owner: Tensor) -> Tensor:
    """The hash of the empty n-gram; that of owner 0 is 0. Shapes: i64 -> i64."""
    return owner * HASH_STEP


def band_of(bands: Tensor, index: Tensor) -> Tensor:
    """The band of a slot for what would be in band `index` modulo BANDS if it had them all. Shapes: alike, i64."""
    return (bands >> (4 * (index & (BANDS - 1)))) & (BANDS - 1)


def entry_of(state: Tensor, bands: Tensor | None, places: Tensor) -> Tensor:
    """The index entry of a hash, in a slot's bands; None: it has all. Shapes: alike, i64."""
    whole = (state >> 17) & (len(places) - 1)
    return whole if bands is None else whole - (whole & (BANDS - 1)) + band_of(bands, whole)
