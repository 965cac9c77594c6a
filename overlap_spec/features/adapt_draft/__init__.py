"""A draft learns from the requests that it serves: `--adapt-draft`. What scheduler and worker tell each other of it:

    scheduler                        worker
    Follow (a request gets a slot)   its hidden states go to a segment of the ring
    Finished                         the segment's tokens: it is a sample
    Train, Judge      -- Worked -->  a step of training; accept lengths on samples that were not learnt from
    TakeOver, GoBack, StartAgain     weights are swapped, between two steps
    LoadHead          -- HeadLoaded -->  by hand: a head from disk is written over the one that serves

The scheduler decides all of it, from what was committed and from the seconds that steps took. The worker does what it
is told, in the order in which it is told. Both count the seconds of the host that they spend on it.
"""

import time
from collections.abc import Callable

from overlap_spec.messages import Extension


class Watch:
    """Seconds of the host that go by in its blocks, which do not nest."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._seconds, self._begun = clock, 0.0, 0.0

    def __enter__(self) -> None:
        self._begun = self._clock()

    def __exit__(self, *_: object) -> None:
        self._seconds += self._clock() - self._begun

    def taken(self) -> float:
        """Those since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class LearningRoom(Extension, frozen=True):
    """Of `WorkerReady`. `segment_rows`: positions of a request that one holds; `batch`: segments of a step.

    `keep_s`: seconds of the device by which each launch that keeps states makes a step of requests longer.
    """

    num_segments: int
    segment_rows: int
    batch: int
    keep_s: float = 0.0


# --- scheduler -> worker ----------------------------------------------------------------------------------


class Follow(Extension, frozen=True):
    """Keep what the target computes of a request's positions from `first` on; sent before the plan that begins it."""

    uid: int
    segment: int
    first: int


class Finished(Extension, frozen=True):
    """The tokens at a segment's positions (int32, little-endian); those from `start` on are the answer."""

    segment: int
    tokens: bytes
    start: int


class Train(Extension, frozen=True):
    """Take a step of training on these segments, once no step has come for so many seconds. If one comes, do not."""

    segments: tuple[int, ...]
    still_s: float = 0.0


class Judge(Extension, frozen=True):
    """Measure accept lengths on these segments; `still_s`: as of `Train`."""

    segments: tuple[int, ...]
    still_s: float = 0.0


class TakeOver(Extension, frozen=True):
    """The copy becomes the draft."""


class GoBack(Extension, frozen=True):
    """Undo the last `TakeOver`: the draft and the copy get back the weights from before it."""


class StartAgain(Extension, frozen=True):
    """The copy becomes the draft that serves."""


class LoadHead(Extension, frozen=True):
    """Write a head from disk over the one that serves; sent on from the frontend."""

    number: int
    path: str
    load_format: str


# --- worker -> scheduler ----------------------------------------------------------------------------------


class Worked(Extension, frozen=True):
    """A `Train` or `Judge` is done, in so many seconds of the device; of a `Judge` the accept lengths, bonus included.

    `is_finite`: all numbers of the copy, and all that it computed, are. `upkeep_s`: of the host, what else it has done
    for learning since the last one. `is_done`: False if a step came before it could begin.
    """

    seconds: float
    live_length: float = 0.0
    copy_length: float = 0.0
    is_finite: bool = True
    upkeep_s: float = 0.0
    is_done: bool = True


class HeadLoaded(Extension, frozen=True):
    """What came of a `LoadHead`, sent on to the frontend. `error`: why the head that served still does; "" if not."""

    number: int
    error: str = ""


EXTENSIONS = (
    *(LearningRoom, Follow, Finished, Train, Judge, TakeOver, GoBack, StartAgain, Worked),
    *(LoadHead, HeadLoaded),
)
