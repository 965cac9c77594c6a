"""Starts client processes, lets them play together, and gathers what they have recorded."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

import msgspec

from overlap_spec.bench.traffic.arrivals import Arrival, shared_out, with_rows
from overlap_spec.bench.traffic.messages import (
    Ended,
    FromClient,
    Go,
    Job,
    Outcome,
    Progress,
    Ready,
    Stop,
    Target,
    ToClient,
    frame,
    read_frame,
)
from overlap_spec.errors import OverlapSpecError

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
