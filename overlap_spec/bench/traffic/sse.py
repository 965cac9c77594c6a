"""Reads a streamed HTTP answer at the least cost: bytes are searched, and no event is decoded.

A time is taken for each read of the socket. Events that are read together count as one arrival of tokens: to the reader
they came at the same time. Tokens are counted by the usage that events carry; a server that sends none is counted by
events.
"""

import asyncio
from array import array
from collections.abc import Callable
from enum import StrEnum
from typing import cast

USAGE = b'"completion_tokens":'
NO_CHOICES = (b'"choices":[]', b'"choices": []')
EVENT, ERROR, DONE = b"data: {", b'data: {"error"', b"data: [DONE]"
MOST_OF_AN_ERROR = 300  # bytes of a refusal that are kept

Clock = Callable[[], float]


class CountedBy(StrEnum):
    """How the tokens of an answer were counted, the most exact way first."""

    USAGE = "usage"  # of every event
    LAST_USAGE = "last usage"  # the total; arrivals by events
    EVENTS = "events"  # an event may have had several tokens


class TokenCounter:
    """Counts the tokens of an event stream. `tokens`: so far."""

    def __init__(self) -> None:
        self.tokens = 0
        self.counted_by = CountedBy.EVENTS
        self.done = False
        self.error = b""
        self._rest = b""  # an event's beginning

    def feed(self, payload: bytes) -> bool:
        """Read what has come. Returns whether it has new tokens."""
        text = self._rest + payload if self._rest else payload
        end = text.rfind(b"\n\n")
        if end < 0:
            end = text.rfind(b"\n\r\n")
        if end < 0:
            self._rest = text
            return False
        end += 2
        self._rest = text[end:].lstrip(b"\n")
        before = self.tokens
        at = text.rfind(USAGE, 0, end)
        if at < 0:
            self.tokens += _token_events(text, end)
        elif self._read_usage(text, at, end):
            before = self.tokens  # a total that came without tokens
        if text.find(DONE, 0, end) >= 0:
            self.done = True
        if (found := text.find(ERROR, 0, end)) >= 0:
            self.error = text[found : found + MOST_OF_AN_ERROR]
        return self.tokens > before

    def _read_usage(self, text: bytes, at: int, end: int) -> bool:
        """Take the newest usage. Returns whether it is the total of a stream without running usage, and came alone."""
        digits = at + len(USAGE)
        total = int(text[digits : digits + 12].split(b",", 1)[0].split(b"}", 1)[0])
        start = text.rfind(b"\n\n", 0, at) + 2 if b"\n\n" in text[:at] else 0
        is_summary = any(text.find(word, start, at) >= 0 for word in NO_CHOICES)
        if not is_summary or text.find(USAGE, 0, start) >= 0:
            self.counted_by = CountedBy.USAGE
        came_alone = is_summary and self.counted_by is not CountedBy.USAGE and not _token_events(text, end)
        if is_summary and self.counted_by is CountedBy.EVENTS:
            self.counted_by = CountedBy.LAST_USAGE
        self.tokens = total
        return came_alone


class Chunks:
    """Takes the framing of `Transfer-Encoding: chunked` away."""

    def __init__(self) -> None:
        self.ended = False
        self._left = 0  # bytes of the current chunk, its line break included
        self._rest = b""  # of a size line

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`. Raises: ValueError for a size that is no number."""
        if self.ended:
            return b""
        if self._rest:
            data, self._rest = self._rest + data, b""
        if self._left > len(data):  # a large chunk that goes on
            return self._take(data)
        parts = []
        at = 0
        while at < len(data):
            if not self._left:
                line_end = data.find(b"\r\n", at)
                if line_end < 0:
                    self._rest = data[at:]
                    break
                size = int(data[at:line_end].split(b";", 1)[0], 16)
                if not size:
                    self.ended = True
                    break
                at, self._left = line_end + 2, size + 2
            part = data[at : at + self._left]
            at += len(part)
            parts.append(self._take(part))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take(self, part: bytes) -> bytes:
        """What of `part` is payload; the last two bytes of a chunk are a line break."""
        payload = part[: max(0, self._left - 2)]
        self._left -= len(part)
        return payload


class Record:
    """What is recorded of an answer while it comes.

    `times`: when tokens came, in seconds; `tokens`: how many so far. `error`: its kind, empty if all is well; `detail`:
    what the server wrote about it.
    """

    def __init__(self) -> None:
        self.times = array("d")
        self.longest_gap = 0.0
        self.tokens = 0
        self.counted_by = CountedBy.EVENTS
        self.error = self.detail = ""

    def add(self, now: float, total: int) -> None:
        """Record an arrival of tokens, of which there are `total` by then."""
        if self.times and now - self.times[-1] > self.longest_gap:
            self.longest_gap = now - self.times[-1]
        self.times.append(now)
        self.tokens = total


class Answer(asyncio.Protocol):
    """One request and its answer on a connection of its own. `ended`: its record is complete."""

    def __init__(self, request: bytes, record: Record, clock: Clock) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._counter = TokenCounter()
        self._request = request
        self._record = record
        self._clock = clock
        self._status = ""  # a kind of error, unless the status is 200
        self._head: bytes | None = b""  # None: it has been read
        self._chunks: Chunks | None = None
        self._refusal = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        if self._head is not None:
            data = self._read_head(data)
        try:
            payload = self._chunks.feed(data) if self._chunks is not None else data
            came = bool(payload) and not self._status and self._counter.feed(payload)
        except ValueError:
            return self._finish("malformed answer")
        if came:
            self._record.add(now, self._counter.tokens)
        if self._status:
            self._refusal += payload
        elif self._counter.error:
            self._refusal = self._counter.error
            return self._finish("error event")
        if self._counter.done or (self._chunks is not None and self._chunks.ended):
            self._finish(self._status or ("" if self._counter.done else "no [DONE]"))

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(self._status or "connection lost")

    def close(self) -> None:
        """Leave the connection; the server sees a client that has gone."""
        if self._transport is not None:
            self._transport.abort()

    def _read_head(self, data: bytes) -> bytes:
        """Read status and headers. Returns what follows them."""
        assert self._head is not None
        head, found, body = (self._head + data).partition(b"\r\n\r\n")
        if not found:
            self._head = head
            return b""
        self._head = None
        lines = head.lower().split(b"\r\n")
        status = lines[0].split(b" ")[1] if b" " in lines[0] else b"?"
        if status != b"200":
            self._status = f"HTTP {status.decode(errors='replace')}"
        if any(line.startswith(b"transfer-encoding:") and b"chunked" in line for line in lines):
            self._chunks = Chunks()
        return body

    def _finish(self, error: str) -> None:
        if not self.ended.done():
            record, counter = self._record, self._counter
            record.error, record.detail = error, self._refusal[:MOST_OF_AN_ERROR].decode(errors="replace")
            record.tokens, record.counted_by = counter.tokens, counter.counted_by
            self.ended.set_result(None)
            self.close()


def _token_events(text: bytes, end: int) -> int:
    """The events in `text` that may have tokens."""
    return text.count(EVENT, 0, end) - sum(text.count(word, 0, end) for word in NO_CHOICES)
