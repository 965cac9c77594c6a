"""How wide decode steps are where results say what the next windows hold: as wide as what is guessed there pays for.

Guesses of n-grams are free, and a window is filled whole after every step: so a step may have any width, at once. What
narrow steps leave out is tested all the same (`StepResult.next_columns`): at every width the device says which guess
would have been right next, if any. Nothing needs to be probed.

A guess is worth what it rests on: the last token alone is a weak reason, eight tokens are a strong one. Rates of
acceptance are kept for each class of match. The windows to come are taken to be like those of the last result, which
are a step or two old: matches go on while they are right. A width is then worth the tokens it is expected to commit,
summed over the slots, in the seconds that the worker measured; among equals the narrower. A narrow step sees the best
columns of a tree: how often the right guess of a level is among them is learnt as well.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence

from overlap_spec.messages import StepCosts, StepResult
from overlap_spec.scheduler.width.acceptance import PRIOR_TESTS, ChainAcceptance, fading
from overlap_spec.scheduler.width.policy import CostTable

CLASSES = (1, 2, 4, 8)  # tokens of the longest match: each class from here to the next
FIRST_RATES = (0.2, 0.4, 0.6, 0.8)  # what their guesses are believed to be accepted at, before the first is tested
WIDER_GAIN = 1.01  # tokens per second, over the narrowest step, for which a step is wider


def match_class(strength: int) -> int:
    """The class of a match of so many tokens; -1: no match."""
    return bisect_right(CLASSES, strength) - 1


class LevelColumns:
    """How often the right guess of a level is in a step of a width; in column i for level i, until it is known."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = widths
        levels = range(1, widths[-1])
        self._seen = [PRIOR_TESTS for _ in levels]
        self._within = [[PRIOR_TESTS * (level < width) for width in widths] for level in levels]

    def take(self, right: Mapping[tuple[int, int], int]) -> None:
        """Take in one step: how many right guesses a level had in a column."""
        for (level, column), count in right.items():
            kept = fading(count)
            self._seen[level - 1] = kept * self._seen[level - 1] + count
            self._within[level - 1] = [
                kept * within + count * (column < width)
                for within, width in zip(self._within[level - 1], self._widths, strict=True)
            ]

    def shares(self) -> list[list[float]]:
        """Of levels 1..K, by width."""
        return [[count / seen for count in within] for within, seen in zip(self._within, self._seen, strict=True)]


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

    def observe(self, result: StepResult) -> None:
        """See `WidthPolicy`."""
        self._matched = any(result.levels)


class LookaheadWidth:
    """The policy of this module's docstring."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = CostTable(costs)
        self._widths = costs.widths
        self.acceptance = [ChainAcceptance(self._widths[-1] - 1, rate) for rate in FIRST_RATES]
        self.columns = [LevelColumns(self._widths) for _ in CLASSES]
        self._windows = Counter({(-1, 0): 1})  # (class of match, levels of guesses) of the last result's slots

    def choose(self, batch_size: int) -> int:
        """See `WidthPolicy`."""
        seconds = self._costs.seconds(batch_size)
        committed = {kind: self._committed(kind) for kind in {kind for kind, _ in self._windows} if kind >= 0}
        best, best_speed = 0, 0.0
        for index in range(len(self._widths)):
            tokens = sum(
                slots * (1.0 if kind < 0 else committed[kind][levels][index])
                for (kind, levels), slots in self._windows.items()
            )
            speed = tokens / seconds[index]
            if index == 0 or speed > best_speed * (WIDER_GAIN if best == 0 else 1.0):
                best, best_speed = index, speed
        return self._widths[best]

    def planned(self, width: int, batch_size: int) -> None:
        """Nothing to note."""

    def observe(self, result: StepResult) -> None:
        """See `WidthPolicy`. Without levels no slot has a guess."""
        kinds = [match_class(strength) for strength in result.strengths] or [-1] * len(result.tokens)
        levels = result.levels or [0] * len(result.tokens)
        self._windows = Counter(zip(kinds, levels, strict=True))
        tested: list[Counter[tuple[int, int]]] = [Counter() for _ in CLASSES]
        right: list[Counter[tuple[int, int]]] = [Counter() for _ in CLASSES]
        for slot, (run, kind) in enumerate(zip(result.tokens, kinds, strict=True)):
            if levels[slot]:
                accepted = result.paths[slot] if result.paths else list(range(1, len(run)))
                columns = [*accepted, result.next_columns[slot]] if result.next_columns[slot] else accepted
                tested[kind][min(len(run), levels[slot]), len(columns)] += 1
                right[kind].update(enumerate(columns, start=1))
        for kind in range(len(CLASSES)):
            self.acceptance[kind].take(tested[kind])
            self.columns[kind].take(right[kind])

    def _committed(self, kind: int) -> list[list[float]]:
        """Expected tokens of a slot with 0..K levels of guesses, by width."""
        reached, tokens = 1.0, [1.0] * len(self._widths)
        expected = [tokens]
        for rate, shares in zip(self.acceptance[kind].rates(), self.columns[kind].shares(), strict=True):
            reached *= rate
            tokens = [count + reached * share for count, share in zip(tokens, shares, strict=True)]
            expected.append(tokens)
        return expected
