"""How wide steps of self-drafting methods are: as wide as their guesses pay for.

Guesses of n-grams are free, and the whole window is filled after every step, so the width may change with every step.
Guesses beyond a narrow step are tested as well: at every width the device reports which guess would have been right
next, if any. The next windows are expected to be like those of the last result, which is a step or two old: a match
usually goes on. A slot without a match may have one by then: what such slots had two steps later is learnt, too.

A guess after a long match is right more often than one after a short match, so each class of matches has a rate of its
own. How many columns a tree needs for a level is learnt from the columns of the right guesses there.

Free is not quite true: of a small model's step the lookup takes a fifth. So steps rest while it does not pay: they are
narrow, and nothing is looked up after them. Lookups are paid for with what they have gained (`credit.py`), and a match
that promises a clear gain keeps them going.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from overlap_spec.messages import LookaheadRows, StepCosts, StepResult, find
from overlap_spec.scheduler.width.credit import LookupCredit
from overlap_spec.scheduler.width.seconds import StepSeconds, TimedStep
from overlap_spec.scheduler.width.tokens import accepted_columns, fading

CLASSES = (1, 2, 4, 8)  # tokens of the longest match: each class from here to the next
FIRST_RATES = (0.2, 0.4, 0.6, 0.8)  # of their right guesses, before the first is tested
FIRST_TESTS = 8.0  # how many tests that counts as
COLUMN_SHARE = 1 / 16  # of a right guess in the mean column of its level
CLEAR_GAIN = 1.01  # tokens per second, over the narrowest step, for which a step is wider
NO_MATCH = -1
AFTER_NO_MATCH = 32.0  # results whose mean is what such slots are expected to have later
STEPS_AHEAD = 2  # from the step of a result to the step that is planned with it, while two are in flight


class Lookahead(NamedTuple):
    """One slot's whole window, as the device saw it."""

    kind: int  # index of the class of matches, or NO_MATCH
    levels: int  # of guesses
    columns: list[int]  # of the right ones, down to the first level without one or where the step's width ended
    tested: int  # levels


def lookaheads(result: StepResult) -> list[Lookahead]:
    """The windows of a result, but for slots whose step before rested."""
    none = [0] * len(result.tokens)
    found = find(result.extensions, LookaheadRows)
    facts = (none, none, none) if found is None else (found.levels, found.strengths, found.next_columns)
    seen = []
    for accepted, levels, strength, following in zip(accepted_columns(result), *facts, strict=True):
        if levels < 0:
            continue
        right = [*accepted, following] if following else list(accepted)
        seen.append(Lookahead(bisect_right(CLASSES, strength) - 1, levels, right, min(len(accepted) + 1, levels)))
    return seen


class MatchedWidth:
    """Explicit numbers: a whole window if some slot has a guess, else one column."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._matched = True

    def choose(self, batch_size: int, num_plain: int = 0) -> int:
        return self._width if self._matched else 1

    def after_prompts(self, batch_size: int) -> int:
        return self._width

    def drafts(self) -> bool:
        return True

    def observe(self, result: StepResult) -> None:
        found = find(result.extensions, LookaheadRows)
        self._matched = found is not None and any(level > 0 for level in found.levels)

    def timed(self, step: TimedStep) -> None:
        """See `WidthPolicy`."""


class MatchClass:
    """How often a guess is right after those before it were, and in which column of its level."""

    def __init__(self, rate: float, num_levels: int) -> None:
        self._tests, self._right = FIRST_TESTS, rate * FIRST_TESTS
        self._columns = [float(level) for level in range(1, num_levels + 1)]  # as in a chain

    def observe(self, windows: list[Lookahead]) -> None:
        """Take in a step's windows of this class."""
        tests = sum(window.tested for window in windows)
        kept = fading(tests)
        self._tests = kept * self._tests + tests
        self._right = kept * self._right + sum(len(window.columns) for window in windows)
        for window in windows:
            for level, column in enumerate(window.columns):
                self._columns[level] += COLUMN_SHARE * (column - self._columns[level])

    def committed(self, levels: int, widths: tuple[int, ...]) -> list[float]:
        """Expected tokens of a slot with so many levels of guesses, for each width."""
        reached, least = 1.0, 0
        tokens = [1.0] * len(widths)
        for column in self._columns[:levels]:
            reached *= self._right / self._tests
            least = max(least + 1, round(column))  # a level is behind the one before it
            tokens = [count + reached * (least < width) for count, width in zip(tokens, widths, strict=True)]
        return tokens


