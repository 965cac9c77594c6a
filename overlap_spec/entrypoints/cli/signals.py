"""SIGINT, SIGTERM and SIGHUP in an event loop: the first asks for a stop, the next forces it.

A SIGHUP that is ignored when the program starts (nohup) stays ignored. It never forces: a terminal that closes may send
it twice, itself and by its shell.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Handles them inside its block. The first signal sets `asked`; a later one calls `force`."""

    def __init__(self, force: Callable[[], None]) -> None:
        self.asked = asyncio.Event()
        self._force = force
        self._loop = asyncio.get_running_loop()
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._numbers = [number for number in STOPPING if not (ignored and number is signal.SIGHUP)]

    def __enter__(self) -> Self:
        for number in self._numbers:
            self._loop.add_signal_handler(number, self._handle, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._numbers:
            self._loop.remove_signal_handler(number)

    async def interrupt(self, work: Coroutine[Any, Any, object]) -> bool:
        """Run `work` to its end, or cancel it when a stop is asked for: then True. Raises: what `work` raises."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self.asked.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return not task.done()
        finally:
            task.cancel()
            asked.cancel()
            await asyncio.wait((task, asked))

    def _handle(self, number: signal.Signals) -> None:
        if self.asked.is_set() and number is not signal.SIGHUP:
            self._force()
        self.asked.set()
