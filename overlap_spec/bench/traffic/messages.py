"""The messages between a run and its client processes, as frames of msgpack: a length of four bytes, then the message.

run -> client    Job, Go when all are ready, Stop
client -> run    Ready, Progress a few times a second, Ended
"""

import asyncio
from array import array
from typing import Any

import msgspec

from overlap_spec.bench.traffic.arrivals import Arrival

LENGTH_BYTES = 4


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What requests are sent to. `url`: http or https, or the engine's ZMQ endpoint (ipc, tcp).

    `endpoint`: `completions` (OpenAI's) or `generate` (SGLang's). `body`: fields of every body, or of `SamplingParams`.
    """

    url: str
    endpoint: str = "completions"
    model: str = "default"
    api_key: str | None = None
    vocab_size: int = 32000
    body: dict[str, Any] = {}

    @property
    def is_http(self) -> bool:
        """Whether it is an HTTP server, and not a ZMQ endpoint."""
        return self.url.startswith(("http://", "https://"))


class Job(msgspec.Struct, frozen=True, tag=True):
    """What one client process plays. `slow_s`: time to the first token after which an answer is counted as slow."""

    target: Target
    arrivals: list[Arrival]
    seed: int = 0
    max_concurrency: int | None = None
    slow_s: float | None = None


class Go(msgspec.Struct, frozen=True, tag=True):
    """Time 0 of the arrivals, of the monotonic clock, which all processes share."""

    start_at: float


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End now: cancel what is open, send nothing more."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """All bodies are made."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Counts so far. `first_tokens`: new ones, in seconds. `longest_gap`: in seconds, of all streams so far."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0
    num_slow: int = 0
    first_tokens: list[float] = []
    longest_gap: float = 0.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was sent. Times in seconds of the monotonic clock.

    `times`: float64, when tokens came. `stopped`: the run ended before it.
    """

    tag: str
    due_at: float
    sent_at: float
    prompt_len: int
    tokens: int = 0
    times: bytes = b""
    counted_by: str = ""
    error: str = ""
    detail: str = ""
    stopped: bool = False

    def arrival_times(self) -> "array[float]":
        """When tokens came."""
        return array("d", self.times)


class Ended(msgspec.Struct, frozen=True, tag=True):
    """All that a client has recorded, and its own processor time over the time that it played."""

    outcomes: list[Outcome]
    cpu_s: float
    wall_s: float


ToClient = Job | Go | Stop
FromClient = Ready | Progress | Ended

_encode = msgspec.msgpack.Encoder().encode


def frame(message: ToClient | FromClient) -> bytes:
    """A message as it is sent."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


async def read_frame(stream: asyncio.StreamReader) -> bytes:
    """The next message. Raises: asyncio.IncompleteReadError at the end of the stream."""
    return await stream.readexactly(int.from_bytes(await stream.readexactly(LENGTH_BYTES), "big"))
