"""Pages of requests: a request takes pages with its slot, adds, shares and returns them.

Pages of the cached prefix come first in a request's table and are never written by it: it starts to write at
`cached_len`, a multiple of the page size.

    table of a request:   [ shared with the cache | its own .................... ]
                          0                 num_shared                      len(pages)
"""

from typing import Protocol

from overlap_spec.scheduler.limits import Limits
from overlap_spec.scheduler.prefix_cache import Match, Node, PagePool, PrefixCache
from overlap_spec.scheduler.requests import Request

MOST_AHEAD, SHARE_AHEAD = 64, 128  # cached pages evicted before they are needed: one by one costs more than together


class PageBorrower(Protocol):
    """Uses pages for as long as no request needs them."""

    @property
    def num_pages(self) -> int: ...

    def give_back(self) -> None:
        """Return some of them to the pool; called while it has any."""


class NoBorrower:
    """No page is lent."""

    num_pages = 0

    def give_back(self) -> None:
        """Never called."""


class RequestPages:
    """The page pool, and the prefix cache, whose unlocked pages are evicted when pages run out; then those lent."""

    def __init__(self, pool: PagePool, cache: PrefixCache, limits: Limits) -> None:
        self.pool = pool
        self.cache = cache
        self.borrower: PageBorrower = NoBorrower()
        self._limits = limits
        self._evicted_ahead = min(MOST_AHEAD, limits.num_pages // SHARE_AHEAD)

    @property
    def num_available(self) -> int:
        """Pages that can be had at once: free, lent, or cached and unlocked."""
        return len(self.pool.free) + self.cache.num_evictable + self.borrower.num_pages

    @property
    def num_used(self) -> int:
        return self.pool.num_total - self.num_available

    def match(self, request: Request) -> Match:
        """Find the cached prefix; at least one token is left to compute the next one from."""
        most = min(len(request.tokens) - max(1, self._limits.key_lookahead), request.cacheable_len)
        request.matched_version = self.cache.version
        return self._match(request, max(0, most) // self._limits.page_size)

    def pages_to_start(self, request: Request) -> int:
        """Pages for the whole prompt, the first token drawn after it and the window proposed from there."""
        return self._limits.pages_for(len(request.tokens) + 1 + self._limits.width)

    def place(self, request: Request, match: Match) -> None:
        """Give a waiting request its pages: the cached prefix, then its own up to the end of prefill."""
        num_cached = len(match.pages)
        self.cache.lock(match.node)
        self.pool.hold(match.pages)
        request.node = match.node
        request.num_shared = num_cached
        request.pages = match.pages + self._take(self.pages_to_start(request) - num_cached, request.admit.salt)
        request.cached_len = num_cached * self._limits.page_size
        request.planned_len = request.prefilled_len = request.cached_len
        request.target = len(request.tokens)

    def match_again(self, request: Request) -> None:
        """Let a request of which nothing is planned yet start from the longer prefix that others have cached."""
        if request.matched_version == self.cache.version:
            return
        match = self.match(request)
        if len(match.pages) <= request.num_shared:
            return
        self.cache.lock(match.node)
        self.pool.hold(match.pages)
        self.cache.unlock(request.node)
        self.pool.drop(reversed(request.pages[: len(match.pages)]))
        request.node = match.node
        request.num_shared = len(match.pages)
        request.pages[: len(match.pages)] = match.pages
        request.cached_len = request.planned_len = request.prefilled_len = len(match.pages) * self._limits.page_size

    def extend(self, request: Request, count: int) -> list[int]:
        """Append pages to a request's table. Returns them. Raises: OutOfPages."""
        pages = self._take(count, request.admit.salt)
        request.pages += pages
        return pages

    def borrow(self, count: int) -> list[int]:
        """Pages that no request holds, for the borrower; none if there are not so many."""
        if count > len(self.pool.free) + self.cache.num_evictable:
            return []
        return self._take(count)

    def share(self, request: Request) -> None:
        """Put the KV of a request that still runs into the prefix cache.

        If another request has cached the same prefix meanwhile, this one's pages stay private until it leaves: it must
        not lock pages that it does not use, else a request that runs alone might not fit.
        """
        num_valid = self._num_valid(request)
        if num_valid <= request.num_shared:
            return
        if len(self._match(request, num_valid).pages) != request.num_shared:
            return
        node = self._insert(request, num_valid)
        if node is self.cache.root:
            return
        self.cache.lock(node)
        self.cache.unlock(request.node)
        request.node = node
        request.num_shared = num_valid

    def release(self, request: Request) -> None:
        """Give back all pages of a request that no step in flight touches; its valid prefix stays cached."""
        assert request.in_flight == 0, "a step in flight may still write these pages"
        num_valid = request.num_shared if request.is_broken else self._num_valid(request)
        self._insert(request, num_valid)
        self.cache.unlock(request.node)
        self.pool.drop(reversed(request.pages))
        request.vacate(self.cache.root)

    def _match(self, request: Request, most_pages: int) -> Match:
        return self.cache.match(request.tokens, most_pages, request.admit.salt, self._num_public(request))

    def _insert(self, request: Request, num_pages: int) -> Node:
        pages = request.pages[:num_pages]
        return self.cache.insert(request.tokens, pages, request.admit.salt, self._num_public(request))

    def _num_public(self, request: Request) -> int:
        """Pages whose whole key is of tokens that all may share."""
        return max(0, request.admit.public_len - self._limits.key_lookahead) // self._limits.page_size

    def _num_valid(self, request: Request) -> int:
        """Pages whose KV is final, and whose key is known."""
        unknown = max(0, self._limits.key_lookahead - 1)  # rows that depend on more than the token after them
        return max(0, request.valid_len - unknown) // self._limits.page_size

    def _take(self, count: int, salt: str = "") -> list[int]:
        short = count - len(self.pool.free)
        if short > 0:
            self.cache.evict(short + self._evicted_ahead, salt)
            while count > len(self.pool.free) and self.borrower.num_pages:
                self.borrower.give_back()
        return self.pool.take(count)
