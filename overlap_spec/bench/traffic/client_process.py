"""A process that plays a part of the traffic: `python -m overlap_spec.bench.traffic.client_process`.

Messages come on stdin and go to stdout (`processes.py`). It is a process of its own so that neither the server nor
another client takes its time, and so that its use of the processor can be told.

Arrivals are played against a target in one event loop, and what comes back is recorded.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import uvloop

from overlap_spec.bench.traffic.arrivals import Arrival
from overlap_spec.bench.traffic.processes import (
    Ended,
    FromClient,
    Go,
    Job,
    Outcome,
    Progress,
    Ready,
    ToClient,
    frame,
    read_frame,
)
from overlap_spec.bench.traffic.targets import Clock, Record, Request, sender_for
from overlap_spec.errors import OverlapSpecError

Sleep = Callable[[float], Awaitable[None]]


@dataclass
class Played:
    """A request that was sent, and its record. Times in seconds."""

    arrival: Arrival
    due_at: float
    sent_at: float
    record: Record = field(default_factory=Record)
    has_ended: bool = False

    def outcome(self) -> Outcome:
        """What the run gets of it."""
        record, prompt = self.record, self.arrival.prompt
        return Outcome(
            tag=self.arrival.tag,
            due_at=self.due_at,
            sent_at=self.sent_at,
            prompt_len=len(prompt) if isinstance(prompt, list) else self.arrival.prompt_len,
            tokens=record.tokens,
            times=record.times.tobytes(),
            counted_by=record.counted_by,
            error=record.error,
            detail=record.detail,
            stopped=not self.has_ended,
        )


class _RunEnded(Exception):
    """An arrival that ends the run was answered."""


class Player:
    """Sends each request when it is due. `max_concurrency`: more than that many wait, and are sent late.

    `slow_s`: an answer whose first token takes longer is counted as slow, also while it is waited for.
    """

    def __init__(
        self,
        work: Sequence[tuple[Arrival, Request]],
        max_concurrency: int | None = None,
        slow_s: float | None = None,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._work = work
        self._room = asyncio.Semaphore(max_concurrency or max(1, len(work)))
        self._slow_s = slow_s
        self._clock = clock
        self._sleep = sleep
        self._played: list[Played] = []
        self._ended_at: dict[str, asyncio.Future[float]] = {}  # by id
        self._told: set[int] = set()  # whose first token is in a Progress

    async def play(self, start_at: float) -> None:
        """Send everything and wait for the answers. Cancellation: open requests are left, and stay in `outcomes`."""
        loop = asyncio.get_running_loop()
        self._ended_at = {arrival.id: loop.create_future() for arrival, _ in self._work if arrival.id}
        try:
            async with asyncio.TaskGroup() as group:
                for arrival, request in self._work:
                    group.create_task(self._play(arrival, request, start_at))
        except* _RunEnded:
            pass

    def outcomes(self) -> list[Outcome]:
        """All requests that were sent, in that order."""
        return [played.outcome() for played in self._played]

    def progress(self) -> Progress:
        """Counts so far, and first tokens since the last call."""
        fresh = [i for i, played in enumerate(self._played) if played.record.times and i not in self._told]
        self._told.update(fresh)
        return Progress(
            sent=len(self._played),
            ended=sum(played.has_ended for played in self._played),
            failed=sum(bool(played.record.error) for played in self._played),
            tokens=sum(played.record.tokens for played in self._played),
            num_slow=sum(self._is_slow(played) for played in self._played),
            first_tokens=[self._played[i].record.times[0] - self._played[i].sent_at for i in fresh],
            longest_gap=max((played.record.longest_gap for played in self._played), default=0.0),
        )

    async def _play(self, arrival: Arrival, request: Request, start_at: float) -> None:
        due_at = arrival.at + (await self._ended_at[arrival.after] if arrival.after else start_at)
        if (wait := due_at - self._clock()) > 0:
            await self._sleep(wait)
        async with self._room:
            played = Played(arrival, due_at, self._clock())
            self._played.append(played)
            await request.send(played.record)
            played.has_ended = True
        if arrival.id:
            self._ended_at[arrival.id].set_result(self._clock())
        if arrival.ends_run:
            raise _RunEnded

    def _is_slow(self, played: Played) -> bool:
        if self._slow_s is None:
            return False
        until = played.record.times[0] if played.record.times else self._clock()
        return until - played.sent_at > self._slow_s and not played.record.error


PROGRESS_S = 0.25
CANCEL_S = 5.0  # for requests to leave

_decoder = msgspec.msgpack.Decoder(ToClient)


async def main() -> None:
    """Take a job, play it, report."""
    stdin = asyncio.StreamReader(limit=1 << 30)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    job = _decoder.decode(await read_frame(stdin))
    assert isinstance(job, Job), job
    async with sender_for(job.target) as sender:
        work = [(arrival, sender.prepare(arrival, job.seed)) for arrival in job.arrivals]
        player = Player(work, job.max_concurrency, job.slow_s)
        _send(Ready())
        go = _decoder.decode(await read_frame(stdin))
        if not isinstance(go, Go):
            return
        _send(await play(player, go.start_at, stdin))


async def play(player: Player, start_at: float, stdin: asyncio.StreamReader) -> Ended:
    """Play until the end, a Stop, or the end of the run that has started this process."""
    began, cpu = time.monotonic(), time.process_time()
    playing = asyncio.create_task(player.play(start_at))
    stopped = asyncio.create_task(_end_of(stdin))
    telling = asyncio.create_task(_tell(player))
    await asyncio.wait((playing, stopped), return_when=asyncio.FIRST_COMPLETED)
    ended = time.monotonic()
    cpu = time.process_time() - cpu
    for task in (playing, stopped, telling):
        task.cancel()
    await asyncio.wait((playing, telling, stopped), timeout=CANCEL_S)
    if playing.done() and not playing.cancelled():
        playing.result()
    return Ended(player.outcomes(), cpu, ended - began)


async def _end_of(stdin: asyncio.StreamReader) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError):
        await read_frame(stdin)


async def _tell(player: Player) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        _send(player.progress())


def _send(message: FromClient) -> None:
    """Write a message. The run reads all the time, so this hardly ever waits."""
    rest = memoryview(frame(message))
    while rest:
        rest = rest[os.write(sys.stdout.fileno(), rest) :]


if __name__ == "__main__":
    try:
        uvloop.run(main())
    except (ValueError, OverlapSpecError) as error:  # of an arrival's body
        sys.exit(f"overlap-spec: {error}")
    except (asyncio.IncompleteReadError, BrokenPipeError):
        sys.exit(1)  # the run that has started this process is gone
