"""The log of all requests' tokens, bounded and paged, and the index of its n-grams: their tensors and arithmetic.

A page is a row of PAGE tokens of one request:

    [ H tokens before | G tokens, at positions n G .. n G + G - 1 of the request ]       H + G = PAGE

so a match and what follows it are always in one row, whatever was written between two steps of the request. Pages are
numbered as they are opened, page i is row i modulo the rows: a new page evicts the oldest. A place is page * PAGE +
offset, so a later place is a later token. The index holds, by the hash of an n-gram, 1 + the latest place where it
ended and was followed by something; a reader compares the tokens, so a hash that two of them share only loses one.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import next_power_of_2

PAGE = 256
HASH_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed 64-bit integer: products wrap
NO_PAGE = -(1 << 40)


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
    opened: Tensor  # [1] i64: pages opened so far

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self)


def allocate_log(capacity: int, device: torch.device) -> NgramLog:
    """An empty log of at most `capacity` tokens, at least one page, without slots yet."""
    num_pages = max(capacity // PAGE, 1)
    return NgramLog(
        tokens=torch.full((num_pages, PAGE), -1, dtype=torch.int32, device=device),
        fill=torch.zeros(num_pages, dtype=torch.int32, device=device),
        places=torch.zeros(next_power_of_2(2 * capacity), dtype=torch.int64, device=device),
        open_page=torch.zeros(0, dtype=torch.int64, device=device),
        opened=torch.zeros(1, dtype=torch.int64, device=device),
    )


def with_slots(log: NgramLog, num_slots: int) -> NgramLog:
    """The same log for `num_slots` slots, none of which has a page."""
    return log._replace(open_page=log.opened.new_full((num_slots,), NO_PAGE))


def clear_log(log: NgramLog) -> None:
    """Empty the log in place. Slots in use open new pages."""
    log.places.zero_()
    log.open_page.fill_(NO_PAGE)


def next_hash(state: Tensor, tokens: Tensor) -> Tensor:
    """Extend the hash of an n-gram by the token before it; the empty n-gram has hash 0. Shapes: alike, i64."""
    state = (state ^ (tokens + 1)) * HASH_STEP
    return state ^ (state >> 29)


def entry_of(state: Tensor, places: Tensor) -> Tensor:
    """The index entry of a hash. Shapes: i64 -> i64."""
    return (state >> 17) & (len(places) - 1)
