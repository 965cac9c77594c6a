"""Watches whether a draft is any good: against chance, and against its own history.

A draft that works has its first guess accepted in every second or third step, whatever the text. One that is loaded
wrongly, or is damaged, is right by chance alone: it is *dead*. One whose first guesses are accepted far less often than
usual has *collapsed*: its weights or the traffic have changed. Requests of different classes are judged apart, because
a grammar or a temperature changes what a guess is up against.

The first guess is what counts: how many more a step accepts depends on its width too. N-grams are not watched: on text
without repetitions they are rightly never right.
"""

import logging
from dataclasses import dataclass

from msgspec.structs import replace

from overlap_spec.messages import DRAWS, DraftFigures, DraftState, Stats
from overlap_spec.scheduler.build import Parts
from overlap_spec.scheduler.hooks import Runs, SchedulerHook

ENOUGH_DRAFTS = 512  # verify steps of a class that asked for guesses, by which a draft is judged
DEAD_RATE = 0.01  # of their first guesses: if fewer are accepted, the draft is dead
FAST, SLOW = 1 / 2, 1 / 32  # weight of the newest such window in either mean
SETTLED = 8  # windows, after which the slow mean is a history
COLLAPSE = 0.5  # of the slow mean of first guesses: if the fast one is below, the draft has collapsed
CHECKS = "was the draft made for this target and this chat template, are its files whole, and has the traffic changed?"

log = logging.getLogger(__name__)


def attach(parts: Parts) -> SchedulerHook | None:
    """Watch the draft, if there is one."""
    return None if parts.limits.width == 1 or parts.limits.is_self_drafting else DraftHealth()


@dataclass
class ClassCounts:
    """Since start, of one class of requests: steps with guesses, or that had asked for some; guesses accepted."""

    drafts: int = 0
    accepted: int = 0
    first_accepted: int = 0

    def since(self, before: "ClassCounts") -> "ClassCounts":
        accepted, first = self.accepted - before.accepted, self.first_accepted - before.first_accepted
        return ClassCounts(self.drafts - before.drafts, accepted, first)


class ClassHealth:
    """A draft, as the requests of one class meet it."""

    def __init__(self, name: str) -> None:
        self.state = DraftState.UNKNOWN
        self._name = name
        self._judged = ClassCounts()
        self._num_windows = 0
        self._fast = self._slow = 0.0  # rates at which first guesses are accepted
        self._length = self._usual_length = 0.0  # accept lengths

    @property
    def figures(self) -> DraftFigures:
        """The state, and the accept lengths of late and as a rule, bonus included."""
        return DraftFigures(self.state, self._length, self._usual_length)

    def check(self, counts: ClassCounts) -> None:
        """Judge the draft if there are enough new steps. A change of its state is one line in the log."""
        new = counts.since(self._judged)
        if new.drafts < ENOUGH_DRAFTS:
            return
        self._judged = ClassCounts(counts.drafts, counts.accepted, counts.first_accepted)
        rate, length = new.first_accepted / new.drafts, 1 + new.accepted / new.drafts
        self._num_windows += 1
        self._fast += max(FAST, 1 / self._num_windows) * (rate - self._fast)
        self._length += max(FAST, 1 / self._num_windows) * (length - self._length)
        before, self.state = self.state, self._judge(rate)
        if self.state is not DraftState.DEAD:  # which is no habit to get used to
            slow = max(SLOW, 1 / self._num_windows)
            self._slow += slow * (rate - self._slow)
            self._usual_length += slow * (length - self._usual_length)
        if self.state is not before:
            self._report(before, new)

    def _judge(self, rate: float) -> DraftState:
        if rate < DEAD_RATE:
            return DraftState.DEAD
        if self._num_windows > SETTLED and self._fast < COLLAPSE * self._slow:
            return DraftState.COLLAPSED
        return DraftState.HEALTHY

    def _report(self, before: DraftState, new: ClassCounts) -> None:
        match self.state:
            case DraftState.DEAD:
                log.warning(
                    "The draft is hardly ever right for %s requests: of its last %d first guesses %d were accepted."
                    " Speculation only costs time; %s",
                    *(self._name, new.drafts, new.first_accepted, CHECKS),
                )
            case DraftState.COLLAPSED:
                log.warning(
                    "The draft is right far less often than usual for %s requests: accept length %.2f, before %.2f; %s",
                    *(self._name, self._length, self._usual_length, CHECKS),
                )
            case DraftState.HEALTHY if before is not DraftState.UNKNOWN:
                log.info("The draft is as good as usual again for %s requests", self._name)


class DraftHealth(SchedulerHook):
    """The draft of an engine. The classes of its requests are how their tokens are drawn."""

    def __init__(self) -> None:
        self.counts = {draw: ClassCounts() for draw in DRAWS}
        self._classes = {draw: ClassHealth(draw) for draw in DRAWS}

    def verified(self, runs: Runs, was_drafted: bool) -> None:
        """Count steps that asked the draft for guesses. A draft whose logits are NaN has none to give."""
        for (draw, length, num_proposed), rows in runs.items():
            if draw is not None and (num_proposed or was_drafted):
                counts = self.counts[draw]
                counts.drafts += rows
                counts.accepted += rows * (length - 1)
                counts.first_accepted += rows * (length > 1)

    def report(self, stats: Stats) -> Stats:
        """The report with the draft's state, as it is judged now."""
        self.check()
        figures = self.figures
        is_dead = any(each.state is DraftState.DEAD for each in figures.values())
        return replace(stats, draft_is_dead=is_dead, draft_classes=figures)

    @property
    def figures(self) -> dict[str, DraftFigures]:
        """Of each class that was judged."""
        judged = {name: each.figures for name, each in self._classes.items()}
        return {name: figures for name, figures in judged.items() if figures.state is not DraftState.UNKNOWN}

    def check(self) -> None:
        """Judge the draft by what was counted."""
        for draw, counts in self.counts.items():
            self._classes[draw].check(counts)
