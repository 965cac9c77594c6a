"""One connection of the HTTP server: uvicorn's protocol with limits that it has not.

connect ── head within `header_timeout_s` ── body, read by the app ── answer ── silent, up to uvicorn's keep-alive
                                                                        │
                    an answer before the request's end: what still comes is dropped, and the connection ends

What arrives is parsed in turns of the event loop, TURN_BYTES in each, so a client that sends much takes turns with the
streams of all others. Reading pauses meanwhile.

    a turn of the loop   | parse a, b, c, ..: up to TURN_S in all | streams, answers, .. | parse what waits: d, e, a, ..

A turn of the loop runs all that is ready. With a hundred connections that send, bounds on each alone add up.

h11, which parses requests, has bounds on what it is given:

    a head     whole, up to HEAD_BYTES; its lines are counted before h11 looks at them
    a body     of a known length: up to its end. In chunks: CHUNKED_BYTES at a time, and the chunks are counted

h11's regular expressions take time quadratic in white space before a wrong character, so a run of it is bounded, too.
What is refused, or answered before its body has come, is parsed no further, and its answer ends the connection.
"""

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from overlap_spec.config import HttpLimits
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.protection.connections import Connections, LingeringTransport, refuse_body

TURN_S = 0.005  # of this thread's CPU time, for all connections together


class Parses(Protocol):
    """A connection."""

    def parse(self) -> None:
        """Parse a little. It may wait for another turn then."""


