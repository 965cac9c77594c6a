"""Sends one request to what is measured: an HTTP server, or the engine over ZMQ.

A streamed HTTP answer is read at the least cost: bytes are searched, and no event is decoded.

A time is taken for each read of the socket. Events that are read together count as one arrival of tokens: to the reader
they came at the same time. Tokens are counted by the usage that events carry; a server that sends none is counted by
events.
"""

import asyncio
import ssl
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from enum import StrEnum
from typing import Protocol, cast
from urllib.parse import urlsplit

import msgspec

from overlap_spec.bench.traffic.arrivals import Arrival, prompt_of
from overlap_spec.bench.traffic.processes import Target
from overlap_spec.client import Client
from overlap_spec.client.link import pack_ids
from overlap_spec.errors import OverlapSpecError, RequestError
from overlap_spec.messages import SamplingParams, TextPrompt, TokenPrompt

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


PATHS = {"completions": "/v1/completions", "generate": "/generate"}
PORTS = {"http": 80, "https": 443}


class Request(Protocol):
    """A request that is ready to be sent."""

    async def send(self, record: Record) -> None:
        """Send it and record its answer. Failures are recorded. Cancellation: leaves the server at once."""


class Sender(Protocol):
    """Makes requests of arrivals."""

    def prepare(self, arrival: Arrival, seed: int) -> Request:
        """Do all that can be done before the request is due. Raises: ValueError, RequestError for a bad body."""


@asynccontextmanager
async def sender_for(target: Target, clock: Clock = time.monotonic) -> AsyncGenerator[Sender, None]:
    """The sender for a target's URL."""
    if target.is_http:
        yield HttpSender(target, clock)
        return
    async with Client(target.url, target.api_key) as client:
        yield ZmqSender(target, client, clock)


class HttpSender:
    """A connection for each request. The body is made before."""

    def __init__(self, target: Target, clock: Clock) -> None:
        self._target = target
        self._clock = clock
        parts = urlsplit(target.url)
        self._path = parts.path.rstrip("/").removesuffix("/v1") + PATHS[target.endpoint]
        self._host, self._port = parts.hostname or "", parts.port or PORTS[parts.scheme]
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None

    def prepare(self, arrival: Arrival, seed: int) -> "HttpRequest":
        """The bytes of the whole request."""
        prompt = prompt_of(arrival, self._target.vocab_size, seed)
        make = _completion_body if self._target.endpoint == "completions" else _generate_body
        body = msgspec.json.encode(make(self._target, arrival, prompt))
        key = f"Authorization: Bearer {self._target.api_key}\r\n" if self._target.api_key else ""
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n{key}"
            f"Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return HttpRequest(self, head.encode() + body)

    async def connect(self, request: bytes, record: Record) -> Answer:
        """Open a connection and send. Raises: OSError."""
        loop = asyncio.get_running_loop()
        _, answer = await loop.create_connection(
            lambda: Answer(request, record, self._clock), self._host, self._port, ssl=self._ssl
        )
        return answer


class HttpRequest:
    """The bytes of one request."""

    def __init__(self, sender: HttpSender, request: bytes) -> None:
        self._sender = sender
        self._request = request

    async def send(self, record: Record) -> None:
        try:
            answer = await self._sender.connect(self._request, record)
        except OSError as error:
            record.error, record.detail = "cannot connect", str(error)
            return
        try:
            await answer.ended
        finally:
            answer.close()


class ZmqSender:
    """The engine's own client: token ids in and out, or a text."""

    def __init__(self, target: Target, client: Client, clock: Clock) -> None:
        self._body = target.body
        self._vocab_size = target.vocab_size
        self.client = client
        self.clock = clock

    def prepare(self, arrival: Arrival, seed: int) -> "ZmqRequest":
        """The prompt and the sampling parameters."""
        prompt = prompt_of(arrival, self._vocab_size, seed)
        fields = _sampling_fields(self._body, arrival)
        sampling = msgspec.convert(fields | {"max_new_tokens": arrival.output_len}, SamplingParams)
        if unknown := fields.keys() - set(SamplingParams.__struct_fields__):
            raise ValueError(f"{min(unknown)} is no sampling parameter")
        return ZmqRequest(
            self, TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(pack_ids(prompt)), sampling
        )


class ZmqRequest:
    """One call of the client."""

    def __init__(self, sender: ZmqSender, prompt: TextPrompt | TokenPrompt, sampling: SamplingParams) -> None:
        self._sender = sender
        self._prompt = prompt
        self._sampling = sampling

    async def send(self, record: Record) -> None:
        record.counted_by = CountedBy.USAGE
        try:
            async with aclosing(self._sender.client.generate(self._prompt, self._sampling)) as deltas:
                async for delta in deltas:
                    if delta.usage.completion_tokens > record.tokens:
                        record.add(self._sender.clock(), delta.usage.completion_tokens)
        except RequestError as error:
            record.error, record.detail = "refused", f"{error.field}: {error}"
        except OverlapSpecError as error:
            record.error, record.detail = type(error).__name__, str(error)


def _completion_body(target: Target, arrival: Arrival, prompt: str | list[int]) -> dict[str, object]:
    return {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": arrival.output_len,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **_sampling_fields(target.body, arrival),
    }


def _generate_body(target: Target, arrival: Arrival, prompt: str | list[int]) -> dict[str, object]:
    name = "text" if isinstance(prompt, str) else "input_ids"
    sampling = _sampling_fields(target.body, arrival) | {"max_new_tokens": arrival.output_len}
    return {name: prompt, "stream": True, "sampling_params": sampling}


def _sampling_fields(body: dict[str, object], arrival: Arrival) -> dict[str, object]:
    """Greedy and of exact length, unless a body asks for something else."""
    return {"temperature": 0.0, "ignore_eos": True, **body, **arrival.body}
