"""How wide decode steps are: the whole window, or the width that commits the most tokens per second.

The worker measures at start what a step of each width takes (`StepCosts`); `AcceptedTokens` learns slowly how
many tokens it commits. The fastest width is taken, down to 1, which is plain decoding. A wider one than now must be
faster by more than `CLEAR_GAIN`, so that the width does not swing between two that are about equal, and that the
narrower one of those is taken.

Costs are measured with short contexts. Longer ones make all widths slower by about the same time, because they read the
same keys: how much is learnt from the steps that are served (`Correction`), and wider steps then pay sooner. So they do
where the device waits for the host, whose time is the same in every width.
"""

import bisect
import logging
from typing import NamedTuple, Protocol

from overlap_spec.messages import StepCosts, StepResult
from overlap_spec.scheduler.width.acceptance import AcceptedTokens

CLEAR_GAIN = 1.02  # the width changes for so many times the tokens per second of now
CORRECTION_STEPS = 32  # over which times are averaged
WAITS = 0.05  # the share of a step that the device waits from which on it is the host that is slow
HOPE = 1 - 1 / 64  # what the host is hoped to take, over what it took, while the device does not wait for it
MOST_EXCESS = 8.0  # times the measured costs; more than that is no step's own time
LASTING_STEPS = 1024  # a width is logged once it was kept for so many: trials are not

log = logging.getLogger(__name__)


class TimedStep(NamedTuple):
    """What a decode step took. `rests`: nothing was looked up after it. `waited`: of the seconds, by the device."""

    batch_size: int
    width: int
    rests: bool
    seconds: float
    waited: float = 0.0


class WidthPolicy(Protocol):
    """Chooses widths of decode steps. A prefill step always proposes for a whole window."""

    def choose(self, batch_size: int, num_plain: int = 0) -> int:
        """The width of the next decode step, of whose slots `num_plain` have no guesses."""
        ...

    def drafts(self) -> bool:
        """Whether guesses are looked up after the step whose width was chosen last; called once it is planned.

        Asked of methods that are self-drafting. A step that is wider than one column must be followed by its draft.
        """
        ...

    def observe(self, result: StepResult) -> None:
        """Learn from a settled decode step."""
        ...

    def timed(self, step: TimedStep) -> None:
        """Learn from the time of a decode step that followed another one of its kind."""
        ...


class FixedWidth:
    """Every step is as wide as the window."""

    def __init__(self, width: int) -> None:
        self._width = width

    def choose(self, batch_size: int, num_plain: int = 0) -> int:
        return self._width

    def drafts(self) -> bool:
        return True

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""

    def timed(self, step: TimedStep) -> None:
        """Nothing to learn."""


class Correction:
    """What steps took of late, beside their measured costs. Tables of one policy share it.

    `excess`: seconds of the device beyond the cost. `host`: seconds that the host takes for a step, as far as known:
    all of a step for which the device has waited, at most all of one for which it has not. Those say no more, so `host`
    fades slowly, until a narrower step shows it.
    """

    def __init__(self) -> None:
        self.excess = self.host = 0.0

    def observe(self, step: TimedStep, cost: float) -> None:
        """Take in one step. It changes little: some wait for others on the device."""
        waited = step.waited > WAITS * step.seconds
        excess = step.seconds - cost - (step.waited if waited else 0.0)
        host = step.seconds if waited else min(step.seconds, HOPE * self.host)
        self.excess += (min(excess, MOST_EXCESS * cost) - self.excess) / CORRECTION_STEPS
        self.host += (min(host, MOST_EXCESS * cost) - self.host) / CORRECTION_STEPS


class CostTable:
    """Seconds per step for any batch size: linear between those that were measured, and beyond them."""

    def __init__(self, costs: StepCosts, correction: Correction | None = None) -> None:
        assert len(costs.batch_sizes) == len(costs.seconds) > 0, "a row of seconds for every batch size"
        self.widths = costs.widths
        self._sizes = costs.batch_sizes
        self._rows = costs.seconds
        self._correction = correction or Correction()
        self._known: dict[int, list[float]] = {}  # what was measured, by batch size

    def seconds(self, batch_size: int) -> list[float]:
        """For each width."""
        more = max(self._correction.excess, 0.0)  # what makes all widths faster leaves the fastest one the fastest
        host = self._correction.host
        return [max(seconds + more, host) for seconds in self._measured(batch_size)]

    def correct(self, step: TimedStep) -> None:
        """Take in what a step has taken."""
        self._correction.observe(step, self._measured(step.batch_size)[self.widths.index(step.width)])

    def _measured(self, batch_size: int) -> list[float]:
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


class MeasuredWidth:
    """The policy of this module's docstring."""

    def __init__(self, costs: StepCosts) -> None:
        self.accepted = AcceptedTokens(costs.widths)
        self._costs = CostTable(costs)
        self._widths = costs.widths
        self._now = self._logged = len(self._widths) - 1  # as indices
        self._num_kept = 0  # steps since the last change

    @property
    def current(self) -> int:
        return self._widths[self._now]

    def choose(self, batch_size: int, num_plain: int = 0) -> int:
        seconds, tokens = self._costs.seconds(batch_size), self.accepted.committed()
        tokens = [count + (1 - count) * num_plain / batch_size for count in tokens] if num_plain else tokens
        speeds = [count / s for count, s in zip(tokens, seconds, strict=True)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if speeds[best] > (CLEAR_GAIN if best > self._now else 1.0) * speeds[self._now]:
            self._now, self._num_kept = best, 0
        self._num_kept += 1
        if self._now != self._logged and self._num_kept == LASTING_STEPS:
            log.info(
                "Step width %d -> %d at batch %d: %.2f tokens a slot in %.3f ms, before %.2f in %.3f ms",
                *(self._widths[self._logged], self.current, batch_size),
                *(tokens[self._now], 1000 * seconds[self._now], tokens[self._logged], 1000 * seconds[self._logged]),
            )
            self._logged = self._now
        return self.current

    def drafts(self) -> bool:
        return True

    def observe(self, result: StepResult) -> None:
        self.accepted.observe(result)

    def timed(self, step: TimedStep) -> None:
        self._costs.correct(step)