class LoopTurns:
    """The connections of one server."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._waiting: OrderedDict[Parses, None] = OrderedDict()  # the next one first
        self._spent_s = 0.0  # in this turn of the loop
        self._next: asyncio.Handle | None = None  # the begin of the next one

    def waits(self, connection: Parses) -> bool:
        """Whether its turn is still to come."""
        return connection in self._waiting

    def take(self, connection: Parses) -> bool:
        """Parse at once, if nothing waits and there is time, else in a turn to come. Returns whether it was at once."""
        if self._waiting or self._spent_s >= TURN_S:
            self.wait(connection)
            return False
        self._run(connection)
        return True

    def wait(self, connection: Parses) -> None:
        """Parse in a turn to come, after those that wait already."""
        self._waiting[connection] = None
        self._expect_next()

    def leave(self, connection: Parses) -> None:
        """It has nothing to parse any more."""
        self._waiting.pop(connection, None)

    def _begin(self) -> None:
        """Another turn of the loop. A connection has one part of it at most."""
        self._next, self._spent_s = None, 0.0
        for _ in range(len(self._waiting)):
            if not self._waiting or self._spent_s >= TURN_S:
                break
            self._run(self._waiting.popitem(last=False)[0])
        if self._waiting:
            self._expect_next()

    def _run(self, connection: Parses) -> None:
        began = self._clock()
        try:
            connection.parse()
        finally:
            self._spent_s += self._clock() - began
            self._expect_next()

    def _expect_next(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._begin)


HEAD_BYTES = 16 << 10
MOST_HEADER_LINES = 128
BLANKS = 256  # spaces and tabs in a row
CHUNKED_BYTES = 512  # fed at once; so much may the head of a chunk, or the trailers, have
FREE_CHUNKS = 512  # of any size
MEAN_CHUNK_BYTES = 128  # of a body with more chunks
CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
END_OF_HEAD = re.compile(rb"\n\r?\n")
AUTHORITY = re.compile(rb"(?i)https?://([^/?]*)")
CLOSE = (b"connection", b"close")


class BoundedConnection(h11.Connection):
    """The server's end of a connection."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES)
        self.is_refused = False  # nothing of the request that is being received is parsed any more
        self._is_chunked_answer = False  # the head of an answer in chunks was the last that h11 has written
        self._num_left: int | None = 0  # bytes of the body that have not come; None: it comes in chunks
        self._num_chunks = self._num_payload = 0

    @property
    def parses(self) -> bool:
        return not self.is_refused and self.their_state in (h11.IDLE, h11.SEND_BODY)

    @property
    def has_part_of_head(self) -> bool:
        """Whether a request has begun to come."""
        return self.their_state is h11.IDLE and bool(self.trailing_data[0])

    # --- what is received ---

    def num_taken(self, arrived: bytearray, most: int) -> int:
        """How many of the bytes that have arrived are to be received now, at most `most`. Raises: Problem."""
        if self.their_state is h11.IDLE:
            return self._num_of_head(arrived, most)
        return min(most, len(arrived), CHUNKED_BYTES if self._num_left is None else self._num_left)

    def next_event(self) -> Any:
        event = super().next_event()
        if type(event) is h11.Request:
            lengths = [int(value) for name, value in event.headers if name == b"content-length"]
            in_chunks = any(name == b"transfer-encoding" for name, _ in event.headers)
            if in_chunks and lengths:  # a proxy may have gone by the other one
                text = "a request has a Content-Length or a Transfer-Encoding, got both"
                raise Problem(400, text, code="invalid_http")
            self._num_left = None if in_chunks else sum(lengths[:1])
            self._num_chunks = self._num_payload = 0
            return _without_authority(event)
        elif type(event) is h11.Data:
            self._num_payload += len(event.data)
            self._num_chunks += event.chunk_start
            if self._num_left is not None:
                self._num_left -= len(event.data)
        return event

    def check_chunks(self) -> None:
        """Raises: Problem if the chunks that have come are too small, or one's head or the trailers too long."""
        if self.their_state is not h11.SEND_BODY or self._num_left is not None:
            return
        chunks, payload = self._num_chunks, self._num_payload
        if chunks > FREE_CHUNKS and payload < MEAN_CHUNK_BYTES * chunks:
            text = (
                f"the body: after {FREE_CHUNKS} chunks, chunks must have {MEAN_CHUNK_BYTES} bytes or more on average, "
                f"got {chunks} chunks with {payload} bytes together: send larger chunks, or a Content-Length"
            )
            raise Problem(400, text, code="small_chunks")
        if len(self.trailing_data[0]) > CHUNKED_BYTES:
            text = f"the body: the head of a chunk, or the trailers, may have {CHUNKED_BYTES} bytes, got more"
            raise Problem(431, text, code="large_chunk_head")

    def _num_of_head(self, arrived: bytearray, most: int) -> int:
        held = self.trailing_data[0]
        head = held + bytes(arrived[: max(0, min(most, HEAD_BYTES + 1 - len(held)))])
        end = END_OF_HEAD.search(head, max(0, len(held) - 3))
        if end is None and len(head) <= HEAD_BYTES:
            return len(head) - len(held)
        if end is None:
            raise Problem(431, f"the head of a request may have {HEAD_BYTES} bytes, got more", code="large_head")
        _check_head(head[: end.end()])
        return max(0, end.end() - len(held))

    # --- what is sent ---

    def send(self, event: Any) -> Any:
        """See h11, which checks each chunk of a streamed answer, though no state of it depends on them: not so here."""
        if self._is_chunked_answer and type(event) is h11.Data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        if type(event) is h11.Response and self.their_state in (h11.SEND_BODY, h11.ERROR):
            self.is_refused = True
            headers = [*(each for each in event.headers.raw_items() if each[0].lower() != CLOSE[0]), CLOSE]
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        written = super().send(event)
        self._is_chunked_answer = type(event) is h11.Response and CHUNKED in written.lower()
        return written


def _without_authority(request: h11.Request) -> h11.Request:
    """A target as proxies are given it is one of this server (RFC 9112, 3.2.2). Raises: Problem if Host disagrees."""
    found = AUTHORITY.match(request.target)
    if found is None:
        return request
    if found[1].lower() not in (value.lower() for name, value in request.headers if name == b"host"):
        raise Problem(400, "a target with a host needs a Host header with the same", code="invalid_http")
    return replace(request, target=b"/" + request.target[found.end() :].removeprefix(b"/"))


def _check_head(head: bytes) -> None:
    """Raises: Problem for what takes h11 long."""
    lines = head.count(b"\n") - 2
    if lines > MOST_HEADER_LINES:
        text = f"the head of a request may have {MOST_HEADER_LINES} header lines, got {lines}"
        raise Problem(431, text, code="large_head")
    if head.replace(b"\t", b" ").find(b" " * BLANKS) >= 0:
        text = f"the head of a request may have fewer than {BLANKS} spaces in a row, got more"
        raise Problem(400, text, code="large_head")


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

    def _unsupported_upgrade_warning(self) -> None:
        """Write no line: Java's client asks for HTTP/2 with every connection, and takes an answer without it."""

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
