"""Bounds the connections of the HTTP server, in number, at their end, and in what bodies take.

**How many.** A connection is *silent* while no request is in progress on it: before its first, or between two. When
there are too many of an address, or in all, the one that has been silent longest is closed for the new one: silent
connections keep no client out. If none is silent the new one is refused.

**The end.** The client may read the answer before its connection ends. To close a socket with bytes that were not read
resets the connection, and may take the answer from the client. So while the client still sends, closing ends this side
only, and what comes is thrown away, for a time and up to a size.

Reading pauses while either of two wants it: the app, which has enough of a body, or the protocol, which has bytes that
are not parsed yet.

**Bodies** are bounded in time and in bytes, of each address and in all. Bytes count until their request is answered:
its prompt is kept as long.
"""

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overlap_spec.config import HttpLimits
from overlap_spec.entrypoints.http.errors import Problem

MOST_FILES = 1 << 20  # some systems allow more than they could ever hold
OTHER_FILES = 256  # that the server's process needs beside connections
SAID_EVERY_S = 10.0

log = logging.getLogger(__name__)


class Closable(Protocol):
    """A connection."""

    @property
    def address(self) -> str: ...
    def close_silent(self) -> None: ...


class Connections:
    """All open connections."""

    def __init__(self, limits: HttpLimits, most_files: int) -> None:
        self._most = max(1, min(limits.max_connections, most_files - OTHER_FILES))
        self._most_of_address = min(limits.max_connections_per_address, self._most)
        self._silent: dict[Closable, None] = {}  # those silent longest first
        self._by_address: dict[str, dict[Closable, bool]] = {}  # in the same order; whether they are silent
        self._total = 0
        self._events: Counter[str] = Counter()
        self._said_at = float("-inf")

    def __len__(self) -> int:
        return self._total

    def opened(self, connection: Closable) -> bool:
        """Add a connection, which is silent. Returns False if it is to be refused."""
        mine = self._by_address.get(connection.address, {})
        if len(mine) >= self._most_of_address:
            oldest = next((each for each, is_silent in mine.items() if is_silent), None)
        elif self._total >= self._most:
            oldest = next(iter(self._silent), None)
        else:
            oldest = connection
        if oldest is None:
            self.note("refused")
            return False
        if oldest is not connection:
            self.note("closed while silent, for new ones")
            self.closed(oldest)
            oldest.close_silent()
        self._by_address.setdefault(connection.address, {})[connection] = True
        self._silent[connection] = None
        self._total += 1
        return True

    def closed(self, connection: Closable) -> None:
        """Forget a connection; a second call does nothing."""
        mine = self._by_address.get(connection.address, {})
        if mine.pop(connection, None) is None:
            return
        self._silent.pop(connection, None)
        self._total -= 1
        if not mine:
            del self._by_address[connection.address]

    def set_silent(self, connection: Closable, is_silent: bool) -> None:
        """A request begins on a connection, or has ended."""
        mine = self._by_address.get(connection.address, {})
        if mine.pop(connection, None) is None:
            return
        mine[connection] = is_silent
        self._silent.pop(connection, None)
        if is_silent:
            self._silent[connection] = None

    def note(self, what: str) -> None:
        """Count an event; the log gets one line for many."""
        self._events[what] += 1
        now = time.monotonic()
        if now - self._said_at < SAID_EVERY_S:
            return
        counts = ((name, len(mine)) for name, mine in self._by_address.items())
        address, count = max(counts, key=lambda each: each[1], default=("any", 0))
        events = ", ".join(f"{number} {name}" for name, number in self._events.items())
        log.warning("connections: %s; %d are open, %d of them from %s", events, self._total, count, address)
        self._events.clear()
        self._said_at = now


def raise_file_limit() -> int:
    """Let this process, and those that it starts, open as many files as the system allows it. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


LINGER_S = 10.0
MOST_BYTES = 16 << 20


class LingeringTransport(asyncio.Transport):
    """What the HTTP protocol uses of a transport.

    `is_sending`: whether the client is in the midst of a request. `resumed`: is called when the app reads on.
    """

    def __init__(
        self, inner: asyncio.Transport, is_sending: Callable[[], bool], resumed: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._inner = inner
        self._is_sending = is_sending
        self._resumed = resumed
        self._is_closing = False
        self._app_pauses = self._is_held = self._is_paused = False
        self._num_drained = 0
        self._end: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Close, at once or when the client has stopped sending."""
        if self._is_closing:
            return
        self._is_closing = True
        if not self._is_sending() or self._inner.is_closing() or not self._inner.can_write_eof():
            self._inner.close()
            return
        self._settle_reading()
        self._inner.write_eof()
        self._end = asyncio.get_running_loop().call_later(LINGER_S, self._inner.abort)

    def drain(self, num_bytes: int) -> None:
        """Bytes have come that nothing reads."""
        self._num_drained += num_bytes
        if self._num_drained > MOST_BYTES:
            self._inner.abort()

    def lost(self) -> None:
        """The connection has ended."""
        self._is_closing = True
        if self._end is not None:
            self._end.cancel()

    def abort(self) -> None:
        self._inner.abort()

    def is_closing(self) -> bool:
        return self._is_closing or self._inner.is_closing()

    def write(self, data: Any) -> None:
        self._inner.write(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def hold(self, is_held: bool) -> None:
        """Whether the protocol has enough for now."""
        self._is_held = is_held
        self._settle_reading()

    def pause_reading(self) -> None:
        self._app_pauses = True
        self._settle_reading()

    def resume_reading(self) -> None:
        self._app_pauses = False
        self._resumed()
        self._settle_reading()

    def _settle_reading(self) -> None:
        pauses = (self._app_pauses or self._is_held) and not self._is_closing
        if pauses == self._is_paused or self._inner.is_closing():
            return
        self._is_paused = pauses
        if pauses:
            self._inner.pause_reading()
        else:
            self._inner.resume_reading()


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
