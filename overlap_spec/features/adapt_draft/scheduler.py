"""Decides what the draft learns from, and when: samples, steps of training, judgements, and which head serves.

    request gets a slot ── Follow ──> a segment of the ring ── ends: Finished ──> a sample
    samples, oldest first      [ trained on, at most PASSES times ........ | held out: the newest, never trained on ]
    every JUDGED_EVERY steps   the copy against the draft on those held out: TakeOver if it is TAKES_OVER times as good
    WATCHED verify steps later accept length of requests against that before: GoBack if it fell

**Time.** Each step of requests adds its share of the seconds that it took. All that learning costs is taken from that:
the device's seconds of orders and of kept states, and the host's, here and in the worker, as far as the device had
nothing to do meanwhile: else no step has waited for them. Beside requests an order is given while something is left,
and requests are followed until too much is owed, so that the share holds on any host. While no request runs or waits
an order costs nothing, unless one comes: so it begins only once no step has come for so long that its seconds are the
share of that.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from overlap_spec.features.adapt_draft import (
    Finished,
    Follow,
    GoBack,
    HeadLoaded,
    Judge,
    LearningRoom,
    LoadHead,
    StartAgain,
    TakeOver,
    Train,
    Watch,
    Worked,
)
from overlap_spec.messages import AdaptFigures, Extension, Stats, StepResult, find
from overlap_spec.scheduler.build import Parts
from overlap_spec.scheduler.hooks import Runs, SchedulerHook
from overlap_spec.scheduler.requests import Request, Step

CONTEXT = 4  # of a segment's rows, one in so many is for the end of the prompt
LEAST_ANSWER = 8  # tokens of an answer that is learnt from
GRAM, MOST_SEEN = 6, 3  # an answer is cut where a run of so many tokens has occurred so often: loops are not learnt
LEAST_SAMPLES = 8  # before anything is learnt
HELD_OUT, MOST_HELD = 4, 16  # one sample in so many is held out, at most so many
PASSES = 8  # steps of training that see a sample
JUDGED_EVERY = 32  # steps of training
TAKES_OVER = 1.02  # times the draft's accept length
WATCHED = 1024  # verify steps after which a head that has taken over is looked at
FELL = 0.95  # of the accept length before: so far it does not fall by chance
MOST_SAVED_S = 1.0  # so that a long time without samples is not followed by a long time of learning
OWED_ORDERS = 2  # seconds of so many orders may be owed before no request is followed
FADES = 0.95  # of the longest order's seconds, with each order
OF_WINDOWS, OF_PROMPTS = 1, 12  # launches that keep states in a step (`ring.py`)

log = logging.getLogger(__name__)


def attach(parts: Parts) -> SchedulerHook | None:
    """Learn, if the worker has room for it; or pass on what an operator asks for."""
    room, adapt = find(parts.limits.extensions, LearningRoom), parts.settings.adapt
    links, queues, reporter = parts.links, parts.queues, parts.reporter
    if room is None:
        return Updates(links.worker.send) if adapt.updates else None
    return Learning(room, adapt.share, links.worker.send, lambda: queues.idle, lambda: reporter.last)


def before_loop(tokens: Sequence[int], start: int) -> int:
    """How many tokens come before the answer, which begins at `start`, repeats itself."""
    grams = list(zip(*(tokens[start + ahead :] for ahead in range(GRAM)), strict=False))
    left = Counter(grams)
    if max(left.values(), default=0) <= MOST_SEEN:  # of most answers
        return len(tokens)
    seen: Counter[tuple[int, ...]] = Counter()
    for begin, gram in enumerate(grams, start):
        if seen[gram] == MOST_SEEN:
            return begin
        seen[gram] += 1
    raise AssertionError("one of them has come so often")


class Segments:
    """Which segments of the ring hold which samples. A new request gets the oldest sample's if none is free."""

    def __init__(self, count: int) -> None:
        self.free = list(reversed(range(count)))
        self.passes: dict[int, int] = {}  # by segment, oldest sample first: steps of training that have seen it
        self._most_open = max(count // 2, 1)
        self.num_open = 0  # of requests that run

    def take(self) -> int | None:
        """For a request that begins; None: enough of them have one."""
        if self.num_open == self._most_open:
            return None
        self.num_open += 1
        if self.free:
            return self.free.pop()
        oldest = next(iter(self.passes))
        del self.passes[oldest]
        return oldest

    def end(self, segment: int, is_sample: bool) -> None:
        """A request that had it is gone."""
        self.num_open -= 1
        if is_sample:
            self.passes[segment] = 0
        else:
            self.free.append(segment)

    @property
    def held_out(self) -> tuple[int, ...]:
        """The newest samples. None of them becomes one again that was not one of them."""
        count = min(len(self.passes) // HELD_OUT, MOST_HELD)
        return tuple(self.passes)[len(self.passes) - count :]

    def wants_more(self, size: int) -> bool:
        """Whether two batches have not been seen yet, of those held out or of requests that run are left out."""
        unseen = sum(not passes for passes in self.passes.values())
        return self.num_open + unseen < MOST_HELD + 2 * size

    def batch(self, size: int) -> tuple[int, ...]:
        """Those that the fewest steps have seen, without those held out; () if all were seen often enough."""
        apart = set(self.held_out)
        left = [each for each, passes in self.passes.items() if passes < PASSES and each not in apart]
        return tuple(sorted(left, key=self.passes.__getitem__)[:size])


class LiveLength:
    """Accept length of requests. By the number of guesses, as steps of other widths accept other numbers of them."""

    def __init__(self) -> None:
        self.rows: Counter[int] = Counter()
        self.tokens: Counter[int] = Counter()

    def add(self, num_guesses: int, rows: int, tokens: int) -> None:
        """Older steps count half as much each time that enough have come."""
        self.rows[num_guesses] += rows
        self.tokens[num_guesses] += tokens
        if self.total > 4 * WATCHED:
            for counts in (self.rows, self.tokens):
                for key in counts:
                    counts[key] //= 2

    @property
    def total(self) -> int:
        return sum(self.rows.values())

    def fell(self, before: "LiveLength") -> bool:
        """Whether the accept length has fallen since the last take-over, among steps with equally many guesses."""
        expected = found = 0.0
        for num_guesses, rows in self.rows.items():
            if before.rows[num_guesses]:
                expected += rows * before.tokens[num_guesses] / before.rows[num_guesses]
                found += self.tokens[num_guesses]
        return found < FELL * expected


class _Followed:
    def __init__(self, segment: int, first: int) -> None:
        self.segment, self.first = segment, first
        self.is_whole = True  # it has kept its slot


class Updates(SchedulerHook):
    """Passes on to the worker which head it is to read, and to the frontend what came of it."""

    def __init__(self, send: Callable[[Extension], None]) -> None:
        self._send, self._told, self.updates = send, list[Extension](), 0

    def message(self, message: Extension) -> bool:
        match message:
            case LoadHead():
                self._send(message)
            case HeadLoaded():
                self.updates += not message.error
                self._told.append(message)
            case _:
                return False
        return True

    def abandoned(self) -> None:
        self._told.clear()

    def replies(self) -> Sequence[Extension | Stats]:
        told, self._told = self._told, []
        return told

    def report(self, stats: Stats) -> Stats:
        return replace(stats, draft_updates_total=self.updates)


class Learning(Updates):
    """Owner of the ring's segments, of what learning may cost, and of which head serves."""

    def __init__(
        self,
        room: LearningRoom,
        share: float,
        send: Callable[[Extension], None],
        idle: Callable[[], bool],
        last: Callable[[], Stats],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`idle`: whether no request runs or waits. `last`: the newest report, as there are none while that is so."""
        super().__init__(send)
        self._watch = Watch(clock)
        self.room, self.segments, self.figures = room, Segments(room.num_segments), AdaptFigures()
        self._rate, self._idle, self._last = share / (1 - share), idle, last
        self._has_news = False  # that the next report is not waited for
        self._followed: dict[int, _Followed] = {}  # by uid
        self._asked: Train | Judge | None = None  # and not answered
        self._is_paid = False  # for what was asked
        self._order_s = 0.0  # which an order may take
        self._waited_s = 0.0  # that the device had nothing of requests to do since the last order
        self._is_stale = False  # what was asked was of a head that serves no more
        self.saved_s = self.spent_s = 0.0
        self._unjudged = 0  # steps of training
        self._live, self._before = LiveLength(), LiveLength()
        self._watches = False

    # --- samples --------------------------------------------------------------------------------------------

    def started(self, request: Request) -> None:
        """Follow a request that may be learnt from. One that begins again is not whole: its rows are older ones."""
        with self._watch:
            self._follow(request)

    def _follow(self, request: Request) -> None:
        if (known := self._followed.get(request.uid)) is not None:
            known.is_whole = False
            return
        is_own = request.uid < 0  # of a feature that runs a finished request again
        if is_own or not request.admit.is_learnt or request.admit.resumed is not None:
            return
        if self.saved_s < -OWED_ORDERS * self._order_s or not self.segments.wants_more(self.room.batch):
            return
        segment = self.segments.take()
        if segment is None:
            return
        first = max(request.prompt_len - self.room.segment_rows // CONTEXT, 0)
        self._followed[request.uid] = _Followed(segment, first)
        self._send(Follow(request.uid, segment, first))

    def closed(self, request: Request) -> None:
        """What has come of a request is a sample, if it is long enough."""
        with self._watch:
            if (followed := self._followed.pop(request.uid, None)) is not None:
                self._end(followed, request)
            self._turn()

    def _end(self, followed: _Followed, request: Request) -> None:
        first, start = followed.first, request.prompt_len - followed.first
        tokens = request.tokens[first : first + self.room.segment_rows]
        tokens = tokens[: before_loop(tokens, start)]
        is_sample = followed.is_whole and len(tokens) - start >= LEAST_ANSWER
        self.segments.end(followed.segment, is_sample)
        if is_sample:
            self._send(Finished(followed.segment, tokens.tobytes(), start))

    # --- turns ----------------------------------------------------------------------------------------------

    def settled(self, step: Step, result: StepResult) -> None:
        """Each step adds its share, and pays for what was kept in it and for the host's work that it has waited for."""
        launches = OF_WINDOWS * bool(step.windows) + OF_PROMPTS * bool(step.chunks)
        self._waited_s += result.gpu_gap
        self._spend(min(self._watch.taken(), result.gpu_gap) + self.room.keep_s * launches)
        with self._watch:
            self.saved_s = min(self.saved_s + self._rate * result.gpu_time, MOST_SAVED_S)
            self._turn()

    def _spend(self, seconds: float, is_paid: bool = True) -> None:
        self.spent_s += seconds
        if is_paid:
            self.saved_s -= seconds

    def _turn(self) -> None:
        """Ask for the next thing, if nothing is asked for and it is paid for or free."""
        if self._asked is not None:
            return
        is_paid = self.saved_s > 0
        if (is_paid or self._idle()) and (order := self._next()) is not None:
            self._asked, self._is_paid = order, is_paid
            self._send(order if is_paid else replace(order, still_s=self._order_s / self._rate))

    def _next(self) -> Train | Judge | None:
        segments = self.segments
        if len(segments.passes) < LEAST_SAMPLES:
            return None
        batch = segments.batch(self.room.batch)
        is_due = self._unjudged >= JUDGED_EVERY or (self._unjudged > 0 and not batch)
        if is_due and not self._watches:
            return Judge(segments.held_out)
        if not batch:
            return None
        for segment in batch:
            segments.passes[segment] += 1
        return Train(batch)

    def message(self, message: Extension) -> bool:
        """What was asked for is done; or another head serves now, which nothing is known of."""
        if not isinstance(message, Worked):
            if isinstance(message, HeadLoaded) and not message.error:
                self._live, self._watches, self._unjudged = LiveLength(), False, 0
                self._is_stale = self._asked is not None
            return super().message(message)
        with self._watch:
            # Steps wait for orders too: once for each.
            self._spend(min(message.upkeep_s, max(self._waited_s - message.seconds, 0.0)))
            self._spend(message.seconds, self._is_paid)
            self._waited_s = 0.0
            asked, self._asked = self._asked, None
            is_stale, self._is_stale = self._is_stale, False
            if not message.is_done:
                self._undo(asked)
                return True  # the step that has come turns to the next thing
            self._order_s = max(message.seconds, FADES * self._order_s)
            if isinstance(asked, Judge):
                if not is_stale:
                    self._decide(message)
            else:
                self._unjudged += 1
                self.figures = replace(self.figures, steps=self.figures.steps + 1)
            self._turn()
        return True

    def _undo(self, asked: Train | Judge | None) -> None:
        """No sample has been seen."""
        passes = self.segments.passes
        for segment in asked.segments if isinstance(asked, Train) else ():
            if passes.get(segment):  # it may be another sample's by now
                passes[segment] -= 1

    # --- which head serves ----------------------------------------------------------------------------------

    def _decide(self, judged: Worked) -> None:
        self._unjudged, figures, self._has_news = 0, self.figures, True
        if not judged.is_finite:
            self.figures = replace(figures, refused=figures.refused + 1)
            log.warning("The draft's copy has numbers that are not finite: it is refused, and starts again")
            self._send(StartAgain())
            return
        live, copy = judged.live_length, judged.copy_length
        self.figures = replace(figures, live_length=live, copy_length=copy)
        if copy >= TAKES_OVER * max(live, 1.0):
            versions, gain = figures.versions + 1, copy / max(live, 1.0) - 1
            self.figures = replace(self.figures, versions=versions, gain=gain)
            log.info("The draft has learnt: version %d takes over, accept length %.2f, was %.2f", versions, copy, live)
            self._send(TakeOver())
            self._before, self._live, self._watches = self._live, LiveLength(), True

    def verified(self, runs: Runs, was_drafted: bool) -> None:
        """Count what requests accept, and look at a head that has taken over once there is enough of it."""
        for (draw, length, num_proposed), rows in runs.items():
            if draw is not None and num_proposed:
                self._live.add(num_proposed, rows, rows * length)
        if self._watches and self._live.total >= WATCHED:
            self._watches = False
            if self._live.fell(self._before):
                self.figures = replace(self.figures, dropped=self.figures.dropped + 1)
                log.warning("Accept length fell with version %d of the draft: it is dropped", self.figures.versions)
                self._send(GoBack())
                self._live = self._before

    def replies(self) -> Sequence[Extension | Stats]:
        """A report after each judgement, and what came of heads from disk."""
        has_news, self._has_news = self._has_news, False
        return (*super().replies(), *((self.report(self._last()),) if has_news else ()))

    def report(self, stats: Stats) -> Stats:
        figures = replace(self.figures, samples=len(self.segments.passes), seconds=self.spent_s)
        return replace(super().report(stats), adapt=figures)
