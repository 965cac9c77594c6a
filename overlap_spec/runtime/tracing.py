"""Traces: timed records of each process on one clock, kept in memory and written to a file when the process ends.

Off by default: `NO_TRACE` takes every call and keeps nothing. Times are `time.monotonic()`, which all processes of a
machine share.
"""

import time
from collections import deque
from pathlib import Path
from typing import Protocol

import msgspec

CLIENT, TOKENIZER, SCHEDULER, WORKER, GPU = "client", "tokenizer", "scheduler", "worker host", "GPU"
TRACKS = (CLIENT, TOKENIZER, SCHEDULER, WORKER, GPU)  # in the order of a request's way
LAST_STEP_SPLIT = "split of the last step"  # args: milliseconds of parts that are known of the last step only
MOST_RECORDS = 500_000  # per process; the oldest are dropped
SUFFIX = ".trace"

Value = int | float | str


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A span of one track's time; an instant where `end` is `begin`. Seconds. `step` 0: of no step."""

    track: str
    name: str
    begin: float
    end: float
    step: int = 0
    args: dict[str, Value] = {}


class Recorder(Protocol):
    """Takes the records of one process."""

    def now(self) -> float:
        """The clock in seconds: the `begin` of a later `span`."""
        ...

    def span(self, name: str, begin: float, step: int = 0, **args: Value) -> None:
        """Record a span from `begin` to now on this process's track."""
        ...

    def instant(self, name: str, step: int = 0, **args: Value) -> None:
        """Record an instant."""
        ...

    def add(self, record: Record) -> None:
        """Add a record, also for another track."""
        ...

    def write(self) -> None:
        """Write the records to their file, if there is one."""
        ...


class NoTrace:
    """Keeps no record and reads no clock."""

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


NO_TRACE = NoTrace()


class Trace:
    """The records of one process, for the file TRACK.trace in `directory`. `add` may be called from any thread."""

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
        self._path.write_bytes(msgspec.msgpack.encode(list(self._records)))


def recorder(role: str, directory: str | None) -> Recorder:
    """A process's recorder; without a directory, one that keeps nothing."""
    track = WORKER if role == "worker" else role
    return NO_TRACE if directory is None else Trace(track, Path(directory))


def read_records(directory: Path) -> list[Record]:
    """Every process's records, by their begin."""
    decoder = msgspec.msgpack.Decoder(list[Record])
    records = [record for path in directory.glob(f"*{SUFFIX}") for record in decoder.decode(path.read_bytes())]
    return sorted(records, key=lambda record: (record.begin, -record.end))
