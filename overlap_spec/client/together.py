"""Requests that one reader follows: they reach the engine together, and what has come for any of them is taken at once.

    async with client.together() as running:
        await running.start([Generate("a", ..), Generate("b", ..)])
        for request_id, answer in await running.take(): ..

What they share travels once (`shared_parts.py`). Leaving the block ends those that still run: their Cancels leave at
once.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Self

from overlap_spec.client.answers import Arrivals, Delta, error_in
from overlap_spec.client.calls import Calls
from overlap_spec.errors import OverlapSpecError
from overlap_spec.messages import Generate

Send = Callable[[Sequence[Generate]], None]


class Together:
    """Made by `Client.together`. `leave`: cancels requests, of which nothing more is wanted."""

    def __init__(self, calls: Calls, send: Send, leave: Callable[[Collection[str]], None]) -> None:
        self._calls = calls
        self._send = send
        self._leave = leave
        self._arrivals = Arrivals()
        self._running: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._leave(self._running)

    async def start(self, requests: Sequence[Generate]) -> None:
        """Send requests, which are computed together. Raises: as `Client.generate`; then none of them was sent.

        Cancellation: nothing was sent.
        """
        for request in requests:
            await self._calls.until_free(request.request_id)
        opened: list[str] = []
        try:
            for request in requests:
                self._calls.open(request.request_id, self._arrivals.answers(request.request_id))
                opened.append(request.request_id)
            self._send(requests)
        except BaseException:
            for request_id in opened:
                self._calls.close(request_id)
            raise
        self._running.update(opened)

    async def take(self) -> list[tuple[str, Delta | OverlapSpecError]]:
        """What has come, at least one answer: the last one of a request is a delta with a finish, or an error.

        Cancellation: loses nothing.
        """
        found: list[tuple[str, Delta | OverlapSpecError]] = []
        for request_id, answer in await self._arrivals.take():
            if request_id not in self._running:
                continue  # what follows its last answer
            taken = answer if isinstance(answer, Delta) else error_in(answer)
            if not isinstance(taken, Delta) or taken.finish is not None:
                self._running.remove(request_id)
                self._calls.close(request_id)
            found.append((request_id, taken))
        return found
