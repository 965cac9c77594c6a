"""Bounds what grammars take in the worker.

A lexer grows with the texts that it sees, and llguidance does not tell by how much. But growth takes time: 64 MiB take
it some 0.3 s. So when grammars have taken LOOK_S of time, the heap's growth since the first of them is looked at:

    within MOST_IDLE, and MOST_EACH for every request with one     nothing is done
    beyond, for the first time                                     what no request uses is forgotten
    beyond it still                                                the request whose grammar took most time fails
"""

import enum
from collections.abc import Callable

from overlap_spec.runtime.heap import heap_bytes

LOOK_S = 0.1
MOST_IDLE = 64 << 20
MOST_EACH = 2 << 20


class Judgement(enum.Enum):
    """What is to be done about the memory of grammars."""

    FITS = "fits"
    FORGET = "forget"  # what no request uses
    FAIL = "fail"  # the request whose grammar has grown most


class GrammarMemory:
    """Watches the heap of this process, as a function of the time that grammars take."""

    def __init__(self, heap: Callable[[], int] = heap_bytes) -> None:
        self._heap = heap
        self._base: int | None = None  # its size without grammars
        self._spent_s = 0.0
        self._forgot = False

    def begin(self) -> None:
        """The first grammar is about to come."""
        if self._base is None:
            self._base = self._heap()

    def spend(self, seconds: float) -> None:
        """Grammars took this time. Any thread may tell it: it matters little if two do at once."""
        self._spent_s += seconds

    @property
    def is_due(self) -> bool:
        """Whether to look."""
        return self._spent_s >= LOOK_S

    def judge(self, num_open: int) -> Judgement:
        """Look at the heap. `num_open`: requests with a grammar."""
        self._spent_s = 0.0
        assert self._base is not None
        if self._heap() - self._base <= MOST_IDLE + num_open * MOST_EACH:
            self._forgot = False
            return Judgement.FITS
        self._forgot = not self._forgot
        return Judgement.FORGET if self._forgot else Judgement.FAIL

    def accept(self) -> None:
        """What has grown is not grammars'."""
        self._base = self._heap()
