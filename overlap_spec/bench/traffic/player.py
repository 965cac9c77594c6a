"""Plays arrivals against a target in one event loop, and records what comes back."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from overlap_spec.bench.traffic.arrivals import Arrival
from overlap_spec.bench.traffic.messages import Outcome, Progress
from overlap_spec.bench.traffic.sse import Clock, Record
from overlap_spec.bench.traffic.targets import Request

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
