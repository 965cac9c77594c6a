"""How long an event loop works at once, as a test sees it."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager


class LongestTurn:
    """Seconds of this thread's CPU time that the longest callback of the loop has taken."""

    def __init__(self) -> None:
        self.seconds = 0.0


@contextmanager
def longest_turn() -> Iterator[LongestTurn]:
    """Look at every callback in the block, of loops in Python (asyncio's own)."""
    run = asyncio.Handle._run
    found = LongestTurn()

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        found.seconds = max(found.seconds, time.thread_time() - began)

    asyncio.Handle._run = timed
    try:
        yield found
    finally:
        asyncio.Handle._run = run
