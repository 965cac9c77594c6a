"""Memory of processes against requests served, and whether it grows."""

import statistics
from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from support.command_line import Service
from support.leftovers import held_by

MOST_POINTS = 120  # of a fit: its cost is quadratic
WARM_SHARE = 0.4  # of a process's requests, after which caches and pools have their size
ENOUGH = 4000  # requests after that, below which a slope says little: floods are still the largest yet on busy cores
MOST_GROWTH = 1.0  # MB per 1,000 requests
MOST_GROWN_MB = 16.0  # of a process that has served less than that


@dataclass(frozen=True)
class Sample:
    """Of one process."""

    requests: int
    rss: int  # bytes


class Memory:
    """Samples of every process of a service, by role."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._samples: defaultdict[str, list[Sample]] = defaultdict(list)

    def sample(self, requests: int) -> None:
        """Look at every process after so many requests."""
        for role, held in held_by(self._service).items():
            self._samples[role].append(Sample(requests, held.rss))

    def report(self) -> list[dict[str, Any]]:
        """One row per process: its slope after its warm-up, and what it held at the ends."""
        return [row_of(role, samples) for role, samples in sorted(self._samples.items()) if len(samples) > 2]


def row_of(role: str, samples: list[Sample]) -> dict[str, Any]:
    first, last = samples[0].requests, samples[-1].requests
    warm = [each for each in samples if each.requests >= first + WARM_SHARE * (last - first)]
    slope = slope_mb(warm)
    span = warm[-1].requests - warm[0].requests
    ends = {"mb_at_first": round(samples[0].rss / 1e6, 1), "mb_at_last": round(samples[-1].rss / 1e6, 1)}
    grown = round((warm[-1].rss - warm[0].rss) / 1e6, 1)
    return {"process": role, "requests": span, "mb_per_1000_requests": slope, "mb_grown": grown, **ends}


def slope_mb(samples: list[Sample]) -> float:
    """The median of the slopes between all pairs (Theil 1950, Sen 1968), in MB per 1,000 requests."""
    thinned = samples[:: max(1, len(samples) // MOST_POINTS)]
    pairs = [(a, b) for a, b in combinations(thinned, 2) if b.requests > a.requests]
    slopes = [(b.rss - a.rss) / (b.requests - a.requests) for a, b in pairs]
    return round(statistics.median(slopes) * 1000 / 1e6, 3) if slopes else 0.0


def growing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows whose process grows: by its slope, if it has served enough to tell."""
    return [
        row
        for row in rows
        if (row["mb_per_1000_requests"] > MOST_GROWTH if row["requests"] >= ENOUGH else row["mb_grown"] > MOST_GROWN_MB)
    ]
