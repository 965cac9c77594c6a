"""What plain decoding answered in this run of tests: kept in memory, and for processes beside this one in files.

Random schedules of every method ask the same requests, and plain decoding of them, one by one, is most of their time.
"""

import os
import pickle
from collections.abc import Callable, Hashable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

T = TypeVar("T")


class KeptAnswers:
    """Answers by what they are answers to: a value whose `repr` says all of it.

    `directory`: where processes of one run keep them for each other, if they do.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self._known: dict[Hashable, Any] = {}

    def get(self, asked: Hashable, answer: Callable[[], T]) -> T:
        """The answer, by `answer()` where none is kept. Several processes may work on one at the same time."""
        if asked not in self._known:
            self._known[asked] = self._read(asked, answer)
        found: T = self._known[asked]
        return found

    def _read(self, asked: Hashable, answer: Callable[[], T]) -> T:
        if self.directory is None:
            return answer()
        path = self.directory / sha256(repr(asked).encode()).hexdigest()
        if path.is_file():
            found: T = pickle.loads(path.read_bytes())
            return found
        found = answer()
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(pickle.dumps(found))
        unfinished.replace(path)
        return found


def from_another_start(items: Sequence[T], name: str) -> list[T]:
    """The same items, beginning with one that `name` decides: tests beside each other begin with different ones."""
    start = crc32(name.encode()) % max(len(items), 1)
    return [*items[start:], *items[:start]]


KEPT = KeptAnswers()
