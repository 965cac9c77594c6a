"""A transport that lets the client read the answer before its connection ends.

To close a socket with bytes that were not read resets the connection, and may take the answer from the client. So while
the client still sends, closing ends this side only, and what comes is thrown away, for a time and up to a size.
"""

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_S = 2.0
MOST_BYTES = 16 << 20


class LingeringTransport(asyncio.Transport):
    """What the HTTP protocol uses of a transport. `is_sending`: whether the client is in the midst of a request."""

    def __init__(self, inner: asyncio.Transport, is_sending: Callable[[], bool]) -> None:
        super().__init__()
        self._inner = inner
        self._is_sending = is_sending
        self._is_closing = False
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
        self._inner.resume_reading()
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

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()
