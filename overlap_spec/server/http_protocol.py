"""One connection of the HTTP server: uvicorn's protocol with limits that it has not.

connect ── head within `header_timeout_s` ── body, read by the app ── answer ── silent, up to uvicorn's keep-alive
                                                                        │
                             what the client still sends after its answer: REST_S and MOST_BYTES, then the end
"""

import asyncio
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from overlap_spec.config import HttpLimits
from overlap_spec.server.connections import Connections
from overlap_spec.server.lingering import MOST_BYTES, LingeringTransport
from overlap_spec.server.problems import Problem

REST_S = 10.0  # for the rest of a request that was answered before it was read
CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
MOST_REFUSED = 64  # refused connections that are told why; further ones just end


class StreamingConnection(h11.Connection):
    """Writes the chunks of a streamed answer itself: h11 checks each of them, and no state of it depends on them."""

    _is_chunked = False  # the head of an answer in chunks was the last that h11 has written

    def send(self, event: Any) -> Any:
        """See h11."""
        if self._is_chunked and type(event) is h11.Data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        written = super().send(event)
        self._is_chunked = type(event) is h11.Response and CHUNKED in written.lower()
        return written


class HttpProtocol(H11Protocol):
    """A connection. Made by `protocol_factory`."""

    limits: HttpLimits
    connections_of_server: Connections
    refused: set[H11Protocol]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = StreamingConnection(h11.SERVER)
        self._timer: asyncio.TimerHandle | None = None
        self._waits_for = ""  # what the timer bounds: a head, or the rest of a request
        self._num_rest = 0
        self._is_silent = True
        self.address = ""
        self._lingering: LingeringTransport

    # --- events of the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._lingering = LingeringTransport(cast(asyncio.Transport, transport), self._is_sending)
        super().connection_made(self._lingering)
        self.address = self.client[0] if self.client else ""
        if self.connections_of_server.opened(self):
            self._wait_for("head", self.limits.header_timeout_s)
        else:
            self._refuse_connection()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self._lingering.drain(len(data))
            return
        if self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self._num_rest += len(data)
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections_of_server.closed(self)
        self.refused.discard(self)
        self._wait_for("")
        self._lingering.lost()
        super().connection_lost(exc)

    # --- limits ---

    def close_silent(self) -> None:
        """End a connection on which no request is in progress."""
        self.transport.close()

    def _watch(self) -> None:
        """Bound what the connection waits for now, and say whether a request is in progress."""
        if self.transport.is_closing():
            self._wait_for("")
            return
        is_idle = self.conn.their_state is h11.IDLE
        if is_idle != self._is_silent:
            self._is_silent = is_idle
            self.connections_of_server.set_silent(self, is_idle)
        if is_idle and self.conn.trailing_data[0]:
            self._wait_for("head", self.limits.header_timeout_s)
        elif self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self._wait_for("rest", REST_S)
            if self._num_rest > MOST_BYTES:
                self._end_silence("rest")
        else:
            self._wait_for("")
            self._num_rest = 0

    def _wait_for(self, what: str, seconds: float = 0.0) -> None:
        """Start the timer for something else than before; for the same it runs on."""
        if what == self._waits_for:
            return
        self._waits_for = what
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._end_silence, what) if what else None

    def _end_silence(self, what: str) -> None:
        if self.transport.is_closing():
            return
        self.connections_of_server.note(f"closed waiting for the {what} of a request")
        if what == "head" and self.conn.trailing_data[0]:
            text = f"the head of the request did not come within {self.limits.header_timeout_s:g} s"
            self._say(Problem(408, text, code="slow_request"))
        self.transport.close()

    def _is_sending(self) -> bool:
        """Whether the client may be in the midst of a request."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR) or self in self.refused or self._has_part()

    def _has_part(self) -> bool:
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

    def _refuse_connection(self) -> None:
        if len(self.refused) >= MOST_REFUSED:
            self.transport.abort()
            return
        self.refused.add(self)
        self._say(Problem(503, "there are too many connections: close those that are not needed", code="overloaded"))
        self.transport.close()

    def _say(self, problem: Problem) -> None:
        """Answer where no app does."""
        answer = problem.response(headers={"connection": "close"})
        head = h11.Response(status_code=problem.status, headers=answer.raw_headers, reason=b"")
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")


def protocol_factory(limits: HttpLimits, most_files: int) -> type[HttpProtocol]:
    """The class of one server's connections, which share a count. `most_files`: as `raise_file_limit` returns."""

    class Limited(HttpProtocol):
        """Connections of one server."""

    Limited.limits = limits
    Limited.connections_of_server = Connections(limits, most_files)
    Limited.refused = set()
    return Limited
