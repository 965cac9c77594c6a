"""The processor time of some work on a machine that may be busy."""

import time
from collections.abc import Callable

TRIES = 20


def least_time(work: Callable[[], object], enough_s: float) -> float:
    """Seconds of this thread, the least of so many tries; the first that takes no longer than enough is the last.

    A try takes up to three times as long beside other processes that use the same caches, or if garbage is collected.
    """
    seconds = float("inf")
    for _ in range(TRIES):
        begun = time.thread_time()
        work()
        seconds = min(seconds, time.thread_time() - begun)
        if seconds < enough_s:
            break
    return seconds