class AfterNoMatch:
    """Expected tokens, for each width, of a slot without a match `STEPS_AHEAD` steps before.

    Slots are told apart by their row. A row that has moved meanwhile counts as if it had not: that is rare.
    """

    def __init__(self, num_widths: int) -> None:
        self.tokens = [1.0] * num_widths
        self._weight = FIRST_TESTS  # of all results so far
        self._before: deque[list[bool]] = deque(maxlen=STEPS_AHEAD)  # of results: which rows had no match

    def observe(self, windows: list[Lookahead], expected: Mapping[tuple[int, int], list[float]]) -> None:
        """Take in a result. `expected`: tokens by the class and levels of its windows."""
        before = self._before[0] if len(self._before) == STEPS_AHEAD else []
        self._before.append([window.kind == NO_MATCH for window in windows])
        if not any(before) or len(before) != len(windows):
            return
        found = Counter((each.kind, each.levels) for each, had_none in zip(windows, before, strict=True) if had_none)
        self._weight = min(self._weight + 1, AFTER_NO_MATCH)
        for index, tokens in enumerate(self.tokens):
            now = sum(slots * expected[window][index] for window, slots in found.items()) / found.total()
            self.tokens[index] += (now - tokens) / self._weight

    def interrupt(self) -> None:
        """Between the last result and the next one, steps have rested."""
        self._before.clear()


def _fastest(tokens: Sequence[float], seconds: Sequence[float]) -> int:
    """The index of the width with the most tokens per second; 0 unless the gain is clear."""
    speeds = [count / s for count, s in zip(tokens, seconds, strict=True)]
    best = speeds.index(max(speeds))
    return best if speeds[best] > CLEAR_GAIN * speeds[0] else 0


class LookaheadWidth:
    """The policy of this module's docstring."""

    def __init__(self, costs: StepCosts) -> None:
        self._num_resting = 1 if costs.resting else 0  # kinds of steps before those of each width
        rows = [(*costs.resting[i : i + 1], *row) for i, row in enumerate(costs.seconds)]
        self._seconds = StepSeconds(costs.batch_sizes, rows)
        self._widths = costs.widths
        self._classes = [MatchClass(rate, costs.widths[-1] - 1) for rate in FIRST_RATES]
        self._windows = Counter({(NO_MATCH, 0): 1})  # (class, levels) of the slots of the last result with windows
        self._later = AfterNoMatch(len(costs.widths))
        self._credit = LookupCredit()
        self._drafted = True  # after the last step
        self._chosen_s = 0.0  # of the step that was chosen, with lookups

    def choose(self, batch_size: int, num_plain: int = 0) -> int:
        matched = [float(num_plain)] * len(self._widths)
        for (kind, levels), slots in self._windows.items():
            match = self._expected(kind, levels)
            matched = [count + slots * more for count, more in zip(matched, match, strict=True)]
        unmatched = sum(slots for (kind, _), slots in self._windows.items() if kind == NO_MATCH)
        tokens = [count + unmatched * (more - 1) for count, more in zip(matched, self._later.tokens, strict=True)]
        kinds = self._seconds.of(batch_size)
        seconds, resting_s = kinds[self._num_resting :], kinds[0] * self._num_resting
        best = _fastest(tokens, seconds)
        promised = matched[best] / seconds[best]  # matches that were seen
        of_slot = promised / (self._windows.total() + num_plain)
        looks = self._credit.grant(batch_size, num_plain, of_slot, resting_s)
        chosen = best if looks and self._drafted else 0  # after a step that rested there is no guess to verify
        self._chosen_s = seconds[chosen]
        return self._widths[chosen]

    def after_prompts(self, batch_size: int) -> int:
        return self._widths[-1]

    def drafts(self) -> bool:
        self._drafted = self._credit.spend(self._chosen_s)
        return self._drafted

    def observe(self, result: StepResult) -> None:
        self._credit.earn(result)
        windows = lookaheads(result)
        if not windows:
            self._later.interrupt()
            return
        self._windows = Counter((window.kind, window.levels) for window in windows)
        for kind, match_class in enumerate(self._classes):
            match_class.observe([window for window in windows if window.kind == kind and window.levels])
        self._later.observe(windows, {window: self._expected(*window) for window in self._windows})

    def timed(self, step: TimedStep) -> None:
        if not step.rests:
            self._seconds.observe(step, self._num_resting + self._widths.index(step.width))
        elif self._num_resting:
            self._seconds.observe(step, 0)

    def _expected(self, kind: int, levels: int) -> list[float]:
        """Tokens of a slot with such a window, for each width."""
        return self._classes[kind].committed(levels if kind != NO_MATCH else 0, self._widths)
