"""Sends one request to what is measured: an HTTP server, or the engine over ZMQ."""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from overlap_spec.bench.traffic.arrivals import Arrival, prompt_of
from overlap_spec.bench.traffic.messages import Target
from overlap_spec.bench.traffic.sse import Answer, Clock, CountedBy, Record
from overlap_spec.client import Client
from overlap_spec.client.link import pack_ids
from overlap_spec.errors import OverlapSpecError, RequestError
from overlap_spec.messages import SamplingParams, TextPrompt, TokenPrompt

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
