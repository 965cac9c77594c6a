"""An event loop in a thread of its own, for a terminal that reads lines and takes Ctrl-C in the main thread.

The main thread reads lines and takes interrupts, so Ctrl-C ends only the call that it waits for, and the engine's
heartbeats go on while a person types.
"""

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines for a thread that is not asynchronous."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result.

        Cancellation: an interrupt of this thread cancels `work`, waits until it has cleaned up, and is raised.
        """
        job = _Job(work)
        try:
            self._loop.call_soon_threadsafe(job.start)
            job.ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(job.cancel)
            job.ended.wait()
            raise
        return job.result()


class _Job(Generic[T]):
    """A coroutine that one thread waits for and another runs. All but `ended` and `result` is the loop's."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.ended = threading.Event()
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(lambda task: self.ended.set())

    def cancel(self) -> None:
        if self._task is None:  # interrupted before the start was queued
            self._work.close()
            self.ended.set()
        else:
            self._task.cancel()

    def result(self) -> T:
        assert self._task is not None, "it has ended"
        return self._task.result()
