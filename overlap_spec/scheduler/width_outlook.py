"""How wide decode steps are where results say what the next windows hold: as wide as what is guessed there pays for.

Not here: the policy for methods whose guesses cost a draft's time (`width.py`). Guesses of n-grams are free, and a
window is filled whole after every step: so a step may have any width, at once. What narrow steps leave out is tested
all the same (`StepResult.outlooks`): at every width the device says whether the next guess would have been right too.
Nothing needs to be probed.

A guess is worth what it rests on: the last token alone is a weak reason, eight tokens are a strong one. Rates of
acceptance are kept for each class of match. The windows to come are taken to be like those of the last result, which
are a step or two old: matches go on while they are right. A width is then worth the tokens it is expected to commit,
summed over the slots, in the seconds that the worker measured; among equals the narrower. (A narrow step sees the best
columns of a tree; that they reach as deep as a chain's would is assumed.)
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from overlap_spec.messages import StepCosts
from overlap_spec.scheduler.width import Acceptance, CostTable

CLASSES = (1, 2, 4, 8)  # tokens of the longest match: each class from here to the next
FIRST_RATES = (0.2, 0.4, 0.6, 0.8)  # what their guesses are believed to be accepted at, before the first is tested
WIDER_GAIN = 1.01  # tokens per second, over the narrowest step, for which a step is wider


class Outlook:
    """One slot's window, as the device saw it (`StepResult`)."""

    __slots__ = ("kind", "levels", "next_was_right")

    def __init__(self, packed: int) -> None:
        strength = packed >> 8 & 255
        self.levels = packed & 255
        self.kind = bisect_right(CLASSES, strength) - 1  # -1: no match
        self.next_was_right = packed >> 16 & 1


class MatchedWidth:
    """Explicit numbers: a whole window if some slot has a guess, else one column."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._matched = True

    def choose(self, batch_size: int) -> int:
        """See `WidthPolicy`."""
        return self._width if self._matched else 1

    def planned(self, width: int, batch_size: int) -> None:
        """Nothing to note."""

    def observe(
        self, tokens: Sequence[Sequence[int]], num_proposed: Sequence[int], outlooks: Sequence[int] = ()
    ) -> None:
        """See `WidthPolicy`."""
        self._matched = any(Outlook(packed).levels for packed in outlooks)


class OutlookWidth:
    """The policy of this module's docstring."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = CostTable(costs)
        self._widths = costs.widths
        self.acceptance = [Acceptance(self._widths[-1] - 1, rate) for rate in FIRST_RATES]
        self._windows = Counter({(-1, 0): 1})  # (class of match, levels of guesses) of the last result's slots

    def choose(self, batch_size: int) -> int:
        """See `WidthPolicy`."""
        seconds = self._costs.seconds(batch_size)
        committed = [acceptance.committed() for acceptance in self.acceptance]
        best, best_speed = 0, 0.0
        for index, width in enumerate(self._widths):
            tokens = sum(
                slots * (1.0 if kind < 0 else committed[kind][min(levels, width - 1)])
                for (kind, levels), slots in self._windows.items()
            )
            speed = tokens / seconds[index]
            if index == 0 or speed > best_speed * (WIDER_GAIN if best == 0 else 1.0):
                best, best_speed = index, speed
        return self._widths[best]

    def planned(self, width: int, batch_size: int) -> None:
        """Nothing to note."""

    def observe(
        self, tokens: Sequence[Sequence[int]], num_proposed: Sequence[int], outlooks: Sequence[int] = ()
    ) -> None:
        """See `WidthPolicy`. Without outlooks no slot has a guess."""
        seen = [Outlook(packed) for packed in outlooks or [0] * len(tokens)]
        self._windows = Counter((outlook.kind, outlook.levels) for outlook in seen)
        tested: list[Counter[tuple[int, int]]] = [Counter() for _ in CLASSES]
        for run, outlook in zip(tokens, seen, strict=True):
            if outlook.levels:
                passed = len(run) - 1 + outlook.next_was_right
                tested[outlook.kind][min(len(run), outlook.levels), passed] += 1
        for acceptance, tests in zip(self.acceptance, tested, strict=True):
            acceptance.take(tests)
