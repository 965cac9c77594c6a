"""The pool of KV pages: which are free, and how many holders each of the others has.

A page is free exactly when it has no holder. Page 0 is the worker's dummy and never handed out.
"""

from collections.abc import Iterable

from overlap_spec.errors import OutOfPages


class PagePool:
    """Pages 1..num_pages-1, counted by holders."""

    def __init__(self, num_pages: int) -> None:
        self.free = list(range(num_pages - 1, 0, -1))  # a stack
        self.holders = [0] * num_pages

    @property
    def num_total(self) -> int:
        return len(self.holders) - 1

    def take(self, count: int) -> list[int]:
        """Hand out `count` free pages with one holder each. Raises: OutOfPages."""
        if count > len(self.free):
            raise OutOfPages(f"{count} pages asked for, {len(self.free)} of {self.num_total} are free")
        if count == 1:  # what a decode step adds to a request, as a rule
            page = self.free.pop()
            self.holders[page] = 1
            return [page]
        if count == 0:
            return []
        pages = self.free[-count:]
        del self.free[-count:]
        for page in pages:
            self.holders[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that have one."""
        for page in pages:
            assert self.holders[page] > 0, f"page {page} is free"
            self.holders[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Take a holder from each page; a page without any is free again."""
        for page in pages:
            left = self.holders[page] - 1
            assert left >= 0, f"page {page} is free"
            self.holders[page] = left
            if left == 0:
                self.free.append(page)
