"""A fuzzed service that is looked at after every round, and started again where a case has ended or hung it."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

import httpx

from support.command_line import Service
from support.fuzz.checks import FrameTarget, HttpTarget
from support.leftovers import Held, drained, held_by

WARMED_S = 45.0  # after which what is kept for good (threads, caches) has been taken
TOO_MUCH_MB = 300.0  # by which a process grows that is then started again


class Restarted:
    """`start` makes a service that has not been entered."""

    def __init__(self, start: Callable[[], Service]) -> None:
        self._start = start
        self.num_restarts = -1  # the first start is none
        self._http: HttpTarget | None = None
        self._frames: FrameTarget | None = None
        self._most_grown: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def of_http(self, statuses: Counter[str]) -> HttpTarget:
        """Sends requests to the service of now."""
        if self._http is None:
            self._http = HttpTarget(self.service.url)
        self._http.statuses = statuses
        return self._http

    def of_frames(self, answers: Counter[str]) -> FrameTarget:
        """Sends frames to the service of now."""
        if self._frames is None:
            self._frames = FrameTarget(self.service.endpoint)
        self._frames.answers = answers
        return self._frames

    def whats_wrong(self) -> str:
        """After a round: a traceback, a process that was started again, requests that have not ended. "": nothing."""
        wrong = self._wrong()
        grown = self._grown_now()
        if wrong or max(grown.values(), default=0) > TOO_MUCH_MB:
            self._note_grown(grown)
            self._end()
            self._begin()
        return wrong

    def grown_mb(self) -> dict[str, float]:
        """The most that each process has grown, of all services."""
        self._note_grown(self._grown_now())
        return self._most_grown

    def _wrong(self) -> str:
        service = self.service
        if service.process.poll() is not None:
            return f"the server has ended with status {service.process.returncode}: {service.log()[-2000:]}"
        if service.actors() != service.children:
            return f"processes were started again: {service.log()[-2000:]}"
        if "Traceback" in (log := service.log()[self._logged :]):
            at = log.index("Traceback")
            return f"{traceback_name(log[at:])} in the log: {log[max(0, at - 500) : at + 3000]}"
        self._logged += len(log)
        try:
            return drained(service)
        except httpx.HTTPError as error:
            return f"no answer: {error!r}"

    def _begin(self) -> None:
        self.service = self._start().__enter__()
        self.num_restarts += 1
        self._logged, self._begun = 0, time.monotonic()
        self._before: dict[str, Held] | None = None

    def _end(self) -> None:
        if self._http is not None:
            self._http.close()
        if self._frames is not None:
            self._frames.__exit__(None, None, None)
        self._http = self._frames = None
        self.service.__exit__(None, None, None)

    def _grown_now(self) -> dict[str, float]:
        """In MB, since the service was warm."""
        now: dict[str, Held] = {}
        with suppress(OSError):
            now = held_by(self.service)
        if self._before is None and time.monotonic() - self._begun > WARMED_S:
            self._before = now
        before = self._before or now
        return {role: round((held.rss - before[role].rss) / 1e6, 1) for role, held in now.items() if role in before}

    def _note_grown(self, grown: dict[str, float]) -> None:
        for role, size in grown.items():
            self._most_grown[role] = max(size, self._most_grown.get(role, 0.0))


def traceback_name(log: str) -> str:
    """Its last line: what was raised."""
    lines = [line for line in log.splitlines()[1:] if line and not line.startswith((" ", "\t"))]
    return lines[0] if lines else "a traceback"
