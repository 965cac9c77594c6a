"""How wide decode steps are: the whole window, or the width that commits the most tokens per second.

What a step of each width commits and takes is learnt (`tokens.py`, `seconds.py`). The width with the most tokens per
second is taken, down to 1, which is plain decoding. A wider one than now must be faster by more than `CLEAR_GAIN`, so
that the width does not swing between two that are about equal, and that the narrower one of those is taken; a narrower
one by more than chance would have it (`DOUBT`).

What cannot be known from the steps that run is tried:

    a wider width      whose guesses have not been tested of late, if it would be faster with those of a good draft
    a narrower width   that was not timed of late, if it would be faster should it take less than is believed

A trial is a few steps. Each class of batch sizes earns TRIALS of the time that it spends, and pays for a trial the most
that it may lose. A width that has lost is not tried again for LOST_STEPS steps of the class, twice as many the next
time. A class whose first step is planned has no results of its own: it begins with the width that would be the fastest
with a fair draft (`FIRST_RATE`), of those that cannot lose much.
"""

import logging
import math
from dataclasses import dataclass, field
from typing import Protocol

from overlap_spec.messages import StepCosts, StepResult
from overlap_spec.scheduler.width.seconds import StepSeconds, TimedStep, size_class
from overlap_spec.scheduler.width.tokens import TokensByWidth

CLEAR_GAIN = 1.02  # the width changes for so many times the tokens per second of now
DOUBT = 0.4  # how much faster a narrower width must seem, over the root of the number of tests that say so
TRIALS = 0.01  # the share of its time that a class spends on trials, at most
LOOKS = 8  # steps from one look for a trial to the next: it takes some microseconds
TRIAL_STEPS = 3  # the first one has no guesses, and a step is timed after another one of its width
TRIAL_TESTS = 96  # slots that a trial tests, at least
MOST_TRIAL_STEPS = 32
SETTLING = 4  # steps after a trial until its results have come
LOST_STEPS, MOST_LOST_STEPS = 1024, 16384
FIRST_COST = 1.5  # times a plain step's: what is taken without a result costs no more
LASTING_STEPS = 1024  # a width is logged once it was kept for so many: trials are not

log = logging.getLogger(__name__)


class WidthPolicy(Protocol):
    """Chooses widths of decode steps."""

    def choose(self, batch_size: int, num_plain: int = 0) -> int:
        """The width of the next decode step, of whose slots `num_plain` have no guesses."""
        ...

    def after_prompts(self, batch_size: int) -> int:
        """The width for which a prefill step proposes: that of the decode step after it, as far as is known."""
        ...

    def drafts(self) -> bool:
        """Whether guesses are looked up after the step whose width was chosen last; called once it is planned.

        Asked of methods that are self-drafting. A step that is wider than one column must be followed by its draft.
        """
        ...

    def observe(self, result: StepResult) -> None:
        """Learn from a settled decode step."""
        ...

    def timed(self, step: TimedStep) -> None:
        """Learn from the time of a decode step that followed another one of its kind."""
        ...


class FixedWidth:
    """Every step is as wide as the window."""

    def __init__(self, width: int) -> None:
        self._width = width

    def choose(self, batch_size: int, num_plain: int = 0) -> int:
        return self._width

    def after_prompts(self, batch_size: int) -> int:
        return self._width

    def drafts(self) -> bool:
        return True

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""

    def timed(self, step: TimedStep) -> None:
        """Nothing to learn."""


@dataclass
class Trial:
    """A width that is tried: `left` steps of it are to come, and then `settling` until it is known."""

    index: int
    left: int
    settling: int = SETTLING


@dataclass
class Place:
    """A class of batch sizes: the width of its steps, and its trials. Widths are indices."""

    now: int
    num_widths: int
    earned_s: float = 0.0  # for trials
    num_steps: int = 0
    trial: Trial | None = None
    lost_steps: list[int] = field(init=False)  # after the next loss
    closed_until: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.lost_steps = [LOST_STEPS] * self.num_widths
        self.closed_until = [0] * self.num_widths

    def end_trial(self) -> None:
        """All is known. A width that is not taken has lost, and so have those that were tested with it."""
        assert self.trial is not None
        tried, self.trial = self.trial.index, None
        if tried == self.now:
            self.lost_steps[tried] = LOST_STEPS
            return
        for index in [tried] if tried < self.now else range(self.now + 1, tried + 1):
            self.closed_until[index] = self.num_steps + self.lost_steps[index]
            self.lost_steps[index] = min(2 * self.lost_steps[index], MOST_LOST_STEPS)


