"""Searches for the highest rate of requests at which a server keeps what users are promised.

The command line knows limits without NumPy, which their figures need.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

MOST_STEPS = 12  # up or down, before it is between two rates

Json = dict[str, Any]
# A rate -> whether the limits were met (None: it was cut off before that was known), and the figures.
Try = Callable[[float], Awaitable[tuple[bool | None, Json]]]


@dataclass(frozen=True)
class Limits:
    """What a user is promised, in milliseconds."""

    first_token_ms: float = 500.0
    tpot_ms: float = 15.0

    def are_met(self, figures: Json) -> bool:
        """Whether the 99th percentiles of a run without errors are within the limits."""
        if figures["errors"] or figures["stopped_because"] or not figures["first_token_ms"]:
            return False
        slowest = figures["time_per_token_ms"].get("p99", 0.0)
        return bool(figures["first_token_ms"]["p99"] <= self.first_token_ms and slowest <= self.tpot_ms)


@dataclass(frozen=True)
class RateSearch:
    """Raises or lowers `first` by `growth` until it is between a rate that is met and one that is not, then bisects.

    It ends when both are within `precision` of each other. Rates are bisected by their ratio.
    """

    first: float
    precision: float = 0.08
    growth: float = 2.0

    async def run(self, attempt: Try, goes_on: Callable[[], bool] = lambda: True) -> Json:
        """Try rates while `goes_on`. Returns the highest that was met (0 if none was), and every trial."""
        met, missed = 0.0, math.inf
        trials: list[Json] = []
        while goes_on() and (rate := self._next(met, missed)):
            ok, figures = await attempt(rate)
            trials.append({"rate": rate, "met": ok, **figures})
            if ok is None:
                break
            if ok:
                met = max(met, rate)
            else:
                missed = min(missed, rate)
        bracketed = missed < math.inf and missed <= met * (1 + self.precision)
        return {
            "requests_per_second": met,
            "missed_at": None if missed == math.inf else missed,
            "complete": bracketed,
            "trials": trials,
        }

    def _next(self, met: float, missed: float) -> float:
        """The rate to try; 0 at the end."""
        if not met and missed == math.inf:
            return self.first
        if missed == math.inf:
            return round(self.growth * met, 10) if met < self.first * self.growth**MOST_STEPS else 0.0
        if not met:
            return round(missed / self.growth, 10) if missed > self.first / self.growth**MOST_STEPS else 0.0
        return round(math.sqrt(met * missed), 4) if missed > met * (1 + self.precision) else 0.0
