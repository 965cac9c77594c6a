"""Blocking work beside an event loop, in a thread that nobody has to wait for."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread and return its result.

    Cancellation: returns at once and abandons the thread. An executor would be joined at exit, so that
    Ctrl-C during a download waited for the download.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()  # from here on a cancelled waiter cannot make `set_result` fail

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(outcome)