class MeasuredWidth:
    """The policy of this module's docstring."""

    def __init__(self, costs: StepCosts) -> None:
        self.tokens = TokensByWidth(costs.widths)
        self.seconds = StepSeconds(costs.batch_sizes, costs.seconds)
        self._widths = costs.widths
        self._places: dict[int, Place] = {}
        self._now = self._logged = len(self._widths) - 1
        self._num_kept = 0  # steps since the last change

    @property
    def current(self) -> int:
        """The width of the last step, but for trials."""
        return self._widths[self._now]

    def choose(self, batch_size: int, num_plain: int = 0) -> int:
        seconds, share = self.seconds.of(batch_size), 1 - num_plain / batch_size
        place = self._place(batch_size, seconds, share)
        place.num_steps += 1
        place.earned_s += TRIALS * seconds[place.now]
        chosen = self._tried(place)
        if chosen is None:
            chosen = self._best(place, seconds, share)
            if place.trial is None and place.num_steps % LOOKS == 0:
                place.trial = self._next_trial(place, batch_size, seconds, share)
        self._note(place.now, batch_size)
        return self._widths[chosen]

    def after_prompts(self, batch_size: int) -> int:
        place = self._place(batch_size, self.seconds.of(batch_size), 1.0)
        return self._widths[place.trial.index if place.trial is not None and place.trial.left else place.now]

    def drafts(self) -> bool:
        return True

    def observe(self, result: StepResult) -> None:
        self.tokens.observe(result)

    def timed(self, step: TimedStep) -> None:
        self.seconds.observe(step, self._widths.index(step.width))

    def _place(self, batch_size: int, seconds: list[float], share: float) -> Place:
        place = self._places.get(size_class(batch_size))
        if place is None:
            place = Place(self._first(seconds, share), len(seconds))
            self._places[size_class(batch_size)] = place
        return place

    def _tried(self, place: Place) -> int | None:
        """The width that a trial wants."""
        trial = place.trial
        if trial is None or not trial.left:
            return None
        trial.left -= 1
        return trial.index

    def _best(self, place: Place, seconds: list[float], share: float) -> int:
        """Take the fastest width, by what is known."""
        speeds = _speeds(self.tokens.believed(place.now), seconds, share)
        best = max(range(len(speeds)), key=speeds.__getitem__)
        doubt = DOUBT / math.sqrt(self.tokens.num_tests(place.now))  # a narrower width tests less
        if speeds[best] > (CLEAR_GAIN if best > place.now else 1 + doubt) * speeds[place.now]:
            place.now = best
        if place.trial is not None:
            place.trial.settling -= 1
            if place.trial.settling == 0:
                place.end_trial()
        return place.now

    def _first(self, seconds: list[float], share: float) -> int:
        """The width of a class without results."""
        speeds = _speeds(self.tokens.committed(), seconds, share)
        usable = [i for i in range(len(seconds)) if self.tokens.was_tested(i) or seconds[i] <= FIRST_COST * seconds[0]]
        best = max(usable, key=speeds.__getitem__, default=0)
        return best if speeds[best] > CLEAR_GAIN * speeds[0] else 0

    def _next_trial(self, place: Place, batch_size: int, seconds: list[float], share: float) -> Trial | None:
        """What may be faster than now and has been paid for."""
        now, tokens = place.now, self.tokens.committed()
        speed = _speeds(tokens, seconds, share)[now]
        hoped_s = self.seconds.hoped(batch_size)[:now] + seconds[now:]
        hoped = _speeds(self.tokens.hoped(now), hoped_s, share)
        wanted = [i for i, hope in enumerate(hoped) if i != now and hope > CLEAR_GAIN * speed]
        open_ = [i for i in wanted if place.closed_until[i] <= place.num_steps]
        if not open_:
            return None
        index = max(open_, key=hoped.__getitem__)
        num_steps = TRIAL_STEPS  # of a narrower width, whose guesses are known, only the time is asked
        if index > now:
            num_steps = min(max(num_steps, -(-TRIAL_TESTS // batch_size)), MOST_TRIAL_STEPS)
        # At worst a wider step commits what one of now does. After a plain one nothing has been guessed.
        committed = num_steps * tokens[min(index, now)]
        price = num_steps * seconds[index] - committed / speed
        if index == 0:
            price += seconds[now] - 1 / speed
        if place.earned_s < price:
            return None
        place.earned_s -= max(price, 0.0)
        return Trial(index, num_steps)

    def _note(self, now: int, batch_size: int) -> None:
        self._num_kept = self._num_kept + 1 if now == self._now else 1
        self._now = now
        if now != self._logged and self._num_kept == LASTING_STEPS:
            tokens, seconds = self.tokens.committed(), self.seconds.of(batch_size)
            log.info(
                "Step width %d -> %d at batch %d: %.2f tokens a slot in %.3f ms, before %.2f in %.3f ms",
                *(self._widths[self._logged], self.current, batch_size),
                *(tokens[now], 1000 * seconds[now], tokens[self._logged], 1000 * seconds[self._logged]),
            )
            self._logged = now


def _speeds(tokens: list[float], seconds: list[float], share: float) -> list[float]:
    """Tokens per second and slot, if so large a share of the slots has guesses."""
    return [(1 + (count - 1) * share) / s for count, s in zip(tokens, seconds, strict=True)]
