"""Parses what connections have sent, and leaves most of each turn of the event loop to others.

    a turn of the loop   | parse a, b, c, ..: up to TURN_S in all | streams, answers, .. | parse what waits: d, e, a, ..

A turn of the loop runs all that is ready. With a hundred connections that send, bounds on each alone add up.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

TURN_S = 0.005  # of this thread's CPU time, for all connections together


class Parses(Protocol):
    """A connection."""

    def parse(self) -> None:
        """Parse a little. It may wait for another turn then."""
        ...


class LoopTurns:
    """The connections of one server."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._waiting: OrderedDict[Parses, None] = OrderedDict()  # the next one first
        self._spent_s = 0.0  # in this turn of the loop
        self._next: asyncio.Handle | None = None  # the begin of the next one

    def waits(self, connection: Parses) -> bool:
        """Whether its turn is still to come."""
        return connection in self._waiting

    def take(self, connection: Parses) -> bool:
        """Parse at once, if nothing waits and there is time, else in a turn to come. Returns whether it was at once."""
        if self._waiting or self._spent_s >= TURN_S:
            self.wait(connection)
            return False
        self._run(connection)
        return True

    def wait(self, connection: Parses) -> None:
        """Parse in a turn to come, after those that wait already."""
        self._waiting[connection] = None
        self._expect_next()

    def leave(self, connection: Parses) -> None:
        """It has nothing to parse any more."""
        self._waiting.pop(connection, None)

    def _begin(self) -> None:
        """Another turn of the loop. A connection has one part of it at most."""
        self._next, self._spent_s = None, 0.0
        for _ in range(len(self._waiting)):
            if not self._waiting or self._spent_s >= TURN_S:
                break
            self._run(self._waiting.popitem(last=False)[0])
        if self._waiting:
            self._expect_next()

    def _run(self, connection: Parses) -> None:
        began = self._clock()
        try:
            connection.parse()
        finally:
            self._spent_s += self._clock() - began
            self._expect_next()

    def _expect_next(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._begin)
