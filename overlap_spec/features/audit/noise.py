"""What the shape of a batch changes: the noise that a difference must exceed to be a fault.

Some requests are run twice by plain decoding, in batches of different sizes. Their margins would be the same if
rounding did not depend on the shape of a batch. The bound is `FACTOR` times what all but one in a thousand of them
change by; before so many have been seen, `FACTOR` times the largest change; never less than the dtype's `FLOORS`.

Noise is not the same everywhere: where a model is at a tipping point, every other rounding gives another margin. So a
difference beyond the bound is run in more shapes, and must exceed `SPREAD` times what its own margin changes by, too.
"""

import math
from array import array
from collections import Counter
from collections.abc import Sequence

from overlap_spec.messages import BOUNDLESS

ENOUGH = 1000  # margins, for a quantile of one in a thousand
TAIL = 1e-3
FACTOR = 3.0
RUNS = 6  # of a request with a suspect, in as many shapes
SPREAD = 2.0  # six runs of a normal margin differ by 2.5 standard deviations
FINENESS = 32  # intervals of the histogram in a factor of 10: an interval's ends differ by 7%

# Logits: a few units in the last place of a logit of 32, a large one. Below, nothing can be told from rounding.
FLOORS = {"float64": 1e-9, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}


class BatchNoise:
    """A histogram of how much margins change. `floor`: the least bound; `exact`: nothing is noise, whatever is seen."""

    def __init__(self, floor: float, exact: bool = False) -> None:
        self._floor = floor
        self._exact = exact
        self._counts: Counter[int] = Counter()
        self._largest = 0.0
        self.num_margins = 0

    @property
    def is_measured(self) -> bool:
        """Whether the bound rests on enough margins."""
        return self.num_margins >= ENOUGH

    @property
    def runs_of_suspects(self) -> int:
        """How often a request is run, at most, before one of its tokens is a fault."""
        return 2 if self._exact else RUNS

    @property
    def bound(self) -> float:
        """Margins up to this are noise, in logits."""
        if self._exact:
            return 0.0
        tail = self.quantile(1 - TAIL) if self.is_measured else self._largest
        return max(self._floor, FACTOR * (tail or 0.0))

    def is_fault(self, margins: Sequence[float]) -> bool:
        """Whether noise does not explain another token; by these margins plain decoding's is ahead, in each run."""
        if self._exact:
            return True
        least = min(margins)
        return least > self.bound and least > SPREAD * (max(margins) - least)

    def add(self, first: "array[float]", second: "array[float]") -> None:
        """Learn from two runs of a request. A margin of NaN, of logits that were not finite, tells nothing."""
        for one, other in zip(first, second, strict=True):
            if not (abs(one) <= BOUNDLESS and abs(other) <= BOUNDLESS):
                continue
            change = abs(one - other)
            self._largest = max(self._largest, change)
            self._counts[_interval(change)] += 1
            self.num_margins += 1

    def quantile(self, share: float) -> float | None:
        """What this share of margins changes by at most, to 7%; None without any."""
        left = share * self.num_margins
        for interval in sorted(self._counts):
            left -= self._counts[interval]
            if left <= 0:
                return min(10 ** ((interval + 1) / FINENESS), self._largest)
        return None


def _interval(change: float) -> int:
    return math.floor(math.log10(max(change, 1e-18)) * FINENESS)
