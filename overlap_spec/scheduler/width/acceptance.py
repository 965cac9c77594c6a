"""How often guesses stand, smoothed, and what a step of any width is expected to commit by that.

In a chain guess i is tested once those before it stood: a step of width w commits 1 + r1 + r1 r2 + .. + r1..r(w-1)
tokens per slot. Where guesses branch, a window's columns are best first and parents before children: whatever a step
accepted, one of width w would have accepted those of its columns that are among the first w. So each column is tested
by every step that has it, whichever others stand, and width w commits 1 + c1 + .. + c(w-1), ci being how often column i
stands.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from overlap_spec.messages import StepResult

MEMORY = 64  # tests of a guess after which an older one counts 1/e; eight steps' worth where that is more
FIRST_RATE = 0.7  # what guess 1 is believed to have been accepted at, and each next one where the one before it was ..
FIRST_TESTS = 8.0  # .. the first in so many tests before the first
PRIOR_TESTS = 2.0  # how many tests the belief is worth that a guess's rate is its predecessor's
STALE_TESTS = 6.0  # how many tests the knowledge of an untested guess is worth when it is probed


class Estimator(Protocol):
    """Learns from results what widths are worth."""

    @property
    def has_tested(self) -> bool:
        """Whether anything is known; before, rates are what is believed."""
        ...

    def observe(self, result: StepResult) -> None:
        """Take in a settled decode step."""
        ...

    def rates(self) -> list[float]:
        """Of guesses 1..K, as a log line may have them."""
        ...

    def committed(self) -> list[float]:
        """Expected tokens per slot of a step of width 1..W."""
        ...

    def forget(self, tested: int) -> None:
        """Let what is known of the guesses after the first `tested` count for little."""
        ...


def fading(count: int) -> float:
    """What older tests count for after so many new ones."""
    return math.exp(-count / max(MEMORY, 8 * count))


class Tally:
    """Of guesses 1..K, how often each was tested and passed; older tests count for less."""

    def __init__(self, num_guesses: int, first_rate: float = FIRST_RATE) -> None:
        self.tests = [FIRST_TESTS] + [0.0] * (num_guesses - 1)
        self.passes = [first_rate * FIRST_TESTS] + [0.0] * (num_guesses - 1)
        self.has_tested = False

    def take(self, tests: Sequence[int], passes: Sequence[int]) -> None:
        """Take in one step's."""
        self.has_tested = self.has_tested or any(tests)
        for i, count in enumerate(tests):
            if count:
                kept = fading(count)
                self.tests[i] = kept * self.tests[i] + count
                self.passes[i] = kept * self.passes[i] + passes[i]

    def rates(self, falling: float) -> list[float]:
        """Each is believed to be `falling` times the one before it, until it is tested."""
        rates = [self.passes[0] / self.tests[0]]
        for tests, passes in zip(self.tests[1:], self.passes[1:], strict=True):
            rates.append((passes + PRIOR_TESTS * falling * rates[-1]) / (tests + PRIOR_TESTS))
        return rates

    def forget(self, tested: int) -> None:
        """See `Estimator`."""
        for i in range(tested, len(self.tests)):
            kept = min(1.0, STALE_TESTS / self.tests[i]) if self.tests[i] else 1.0
            self.tests[i] *= kept
            self.passes[i] *= kept


class ChainAcceptance:
    """Rates at which guesses 1..K are accepted, each given that those before it were."""

    def __init__(self, num_guesses: int, first_rate: float = FIRST_RATE) -> None:
        self._tally = Tally(num_guesses, first_rate)

    @property
    def has_tested(self) -> bool:
        """See `Estimator`."""
        return self._tally.has_tested

    def observe(self, result: StepResult) -> None:
        """See `Estimator`."""
        if any(result.num_proposed):
            lengths = zip(map(len, result.tokens), result.num_proposed, strict=True)
            # The guess after the accepted ones was tested too, and failed.
            self.take(Counter((min(length, proposed), length - 1) for length, proposed in lengths))

    def take(self, rows: Mapping[tuple[int, int], int]) -> None:
        """Take in one step: how many rows tested so many of their guesses, of which so many passed."""
        num_guesses = len(self._tally.tests)
        tests, passes = [0] * num_guesses, [0] * num_guesses
        for (tested, passed), count in rows.items():
            for i in range(tested):
                tests[i] += count
                passes[i] += count * (i < passed)
        self._tally.take(tests, passes)

    def rates(self) -> list[float]:
        """See `Estimator`."""
        return self._tally.rates(falling=1.0)

    def committed(self) -> list[float]:
        """See `Estimator`."""
        expected, reached = [1.0], 1.0
        for rate in self.rates():
            reached *= rate
            expected.append(expected[-1] + reached)
        return expected

    def forget(self, tested: int) -> None:
        """See `Estimator`."""
        self._tally.forget(tested)


class ColumnAcceptance:
    """Rates at which columns 1..K stand, whichever others do (`StepResult.paths`)."""

    def __init__(self, num_guesses: int) -> None:
        self._tally = Tally(num_guesses)

    @property
    def has_tested(self) -> bool:
        """See `Estimator`."""
        return self._tally.has_tested

    def observe(self, result: StepResult) -> None:
        """See `Estimator`. Steps without paths had no guess."""
        num_guesses = len(self._tally.tests)
        tests, passes = [0] * num_guesses, [0] * num_guesses
        for last_guess, count in Counter(result.last_guesses).items():
            for i in range(last_guess):
                tests[i] += count
        for path in result.paths:
            for column in path:
                passes[column - 1] += 1
        self._tally.take(tests, passes)

    def rates(self) -> list[float]:
        """See `Estimator`."""
        return self._tally.rates(falling=FIRST_RATE)

    def committed(self) -> list[float]:
        """See `Estimator`."""
        expected = [1.0]
        for rate in self.rates():
            expected.append(expected[-1] + rate)
        return expected

    def forget(self, tested: int) -> None:
        """See `Estimator`."""
        self._tally.forget(tested)
