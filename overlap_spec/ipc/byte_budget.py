"""Bounds the bytes that wait somewhere: of each owner, and in all."""

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class ByteBudget(Generic[K]):
    """Bytes in use by owner. What `take` was granted, `give` returns; an owner without bytes is forgotten."""

    def __init__(self, per_owner: int, in_all: int) -> None:
        self.per_owner = per_owner
        self.in_all = in_all
        self.total = 0
        self._used: dict[K, int] = {}

    def of(self, owner: K) -> int:
        """The owner's bytes."""
        return self._used.get(owner, 0)

    def take(self, owner: K, num_bytes: int) -> bool:
        """Use more bytes. Returns False, and uses none, if that were too many."""
        if self.of(owner) + num_bytes > self.per_owner or self.total + num_bytes > self.in_all:
            return False
        self._used[owner] = self.of(owner) + num_bytes
        self.total += num_bytes
        return True

    def give(self, owner: K, num_bytes: int) -> None:
        """Return bytes."""
        left = self._used.pop(owner, 0) - num_bytes
        assert left >= 0, f"{owner}: {-left} bytes more were returned than taken"
        self.total -= num_bytes
        if left:
            self._used[owner] = left
