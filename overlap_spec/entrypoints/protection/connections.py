"""The connections of the HTTP server: how many there may be, which has to go, and the log's line about it.

A connection is *silent* while no request is in progress on it: before its first, or between two. When there are too
many of an address, or in all, the one that has been silent longest is closed for the new one: silent connections keep
no client out. If none is silent the new one is refused.
"""

import logging
import resource
import time
from collections import Counter
from typing import Protocol

from overlap_spec.config import HttpLimits

MOST_FILES = 1 << 20  # some systems allow more than they could ever hold
OTHER_FILES = 256  # that the server's process needs beside connections
SAID_EVERY_S = 10.0

log = logging.getLogger(__name__)


class Closable(Protocol):
    """A connection."""

    @property
    def address(self) -> str: ...
    def close_silent(self) -> None: ...


class Connections:
    """All open connections."""

    def __init__(self, limits: HttpLimits, most_files: int) -> None:
        self._most = max(1, min(limits.max_connections, most_files - OTHER_FILES))
        self._most_of_address = min(limits.max_connections_per_address, self._most)
        self._silent: dict[Closable, None] = {}  # those silent longest first
        self._by_address: dict[str, dict[Closable, bool]] = {}  # in the same order; whether they are silent
        self._total = 0
        self._events: Counter[str] = Counter()
        self._said_at = float("-inf")

    def __len__(self) -> int:
        return self._total

    def opened(self, connection: Closable) -> bool:
        """Add a connection, which is silent. Returns False if it is to be refused."""
        mine = self._by_address.get(connection.address, {})
        if len(mine) >= self._most_of_address:
            oldest = next((each for each, is_silent in mine.items() if is_silent), None)
        elif self._total >= self._most:
            oldest = next(iter(self._silent), None)
        else:
            oldest = connection
        if oldest is None:
            self.note("refused")
            return False
        if oldest is not connection:
            self.note("closed while silent, for new ones")
            self.closed(oldest)
            oldest.close_silent()
        self._by_address.setdefault(connection.address, {})[connection] = True
        self._silent[connection] = None
        self._total += 1
        return True

    def closed(self, connection: Closable) -> None:
        """Forget a connection; a second call does nothing."""
        mine = self._by_address.get(connection.address, {})
        if mine.pop(connection, None) is None:
            return
        self._silent.pop(connection, None)
        self._total -= 1
        if not mine:
            del self._by_address[connection.address]

    def set_silent(self, connection: Closable, is_silent: bool) -> None:
        """A request begins on a connection, or has ended."""
        mine = self._by_address.get(connection.address, {})
        if mine.pop(connection, None) is None:
            return
        mine[connection] = is_silent
        self._silent.pop(connection, None)
        if is_silent:
            self._silent[connection] = None

    def note(self, what: str) -> None:
        """Count an event; the log gets one line for many."""
        self._events[what] += 1
        now = time.monotonic()
        if now - self._said_at < SAID_EVERY_S:
            return
        counts = ((name, len(mine)) for name, mine in self._by_address.items())
        address, count = max(counts, key=lambda each: each[1], default=("any", 0))
        events = ", ".join(f"{number} {name}" for name, number in self._events.items())
        log.warning("connections: %s; %d are open, %d of them from %s", events, self._total, count, address)
        self._events.clear()
        self._said_at = now


def raise_file_limit() -> int:
    """Let this process, and those that it starts, open as many files as the system allows it. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft
