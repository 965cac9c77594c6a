"""A histogram that counts one observation many times at once.

prometheus-client's own cannot: its `observe` adds one. A chunk of k tokens is k inter-token latencies.
"""

from bisect import bisect_left
from itertools import accumulate


class WeightedHistogram:
    """Counts by upper bound. `bounds` ascend, in the unit of what is observed; above the last one is +Inf."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count `value` `weight` times."""
        self._counts[bisect_left(self._bounds, value)] += weight
        self._sum += value * weight

    @property
    def total(self) -> float:
        """Sum of all that was observed."""
        return self._sum

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and cumulative count, as the text format wants them."""
        names = [*map(str, self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))
