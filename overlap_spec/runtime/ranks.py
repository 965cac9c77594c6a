"""What the ranks of a model have to do with each other beside computing: they agree, and they wait.

Ranks compute together, so all must launch the same work in the same order. Whatever is decided by a clock or by free
memory is therefore decided once for all, before they are ready. Each rank writes a file, and reads those of the others:

    run directory / ranks / geometry-0, geometry-1, ..      MessagePack, each written under another name and renamed

A rank that is gone writes nothing: the others wait until the supervisor, which has noticed, ends them.

A rank that waits for another one answers no probe, as its one thread waits. So `Waits` notes since when it does, and a
thread tells the supervisor, which must not take the rank that waits for the one that hangs (`watchdog.py`).
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")

LOOK_S = 0.002  # between looks for the file of another rank
TOLD_S = 0.5  # between reports of a rank that waits, and after so much time for the first


class Waits:
    """Entered while this rank waits for others; not twice at once."""

    def __init__(self) -> None:
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_error: object) -> None:
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """For how long it has waited; 0: it does not."""
        since = self._since
        return time.monotonic() - since if since else 0.0

    @contextmanager
    def reported(self, connect: Callable[[], AbstractContextManager[Callable[[float], None]]]) -> Iterator[None]:
        """Tell of waits that last, from a thread, until the block ends. `connect`: called in that thread."""
        ended = threading.Event()

        def report() -> None:
            with connect() as tell:
                while not ended.wait(TOLD_S):
                    if (seconds := self.seconds) >= TOLD_S:
                        tell(seconds)

        thread = threading.Thread(target=report, name="waits", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class Agreement:
    """One rank's part. All ranks ask for the same names in the same order; each name is used once."""

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        directory: Path | None = None,
        waits: AbstractContextManager[object] | None = None,
    ) -> None:
        """`directory`: of this start, for all ranks; one rank alone needs none. `waits`: entered while it waits."""
        assert directory is not None or ranks == 1
        self.rank = rank
        self.ranks = ranks
        self._directory = directory
        self._waits = waits or nullcontext()
        if directory is not None:
            directory.mkdir(exist_ok=True)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides."""
        return self.rank == 0

    def gathered(self, name: str, value: T, kind: type[T]) -> list[T]:
        """Every rank's value, in the order of the ranks. Waits for all."""
        if self._directory is None:
            return [value]
        self._write(self._directory, name, value)
        return [self._read(self._directory, name, rank, kind) for rank in range(self.ranks)]

    def of_first(self, name: str, decide: Callable[[], T], kind: type[T]) -> T:
        """What rank 0 decides. The others wait for it and decide nothing."""
        if self._directory is None:
            return decide()
        if self.is_first:
            self._write(self._directory, name, decide())
        return self._read(self._directory, name, 0, kind)

    def _write(self, directory: Path, name: str, value: object) -> None:
        scratch = directory / f"{name}-{self.rank}.new"
        scratch.write_bytes(msgspec.msgpack.encode(value))
        os.rename(scratch, scratch.with_suffix(""))

    def _read(self, directory: Path, name: str, rank: int, kind: type[T]) -> T:
        path = directory / f"{name}-{rank}"
        with self._waits:
            while not path.exists():
                time.sleep(LOOK_S)
        return msgspec.msgpack.decode(path.read_bytes(), type=kind)


ALONE = Agreement()
