"""Traces: timed records of each process on one clock, kept in memory.

`Trace` keeps all and writes them to a file when the process ends. `LiveTrace` keeps the newest while they are asked
for: a LivenessProbe asks, and the answer brings them. Off by default: `NO_TRACE` takes every call and keeps nothing.
Times are `time.monotonic()`, which all processes of a machine share.
"""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from overlap_spec.config.keys import write_private
from overlap_spec.messages import Record, Value

CLIENT, FRONTEND, SCHEDULER, WORKER, GPU = "client", "frontend", "scheduler", "worker host", "GPU"
TRACKS = (CLIENT, FRONTEND, SCHEDULER, WORKER, GPU)  # in the order of a request's way
CLOCK_ERROR = "error of the device's clock"  # args: milliseconds that its records may be off by, at most
LAST_STEP_SPLIT = "split of the last step"  # args: milliseconds of parts that are known of the last step only
MOST_RECORDS = 500_000  # per process; the oldest are dropped
MOST_LIVE_RECORDS = 1024  # the same, between two questions
SUFFIX = ".trace"


class Recorder(Protocol):
    """Takes the records of one process."""

    def now(self) -> float:
        """The clock in seconds: the `begin` of a later `span`."""

    def span(self, name: str, begin: float, step: int = 0, **args: Value) -> None:
        """Record a span from `begin` to now on this process's track."""

    def instant(self, name: str, step: int = 0, **args: Value) -> None: ...

    def add(self, record: Record) -> None:
        """Add a record, also for another track."""

    def write(self) -> None:
        """Write the records to their file, if there is one."""

    def watch(self, seconds: float) -> None:
        """Keep records from now on for so many seconds, for `take`; 0: go on as before."""

    def take(self) -> list[Record]:
        """What was recorded for those who watch since the last call."""

    @property
    def is_on(self) -> bool:
        """Whether records are kept at present."""


class NoTrace:
    """Keeps no record and reads no clock."""

    is_on = False

    def now(self) -> float:
        return 0.0

    def span(self, name: str, begin: float, step: int = 0, **args: Value) -> None:
        pass

    def instant(self, name: str, step: int = 0, **args: Value) -> None:
        pass

    def add(self, record: Record) -> None:
        pass

    def write(self) -> None:
        pass

    def watch(self, seconds: float) -> None:
        pass

    def take(self) -> list[Record]:
        return []


NO_TRACE = NoTrace()


class Trace:
    """The records of one process, for the file TRACK.trace in `directory`. `add` may be called from any thread."""

    is_on = True

    def __init__(self, track: str, directory: Path, most: int = MOST_RECORDS) -> None:
        self._track = track
        self._path = directory / f"{track.replace(' ', '-')}{SUFFIX}"
        self._records: deque[Record] = deque(maxlen=most)

    def now(self) -> float:
        return time.monotonic()

    def span(self, name: str, begin: float, step: int = 0, **args: Value) -> None:
        self.add(Record(self._track, name, begin, time.monotonic(), step, args))

    def instant(self, name: str, step: int = 0, **args: Value) -> None:
        now = time.monotonic()
        self.add(Record(self._track, name, now, now, step, args))

    def add(self, record: Record) -> None:
        self._records.append(record)

    def write(self) -> None:
        write_private(self._path, msgspec.msgpack.encode(list(self._records)))

    def watch(self, seconds: float) -> None:
        """All records are kept anyway, for the file."""

    def take(self) -> list[Record]:
        return []


class LiveTrace:
    """The newest records of one process while they are asked for. Else it keeps none and reads no clock."""

    def __init__(self, track: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_on = False
        self._track = track
        self._clock = clock
        self._until = 0.0
        self._records: deque[Record] = deque(maxlen=MOST_LIVE_RECORDS)

    def now(self) -> float:
        if not self.is_on:
            return 0.0
        now = self._clock()
        self.is_on = now <= self._until
        return now if self.is_on else 0.0

    def span(self, name: str, begin: float, step: int = 0, **args: Value) -> None:
        if self.is_on and begin:  # else it began before anyone watched
            self.add(Record(self._track, name, begin, self._clock(), step, args))

    def instant(self, name: str, step: int = 0, **args: Value) -> None:
        if self.is_on:
            now = self._clock()
            self.add(Record(self._track, name, now, now, step, args))

    def add(self, record: Record) -> None:
        self._records.append(record)
        if record.end > self._until:
            self.is_on = False

    def write(self) -> None:
        """There is no file."""

    def watch(self, seconds: float) -> None:
        if not seconds:
            return
        if not self.is_on:
            self._records.clear()
        self.is_on, self._until = True, self._clock() + seconds

    def take(self) -> list[Record]:
        taken = list(self._records)
        self._records.clear()
        return taken


def recorder(role: str, directory: str | None, watched: bool = False) -> Recorder:
    """A process's recorder; without a directory, and where the engine is not to be watched, one that keeps nothing."""
    track = WORKER if role == "worker" else role
    if directory is not None:
        return Trace(track, Path(directory))
    return LiveTrace(track) if watched else NO_TRACE


def read_records(directory: Path) -> list[Record]:
    """Every process's records, by their begin."""
    decoder = msgspec.msgpack.Decoder(list[Record])
    records = [record for path in directory.glob(f"*{SUFFIX}") for record in decoder.decode(path.read_bytes())]
    return sorted(records, key=lambda record: (record.begin, -record.end))
