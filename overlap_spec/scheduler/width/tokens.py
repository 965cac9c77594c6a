"""How many tokens a step of each width commits, learnt from results.

A window's columns are best first and parents before children, in chains and in trees: whatever a step accepted, one of
width w would have accepted those of its columns that are below w. So a step tests its own width and all narrower ones:

    widths        1         2                 4                        8
    columns       root      1                 2, 3                     4, 5, 6, 7
    committed     1   +     g1       +        g2          +            g3

A g is how many guesses of these columns a slot has had accepted, averaged over the slots of steps that were wide enough
to test them. It is a mean of what was seen, so no estimate is above what such a window can commit.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise

from overlap_spec.messages import StepResult, TreePaths, find

MEMORY = 128  # tests after which an older one counts 1/e; as many as MEMORY_STEPS steps make where that is more
MEMORY_STEPS = 8
FIRST_RATE = 0.7  # of guesses, each after the one before it, until the first is tested
FIRST_TESTS = 2.0  # how many tests that counts as
HOPED_RATE = 0.95  # of guesses that are hoped for
FADING_STEPS = 256  # after which what a wider window has shown counts 1/e


def fading(count: int) -> float:
    """The weight that older tests keep after so many new ones."""
    return math.exp(-count / max(MEMORY, MEMORY_STEPS * count))


def _faded(num_steps: float) -> float:
    return math.exp(-num_steps / FADING_STEPS)


def accepted_columns(result: StepResult) -> Sequence[Sequence[int]]:
    """The window columns of each slot's accepted guesses."""
    trees = find(result.extensions, TreePaths)
    return [range(1, len(run)) for run in result.tokens] if trees is None else trees.paths


def _alike(result: StepResult) -> dict[tuple[Sequence[int], int], int]:
    """How many slots accepted the same columns, and had their last guess in the same one: few kinds, of many slots."""
    if (trees := find(result.extensions, TreePaths)) is not None:
        return Counter(zip(map(tuple, trees.paths), trees.last_guesses, strict=True))
    lasts = result.num_proposed
    if lasts.count(lasts[0]) == len(lasts):  # as a rule; numbers are counted faster than tuples
        return {(range(1, length), lasts[0]): slots for length, slots in Counter(map(len, result.tokens)).items()}
    kinds = Counter(zip(map(len, result.tokens), lasts, strict=True))
    return {(range(1, length), last): slots for (length, last), slots in kinds.items()}


class TokensByWidth:
    """The estimate of this module's docstring. `widths`: ascending, from 1. Its indices stand for them."""

    def __init__(self, widths: Sequence[int]) -> None:
        groups = [range(low, high) for low, high in pairwise((0, *widths))]  # of columns; group 0 is the root
        self._widths = widths
        self._group_of = [i for i, group in enumerate(groups) for _ in group]  # each column
        self._gains = [sum(FIRST_RATE**column for column in group) for group in groups]
        self._hoped = list(accumulate(sum(HOPED_RATE**column for column in group) for group in groups))
        self._tests = [FIRST_TESTS] * len(groups)
        self._tested_at = [-math.inf] * len(groups)  # in steps
        self._num_steps = 0

    def committed(self) -> list[float]:
        """Tokens per slot, for each width, as the last steps that tested it have shown, however long ago."""
        return list(accumulate(self._gains))

    def believed(self, now: int) -> list[float]:
        """The same while steps are `now` wide: of wider ones, what was shown fades towards the narrower width's."""
        ages = [self._num_steps - at if i > now else 0.0 for i, at in enumerate(self._tested_at)]
        return list(accumulate(gain * _faded(age) for gain, age in zip(self._gains, ages, strict=True)))

    def hoped(self, now: int) -> list[float]:
        """The same while steps are `now` wide, if each wider one added to the one before it what a good draft would."""
        shown = self.committed()
        hopes = [*shown]
        for i in range(now + 1, len(hopes)):
            known = i == now + 1 or self.was_tested(i - 1)
            before = shown[i - 1] if known else hopes[i - 1]
            hopes[i] = min(before * self._hoped[i] / self._hoped[i - 1], float(self._widths[i]))
        return hopes

    def num_tests(self, index: int) -> float:
        """How many slots' tests what is known of a width rests on; older ones count less."""
        return self._tests[index]

    def was_tested(self, index: int) -> bool:
        """Whether any step was so wide."""
        return math.isfinite(self._tested_at[index])

    def observe(self, result: StepResult) -> None:
        """Take in a settled decode step."""
        by_last: dict[int, list[int]] = {}  # last column with a guess -> slots, then accepted columns of each group
        for (columns, last), slots in _alike(result).items():
            accepted = by_last.setdefault(last, [0] * len(self._widths))
            accepted[0] += slots
            for column in columns:
                accepted[self._group_of[column]] += slots
        self._num_steps += 1
        for i, width in enumerate(self._widths[1:], 1):
            testing = [accepted for last, accepted in by_last.items() if last >= width - 1]
            if not testing:
                break
            tests, age = sum(accepted[0] for accepted in testing), self._num_steps - 1 - self._tested_at[i]
            self._tested_at[i] = self._num_steps
            kept = fading(tests) * self._tests[i] * (_faded(age) if math.isfinite(age) else 1.0)
            self._tests[i] = kept + tests
            self._gains[i] = (kept * self._gains[i] + sum(accepted[i] for accepted in testing)) / self._tests[i]
