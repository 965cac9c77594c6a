"""Large values that come over a link again and again are kept once.

A link carries values, not objects: requests that share a grammar or a list of tokens each bring a copy.
"""

from collections import deque
from collections.abc import Hashable
from typing import TypeVar

T = TypeVar("T")

MOST_KEPT = 8  # values of a kind: requests that share one come one after another


class Repeated:
    """The last distinct values of each kind."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, deque[object]] = {}

    def same(self, kind: Hashable, value: T) -> T:
        """The object that came before if it is equal to this, else this one."""
        kept = self._kept.setdefault(kind, deque(maxlen=MOST_KEPT))
        for known in kept:
            if known == value:
                assert isinstance(known, type(value))
                return known
        kept.append(value)
        return value
