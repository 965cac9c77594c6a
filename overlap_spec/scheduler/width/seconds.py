"""How long a step of each width takes, for any number of rows.

    seconds = max(measured at start + excess, host)

Costs are measured with short contexts. Longer ones make all widths slower by about the same time, because they read the
same keys. So what the width that runs is seen to take longer, or shorter, than it did is taken to be so for all. What a
width takes in its first steps after others is its own: it tells of narrower ones that they do not exceed their cost by
more, of wider ones that they do not by less, and nothing else. Every class of batch sizes (1, 2, 3-4, 5-8, ..) has an
excess for each width. Where the device waits for the host, a step takes the host's time, whatever its width.
"""

import bisect
from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

COMMON_STEPS = 32  # over which times are averaged
FIRST_STEPS = 8  # of a width after others: their median counts
AWAY_STEPS = 256  # of a class, after which a width's own time is learnt again
WAITS = 0.05  # the share of a step that the device waits from which on it is the host that is slow
HOPE = 1 - 1 / 64  # what the host is hoped to take, over what it took, while the device does not wait for it
HOPED_COST = 0.95  # of what was measured at start
MOST_EXCESS = 8.0  # times the measured cost; more than that is no step's own time
MOST_CHANGE = 0.25  # of what a step should take, is the most by which it tells otherwise: some wait for others


class TimedStep(NamedTuple):
    """What a decode step took. `rests`: nothing was looked up after it. `waited`: of the seconds, by the device."""

    batch_size: int
    width: int
    rests: bool
    seconds: float
    waited: float = 0.0


class _OfClass:
    """What steps of a class of batch sizes take beyond their measured costs. `excess`: of each kind, never falling."""

    def __init__(self, excess: float, num_kinds: int) -> None:
        self.excess = [excess] * num_kinds
        self._firsts: list[list[float]] = [[] for _ in range(num_kinds)]  # of each kind since it came back
        self._last_at = [0] * num_kinds  # in steps of the class
        self._num_steps = 0

    def was_timed(self, kind: int) -> bool:
        """Whether a step of this kind was timed of late."""
        return bool(self._firsts[kind]) and self._num_steps - self._last_at[kind] <= AWAY_STEPS

    def learn(self, kind: int, seen: float, cost: float) -> None:
        """Take in what a step has taken beyond its measured cost."""
        self._num_steps += 1
        if not self.was_timed(kind):
            self._firsts[kind] = []
        self._last_at[kind] = self._num_steps
        firsts, known = self._firsts[kind], self.excess[kind]
        most = MOST_CHANGE * (cost + max(known, 0.0))
        if len(firsts) == FIRST_STEPS:
            change = min(max(seen - known, -most), most) / COMMON_STEPS
            self.excess = [each + change for each in self.excess]
            return
        firsts.append(seen)
        excess = min(max(median_low(firsts), known - most), known + most)
        if not any(self._firsts[:kind] + self._firsts[kind + 1 :]):
            self.excess = [excess] * len(self.excess)
            return
        below, above = self.excess[:kind], self.excess[kind + 1 :]
        self.excess = [*(min(each, excess) for each in below), excess, *(max(each, excess) for each in above)]


def size_class(batch_size: int) -> int:
    """Batch sizes of one class have about the same costs."""
    return (batch_size - 1).bit_length()


class StepSeconds:
    """The estimate of this module's docstring, for kinds of steps that are told apart by an index: widths, or rests."""

    def __init__(self, sizes: Sequence[int], rows: Sequence[Sequence[float]]) -> None:
        """`rows`: the seconds of every kind that were measured, for each batch size."""
        assert len(sizes) == len(rows) > 0, "a row of seconds for every batch size"
        self._sizes = sizes
        self._rows = rows
        self._host = 0.0
        self._known: dict[int, list[float]] = {}  # what was measured, by batch size
        self._classes: dict[int, _OfClass] = {}
        self._last = 0.0, 1  # excess of the narrowest steps in the class that was timed last, and its batch size

    def of(self, batch_size: int) -> list[float]:
        """For each kind."""
        learnt, costs = self._classes.get(size_class(batch_size)), self.measured(batch_size)
        excess = [self._excess_before(batch_size)] * len(costs) if learnt is None else learnt.excess
        # What makes all widths faster leaves the fastest one the fastest.
        return [max(cost + max(more, 0.0), self._host) for cost, more in zip(costs, excess, strict=True)]

    def hoped(self, batch_size: int) -> list[float]:
        """The same, but what was not timed of late is hoped to be a little faster than at start, but for the host."""
        learnt = self._classes.get(size_class(batch_size))
        expected, measured = self.of(batch_size), self.measured(batch_size)
        return [
            of_now if learnt is not None and learnt.was_timed(kind) else max(HOPED_COST * cost, self._host)
            for kind, (of_now, cost) in enumerate(zip(expected, measured, strict=True))
        ]

    def observe(self, step: TimedStep, kind: int) -> None:
        """Take in one step. It changes little: some wait for others on the device."""
        cost, batch_size = self.measured(step.batch_size)[kind], step.batch_size
        waited = step.waited > WAITS * step.seconds
        host = step.seconds if waited else min(step.seconds, HOPE * self._host)
        self._host += (min(host, MOST_EXCESS * cost) - self._host) / COMMON_STEPS
        learnt = self._classes.get(size_class(batch_size))
        if learnt is None:
            learnt = _OfClass(self._excess_before(batch_size), len(self._rows[0]))
            self._classes[size_class(batch_size)] = learnt
        excess = step.seconds - cost - (step.waited if waited else 0.0)
        learnt.learn(kind, min(excess, MOST_EXCESS * cost), cost)
        self._last = learnt.excess[0], batch_size

    def _excess_before(self, batch_size: int) -> float:
        """Of a class without a step: that of the last one's narrowest steps, as far as it is known of so many rows."""
        excess, last_size = self._last
        return excess * min(batch_size / last_size, 1.0)

    def measured(self, batch_size: int) -> list[float]:
        """Of each kind, at start: linear between the batch sizes that were measured, and beyond them."""
        if batch_size not in self._known:
            self._known[batch_size] = self._between(batch_size)
        return self._known[batch_size]

    def _between(self, batch_size: int) -> list[float]:
        if len(self._sizes) == 1:
            return list(self._rows[0])
        right = min(max(bisect.bisect_left(self._sizes, batch_size), 1), len(self._sizes) - 1)
        low, high = self._sizes[right - 1], self._sizes[right]
        part = (batch_size - low) / (high - low)
        return [max(a + part * (b - a), a / 2) for a, b in zip(self._rows[right - 1], self._rows[right], strict=True)]
