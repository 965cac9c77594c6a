"""How many tokens a step of each width commits, learnt from results.

A window's columns are best first and parents before children, in chains and in trees: whatever a step accepted, one of
width w would have accepted those of its columns that are below w. So a step tests its own width and all narrower ones:

    widths        1         2                 4                        8
    committed     1   +     r1       +     r1 r2         +          r1 r2 r3

The columns between two widths are a group. Its r is how often it is accepted, relative to the group before: in a chain,
the rate at which a guess is accepted once those before it were. Each r is a slow average. While steps are narrow, the
first r beyond them is not tested and drifts up. So that width is tried again now and then, until a few steps show that
it still does not pay. Such trials take a share of steps of about DRIFT x (hoped-for tokens / tokens that would pay).
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

from overlap_spec.messages import StepResult

MEMORY = 128  # tests after which an older one counts 1/e; as many as MEMORY_STEPS steps make where that is more
MEMORY_STEPS = 8
HOPED_RATE = 0.85  # of a column that is not tested, as a share of the one before it
FIRST_TESTS = 4.0  # how many tests that counts as at first
DRIFT = 1 / 256  # how fast hope comes back, in terms of how fast tests take it away


def fading(count: int) -> float:
    """The weight that older tests keep after so many new ones."""
    return math.exp(-count / max(MEMORY, MEMORY_STEPS * count))


def accepted_columns(result: StepResult) -> Sequence[Sequence[int]]:
    """The window columns of each slot's accepted guesses."""
    return result.paths or [range(1, len(run)) for run in result.tokens]


def _alike(result: StepResult) -> dict[tuple[Sequence[int], int], int]:
    """How many slots accepted the same columns, and had their last guess in the same one: few kinds, of many slots."""
    lasts = result.last_guesses or result.num_proposed
    if result.paths:
        return Counter(zip(map(tuple, result.paths), lasts, strict=True))
    if lasts.count(lasts[0]) == len(lasts):  # as a rule; numbers are counted faster than tuples
        return {(range(1, length), lasts[0]): slots for length, slots in Counter(map(len, result.tokens)).items()}
    kinds = Counter(zip(map(len, result.tokens), lasts, strict=True))
    return {(range(1, length), last): slots for (length, last), slots in kinds.items()}


class AcceptedTokens:
    """The estimate of this module's docstring. `widths`: ascending, from 1."""

    def __init__(self, widths: Sequence[int]) -> None:
        groups = [range(low, high) for low, high in pairwise((0, *widths))]  # of columns; group 0 is the root
        sums = [sum(HOPED_RATE**column for column in group) for group in groups]
        self._widths = widths
        self._group_of = [i for i, group in enumerate(groups) for _ in group]  # each column
        self._hoped = [after / before for before, after in pairwise(sums)]
        self._rates = list(self._hoped)  # of group i + 1 after group i
        self._tests = [FIRST_TESTS] * len(self._rates)

    def committed(self) -> list[float]:
        """Expected tokens per slot, for each width."""
        return list(accumulate(accumulate((1.0, *self._rates), mul)))

    def observe(self, result: StepResult) -> None:
        """Take in a settled decode step."""
        by_last: dict[int, list[int]] = {}  # last column with a guess -> accepted columns of each group
        for (columns, last), slots in _alike(result).items():
            accepted = by_last.setdefault(last, [0] * len(self._widths))
            accepted[0] += slots
            for column in columns:
                accepted[self._group_of[column]] += slots
        widest = max(by_last, default=0)
        for i, width in enumerate(self._widths[1:]):
            if widest < width - 1:
                drift = DRIFT * (1 - fading(len(result.tokens)))
                self._rates[i] += drift * (self._hoped[i] - self._rates[i])
                break
            tests = passes = 0
            for last, accepted in by_last.items():
                if last >= width - 1:
                    tests += accepted[i]
                    passes += accepted[i + 1]
            kept = fading(tests) * self._tests[i]
            self._tests[i] = kept + tests
            self._rates[i] = (kept * self._rates[i] + passes) / self._tests[i]
