"""A transport that lets the client read the answer before its connection ends.

To close a socket with bytes that were not read resets the connection, and may take the answer from the client. So while
the client still sends, closing ends this side only, and what comes is thrown away, for a time and up to a size.

Reading pauses while either of two wants it: the app, which has enough of a body, or the protocol, which has bytes that
are not parsed yet.
"""

import asyncio
from collections.abc import Callable
from typing import Any

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
