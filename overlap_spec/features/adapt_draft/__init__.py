"""A draft learns from the requests that it serves: `--adapt-draft`. What scheduler and worker tell each other of it:

    scheduler                        worker
    Follow (a request gets a slot)   its hidden states go to a segment of the ring
    Finished                         the segment's tokens: it is a sample
    Train, Judge      -- Worked -->  a step of training; accept lengths on samples that were not learnt from
    TakeOver, GoBack, StartAgain     weights are swapped, between two steps
    LoadHead          -- HeadLoaded -->  by hand: a head from disk is written over the one that serves

The scheduler decides all of it, from what was committed and from the seconds that steps took. The worker does what it
is told, in the order in which it is told.
"""

from overlap_spec.messages import Extension


class LearningRoom(Extension, frozen=True):
    """Of `WorkerReady`. `segment_rows`: positions of a request that one holds; `batch`: segments of a step."""

    num_segments: int
    segment_rows: int
    batch: int


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
    """Take a step of training on these segments."""

    segments: tuple[int, ...]


class Judge(Extension, frozen=True):
    """Measure accept lengths on these segments."""

    segments: tuple[int, ...]


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

    `is_finite`: all numbers of the copy, and all that it computed, are.
    """

    seconds: float
    live_length: float = 0.0
    copy_length: float = 0.0
    is_finite: bool = True


class HeadLoaded(Extension, frozen=True):
    """What came of a `LoadHead`, sent on to the frontend. `error`: why the head that served still does; "" if not."""

    number: int
    error: str = ""


EXTENSIONS = (
    *(LearningRoom, Follow, Finished, Train, Judge, TakeOver, GoBack, StartAgain, Worked),
    *(LoadHead, HeadLoaded),
)
