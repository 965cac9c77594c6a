"""ASGI middleware: bounds what bodies take, in time and in bytes, of each address and in all.

Bytes count until their request is answered: its prompt is kept as long.
"""

import asyncio
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overlap_spec.config import HttpLimits
from overlap_spec.entrypoints.http.errors import Problem

MIN_RATE = 1000  # bytes per second: a body that comes faster is waited for to its end
REFUSED = "refused_body"  # in the scope's state: why the rest of a body is not parsed


def refuse_body(state: MutableMapping[str, Any], problem: Problem) -> None:
    """Let the next read of a request's body fail. `state`: of its scope."""
    state[REFUSED] = problem


class BodyBounds:
    """Wraps what an app receives. A body that is too slow is a 408, one for which there is no room a 503."""

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self._app = app
        self._timeout_s = limits.body_timeout_s
        self._most, self._most_of_address = limits.max_bytes, limits.max_bytes_per_address
        self._total = 0
        self._by_address: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        address = (scope.get("client") or ("",))[0]
        state = scope.setdefault("state", {})
        body = _Body(receive, self._timeout_s, lambda num_bytes: self._take(address, num_bytes), state)
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._give(address, body.num_bytes)

    def _take(self, address: str, num_bytes: int) -> None:
        mine = self._by_address.get(address, 0) + num_bytes
        self._by_address[address] = mine
        self._total += num_bytes
        if mine > self._most_of_address:
            what = f"{mine} bytes of bodies from this address"
        elif self._total > self._most:
            what = f"{self._total} bytes of bodies"
        else:
            return
        raise Problem(503, f"{what} wait for their answers: no room for more now", code="overloaded")

    def _give(self, address: str, num_bytes: int) -> None:
        self._total -= num_bytes
        left = self._by_address.pop(address, 0) - num_bytes
        if left:
            self._by_address[address] = left


class _Body:
    """The body of one request."""

    def __init__(
        self, receive: Receive, timeout_s: float, take: Callable[[int], None], state: Mapping[str, Any]
    ) -> None:
        self.num_bytes = 0
        self._state = state
        self._receive = receive
        self._take = take
        self._timeout_s = timeout_s
        self._begun = asyncio.get_running_loop().time()
        self._is_read = False

    async def receive(self) -> Message:
        """The next message of the server. Raises: Problem."""
        if self._is_read:
            return await self._receive()
        deadline = self._begun + self._timeout_s + self.num_bytes / MIN_RATE
        try:
            async with asyncio.timeout_at(deadline):
                message = await self._receive()
        except TimeoutError:
            text = f"{self.num_bytes} bytes of the body have come: too slowly, or no more within {self._timeout_s:g} s"
            raise Problem(408, text, code="slow_request") from None
        if REFUSED in self._state:
            raise self._state[REFUSED]
        self._is_read = message["type"] != "http.request" or not message.get("more_body", False)
        size = len(message.get("body", b""))
        self.num_bytes += size
        self._take(size)
        return message
