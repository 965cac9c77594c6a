"""Turns for work of which only so much is done at once.

    a: 1 2 3 4          num_at_once = 1       order: a1  b1  a2  c1  a3  a4
    b:  1
    c:      1

An owner's next piece of work waits behind one piece of every other owner that waits, whatever it has queued itself.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


class Turns(Generic[Owner]):
    """Lets in `num_at_once` pieces of work at a time."""

    def __init__(self, num_at_once: int) -> None:
        self._free = num_at_once
        self._waiting: OrderedDict[Owner, deque[asyncio.Future[None]]] = OrderedDict()  # the next owner first

    def of(self, owner: Owner) -> int:
        """How many pieces of work of an owner wait."""
        return len(self._waiting.get(owner, ()))

    @asynccontextmanager
    async def turn(self, owner: Owner) -> AsyncIterator[None]:
        """Wait for a turn, and hold it for the block. Cancellation: gives the place up."""
        await self._take(owner)
        try:
            yield
        finally:
            self._give()

    async def _take(self, owner: Owner) -> None:
        if self._free:
            self._free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._give()  # the turn came just before it was given up
            else:
                self._leave(owner, place)
            raise

    def _give(self) -> None:
        """Hand a turn to the owner that waits longest for one."""
        while self._waiting:
            owner, places = self._waiting.popitem(last=False)
            place = places.popleft()
            if places:
                self._waiting[owner] = places
            if not place.cancelled():  # a task that was cancelled has yet to run, to leave
                place.set_result(None)
                return
        self._free += 1

    def _leave(self, owner: Owner, place: "asyncio.Future[None]") -> None:
        places = self._waiting.get(owner, deque())
        if place in places:
            places.remove(place)
            if not places:
                del self._waiting[owner]
