"""Starts client processes, lets them play together, and gathers what they have recorded.

The messages between a run and its client processes, as frames of msgpack: a length of four bytes, then the message.

run -> client    Job, Go when all are ready, Stop
client -> run    Ready, Progress a few times a second, Ended
"""

import asyncio
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from overlap_spec.bench.traffic.arrivals import Arrival, shared_out, with_rows
from overlap_spec.errors import OverlapSpecError

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


START_S = 0.2  # from the last client that is ready to the first request
MODULE = "overlap_spec.bench.traffic.client_process"

_decoder = msgspec.msgpack.Decoder(FromClient)


@dataclass(frozen=True)
class Load:
    """What is sent, to what, by how many client processes. `slow_s`: see `Job`."""

    target: Target
    arrivals: Sequence[Arrival]
    num_processes: int = 1
    seed: int = 0
    max_concurrency: int | None = None
    slow_s: float | None = None

    def jobs(self) -> list[Job]:
        """One for each process. Requests at once are shared out like the arrivals."""
        parts = [part for part in shared_out(with_rows(self.arrivals), self.num_processes) if part]
        most: list[int | None] = [None] * len(parts)
        if self.max_concurrency is not None:
            parts = parts[: self.max_concurrency]
            share, more = divmod(self.max_concurrency, len(parts))
            most = [share + (index < more) for index in range(len(parts))]
        return [Job(self.target, part, self.seed, each, self.slow_s) for part, each in zip(parts, most, strict=True)]


@dataclass
class Played:
    """What all clients have recorded. `cpu_shares`: processor time over time, by client."""

    outcomes: list[Outcome]
    cpu_shares: list[float]
    planned: int
    stopped_because: str = ""


@dataclass
class Running:
    """A run that goes on. `newest`: each client's last report; `first_tokens`: of all, in seconds."""

    planned: int
    start_at: float
    newest: dict[int, Progress] = field(default_factory=dict)
    first_tokens: list[float] = field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start_at

    def total(self, name: str) -> int:
        """The sum of a count of `Progress`."""
        return sum(int(getattr(progress, name)) for progress in self.newest.values())

    @property
    def longest_gap(self) -> float:
        """In seconds, of any stream."""
        return max((progress.longest_gap for progress in self.newest.values()), default=0.0)


Watch = Callable[[Running], str]  # called with every report; a text that is not empty ends the run, and is its reason


async def play_load(load: Load, watch: Watch) -> Played:
    """Play it to its end, or until `watch` gives a reason to stop. Cancellation: ends the clients.

    Raises: OverlapSpecError if a client dies.
    """
    jobs = load.jobs()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_Client(job)) for job in jobs]
        for client in clients:
            ready = await client.receive()
            assert isinstance(ready, Ready), ready
        running = Running(len(load.arrivals), time.monotonic() + START_S)
        for client in clients:
            client.send(Go(running.start_at))
        stop = _Stop(clients, running, watch)
        ended = await asyncio.gather(*(stop.follow(index) for index in range(len(clients))))
    outcomes = sorted((each for end in ended for each in end.outcomes), key=lambda outcome: outcome.sent_at)
    return Played(outcomes, [end.cpu_s / end.wall_s for end in ended], running.planned, stop.reason)


class _Stop:
    """Follows the clients' reports, and stops all of them together."""

    def __init__(self, clients: "list[_Client]", running: Running, watch: Watch) -> None:
        self.reason = ""
        self._clients = clients
        self._running = running
        self._watch = watch

    async def follow(self, index: int) -> Ended:
        """Read one client's reports until it has ended."""
        while True:
            message = await self._clients[index].receive()
            if isinstance(message, Ended):
                return message
            if isinstance(message, Progress):
                self._running.newest[index] = message
                self._running.first_tokens += message.first_tokens
                if (reason := self._watch(self._running)) and not self.reason:
                    self.reason = reason
                    for client in self._clients:
                        client.send(Stop())


class _Client:
    """One client process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> "_Client":
        pipe = asyncio.subprocess.PIPE
        words = (sys.executable, "-m", MODULE)
        # A session of its own: Ctrl-C is for the run, whose end closes the pipe.
        self._process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, start_new_session=True)
        self.send(self._job)
        return self

    async def __aexit__(self, *error: object) -> None:
        process = self._process
        assert process is not None
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def send(self, message: ToClient) -> None:
        """Put a message into the pipe."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(frame(message))

    async def receive(self) -> FromClient:
        """The next message. Raises: OverlapSpecError if the process has died."""
        assert self._process is not None and self._process.stdout is not None
        try:
            message: FromClient = _decoder.decode(await read_frame(self._process.stdout))
            return message
        except asyncio.IncompleteReadError:
            raise OverlapSpecError(f"a client process has died, status {await self._process.wait()}") from None
