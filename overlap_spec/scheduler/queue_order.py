"""Which of a client's waiting requests gets a slot next (`--schedule-policy`)."""

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from overlap_spec.scheduler.request_pages import RequestPages
from overlap_spec.scheduler.requests import Request

MOST_PASSED = 16  # requests that may go before the oldest one
MOST_MATCHED = 32  # requests that are looked up in the prefix cache: the oldest


class QueueOrder(Protocol):
    """Chooses from the waiting requests of one client."""

    def next(self, waiting: deque[Request]) -> Request:
        """The one whose turn it is. `waiting`: oldest first, and not empty."""
        ...


class FirstCome:
    """The oldest."""

    def __init__(self, memory: RequestPages) -> None: ...

    def next(self, waiting: deque[Request]) -> Request:
        return waiting[0]


class LongestPrefix:
    """The one with the longest cached prefix, but the oldest after it has been passed `MOST_PASSED` times."""

    def __init__(self, memory: RequestPages) -> None:
        self._memory = memory

    def next(self, waiting: deque[Request]) -> Request:
        oldest = waiting[0]
        if len(waiting) == 1 or oldest.passed >= MOST_PASSED:
            return oldest
        return max(islice(waiting, MOST_MATCHED), key=lambda request: len(self._memory.match(request).pages))


QUEUE_ORDERS: dict[str, Callable[[RequestPages], QueueOrder]] = {"fcfs": FirstCome, "lpm": LongestPrefix}
