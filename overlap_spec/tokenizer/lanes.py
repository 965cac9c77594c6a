"""Threads for prompts: a short one never waits behind long ones, and what waits is bounded.

    up to LONG characters      at once, in the event loop
    up to VERY_LONG            one lane
    longer                     another lane, in pieces: each waits for its turn, so long prompts share it

Work that has not begun is dropped when its caller is cancelled.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from overlap_spec.errors import Overloaded
from overlap_spec.ipc.byte_budget import ByteBudget

T = TypeVar("T")

LONG = 2_000  # characters or ids: about a millisecond of work
VERY_LONG = 32_768  # characters: some 20 ms of work
MOST_THREADS = 4  # of each lane


class Lanes:
    """Two pools of threads. `budget` bounds the characters of texts that are held for them, by client and in all."""

    def __init__(self, budget: ByteBudget[int]) -> None:
        self._budget = budget
        num_cores = len(os.sched_getaffinity(0))
        self._num_threads = [min(MOST_THREADS, max(1, num_cores // share)) for share in (2, 4)]  # long, very long
        self._long = ThreadPoolExecutor(self._num_threads[0], "encode")
        self._very_long = ThreadPoolExecutor(self._num_threads[1], "encode-long")

    @contextmanager
    def holding(self, client: int, num_chars: int) -> Iterator[None]:
        """Hold a text while it waits and is worked on. Raises: Overloaded."""
        if not self._budget.take(client, num_chars):
            text = f"{self._budget.total} characters of prompts wait to be encoded, {self._budget.of(client)} of yours"
            raise Overloaded(f"{text}: no room for {num_chars} more now")
        try:
            yield
        finally:
            self._budget.give(client, num_chars)

    def num_threads(self, num_chars: int) -> int:
        """How many threads there are for a text of so many characters."""
        return self._num_threads[num_chars > VERY_LONG]

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """Do work on a text of so many characters.

        Cancellation: work that has not begun is dropped; else it ends in its thread and its result is dropped.
        """
        lane = self._very_long if num_chars > VERY_LONG else self._long
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        """Drop what has not begun; what has begun ends."""
        for lane in (self._long, self._very_long):
            lane.shutdown(wait=False, cancel_futures=True)
