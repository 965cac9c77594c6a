"""One connection of the HTTP server: uvicorn's protocol with limits that it has not.

connect ── head within `header_timeout_s` ── body, read by the app ── answer ── silent, up to uvicorn's keep-alive
                                                                        │
                    an answer before the request's end: what still comes is dropped, and the connection ends

What arrives is parsed in turns of the event loop, TURN_BYTES in each, so a client that sends much takes turns with the
streams of all others (`loop_turns.py`). Reading pauses meanwhile.
"""

import asyncio
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from overlap_spec.config import HttpLimits
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.loop_turns import LoopTurns
from overlap_spec.entrypoints.protection.body_limits import refuse_body
from overlap_spec.entrypoints.protection.connections import Connections
from overlap_spec.entrypoints.protection.http_parser import BoundedConnection
from overlap_spec.entrypoints.protection.lingering import LingeringTransport

TURN_BYTES = 16 << 10  # that a turn of the event loop gives the parser
MOST_AHEAD = 64 << 10  # bytes of later requests that are read while one is answered
MOST_REFUSED = 64  # refused connections that are told why; further ones just end


class HttpProtocol(H11Protocol):
    """A connection. Made by `protocol_factory`."""

    limits: HttpLimits
    connections_of_server: Connections
    refused: set[H11Protocol]
    turns: LoopTurns

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn: BoundedConnection = BoundedConnection()
        self._arrived = bytearray()  # and not parsed yet
        self._timer: asyncio.TimerHandle | None = None  # bounds the wait for a head
        self._is_silent = True
        self.address = ""
        self._lingering: LingeringTransport

    # --- events of the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._lingering = LingeringTransport(cast(asyncio.Transport, transport), self._is_sending, self._go_on)
        super().connection_made(self._lingering)
        self.address = self.client[0] if self.client else ""
        if self.connections_of_server.opened(self):
            self._wait_for_head(True)
        else:
            self._refuse_connection()

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        if not self.turns.waits(self) and not self.turns.take(self):
            self._lingering.hold(True)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections_of_server.closed(self)
        self.refused.discard(self)
        self._wait_for_head(False)
        self._lingering.lost()
        self._arrived.clear()
        self._go_on()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """The parser has found no HTTP."""
        self._refuse(Problem(400, "the request is not valid HTTP", code="invalid_http"))

    # --- turns ---

    def parse(self) -> None:
        """Give the parser some of what has arrived."""
        left = TURN_BYTES
        try:
            while left > 0 and self._arrived and self._may_parse():
                part = bytes(self._arrived[: self.conn.num_taken(self._arrived, left)])
                del self._arrived[: len(part)]
                left -= len(part)
                super().data_received(part)
                self.conn.check_chunks()
        except Problem as problem:
            self._refuse(problem)
        self._watch()
        self._go_on()

    def _may_parse(self) -> bool:
        return self.conn.parses and not self.flow.read_paused and not self.transport.is_closing()

    def _go_on(self) -> None:
        """Drop what has arrived, or parse it in the next turn, or leave it until the app reads on."""
        if self.conn.is_refused or self.transport.is_closing():
            self._lingering.drain(len(self._arrived))
            self._arrived.clear()
        waits = bool(self._arrived) and self._may_parse()
        if not waits:
            self.turns.leave(self)
        elif not self.turns.waits(self):
            self.turns.wait(self)
        self._lingering.hold(waits or len(self._arrived) > MOST_AHEAD)

    # --- limits ---

    def close_silent(self) -> None:
        """End a connection on which no request is in progress."""
        self.transport.close()

    def _watch(self) -> None:
        """Bound the wait for a head, and say whether a request is in progress."""
        if self.transport.is_closing():
            self._wait_for_head(False)
            return
        is_idle = self.conn.their_state is h11.IDLE
        if is_idle != self._is_silent:
            self._is_silent = is_idle
            self.connections_of_server.set_silent(self, is_idle)
        self._wait_for_head(self.conn.has_part_of_head)

    def _wait_for_head(self, waits: bool) -> None:
        """Start the timer, unless it runs, or stop it."""
        if waits == (self._timer is not None):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self.limits.header_timeout_s, self._end_silence) if waits else None

    def _end_silence(self) -> None:
        if self.transport.is_closing():
            return
        self.connections_of_server.note("closed waiting for the head of a request")
        if self.conn.has_part_of_head:
            text = f"the head of the request did not come within {self.limits.header_timeout_s:g} s"
            self._say(Problem(408, text, code="slow_request"))
        self.transport.close()

    def _is_sending(self) -> bool:
        """Whether the client may be in the midst of a request."""
        in_request = self.conn.their_state in (h11.SEND_BODY, h11.ERROR) or self.conn.has_part_of_head
        return in_request or bool(self._arrived) or self.conn.is_refused or self in self.refused

    def _refuse(self, problem: Problem) -> None:
        """Parse nothing more of the connection. A request whose body is being read is answered by the app."""
        self.conn.is_refused = True
        problem.__traceback__ = None  # it would keep what has just been read until cycles are collected
        self.connections_of_server.note(f"refused for a bad request ({problem.code})")
        if self.cycle is not None and not self.cycle.response_complete:
            refuse_body(self.scope["state"], problem)
            self.cycle.message_event.set()
        else:
            self._say(problem)
            self.transport.close()

    def _refuse_connection(self) -> None:
        if len(self.refused) >= MOST_REFUSED:
            self.transport.abort()
            return
        self.refused.add(self)
        self._say(Problem(503, "there are too many connections: close those that are not needed", code="overloaded"))
        self.transport.close()

    def _say(self, problem: Problem) -> None:
        """Answer where no app does."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
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
    Limited.turns = LoopTurns()
    return Limited
