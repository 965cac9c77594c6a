"""How wide decode steps are: narrower where drafting would lose, down to 1, which is plain decoding.

What a step of a width is expected to commit is learnt from results (`acceptance.py`); it takes the seconds that the
worker measured at start. The policy maximizes tokens per second. It narrows at once, and widens only for a clear gain,
some steps after the last change: so it does not flap, and errs on the side of plain decoding.

Narrow steps do not test the guesses that they leave out. So now and then a few steps are wider, as rarely as it takes
to lose at most PROBE_BUDGET if all of their guesses fail; and what is known of guesses that are not tested counts for
little by then. The first step of a probe has no new guesses yet, the device proposes at the width that it verifies.
"""

import bisect
import logging
import math
from collections.abc import Callable
from typing import Protocol

from overlap_spec.messages import StepCosts, StepResult
from overlap_spec.scheduler.width.acceptance import Estimator

WIDER_GAIN = 1.03  # tokens per second, over those of now, for which a step gets wider
SETTLING_STEPS = 16  # after a change, until a step gets wider
PROBE_BUDGET = 0.01  # of the time
PROBE_TESTS = 4  # of a guess, in a probe
PROBE_EXTRA = 0.5  # steps' worth of catching up
LOG_S = 5.0  # between log lines

log = logging.getLogger(__name__)


class WidthPolicy(Protocol):
    """Chooses widths of decode steps. A prefill step always proposes for a whole window."""

    def choose(self, batch_size: int) -> int:
        """The width of the next decode step."""
        ...

    def planned(self, width: int, batch_size: int) -> None:
        """Note a decode step that is sent."""
        ...

    def observe(self, result: StepResult) -> None:
        """Learn from a settled decode step."""
        ...


class FixedWidth:
    """Every step is as wide as the window."""

    def __init__(self, width: int) -> None:
        self._width = width

    def choose(self, batch_size: int) -> int:
        """See `WidthPolicy`."""
        return self._width

    def planned(self, width: int, batch_size: int) -> None:
        """Nothing to note."""

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""


class CostTable:
    """Seconds per step for any batch size: linear between those that were measured, and beyond them."""

    def __init__(self, costs: StepCosts) -> None:
        assert len(costs.batch_sizes) == len(costs.seconds) > 0, "a row of seconds for every batch size"
        self.widths = costs.widths
        self._sizes = costs.batch_sizes
        self._rows = costs.seconds

    def seconds(self, batch_size: int) -> list[float]:
        """For each width."""
        if len(self._sizes) == 1:
            return list(self._rows[0])
        right = min(max(bisect.bisect_left(self._sizes, batch_size), 1), len(self._sizes) - 1)
        low, high = self._sizes[right - 1], self._sizes[right]
        part = (batch_size - low) / (high - low)
        return [max(a + part * (b - a), a / 2) for a, b in zip(self._rows[right - 1], self._rows[right], strict=True)]


class MeasuredWidth:
    """The policy of this module's docstring. `clock`: seconds; only the log lines depend on it."""

    def __init__(self, costs: StepCosts, acceptance: Estimator, clock: Callable[[], float]) -> None:
        self._costs = CostTable(costs)
        self._widths = costs.widths
        self._clock = clock
        self.acceptance = acceptance
        self.current = self._logged = self._widths[-1]
        self._logged_at = -math.inf
        self._since_change = 0
        self._since_probe = 0
        self._probe_left = 0

    def choose(self, batch_size: int) -> int:
        """See `WidthPolicy`. Asking twice changes nothing that a step in between would not."""
        seconds = self._costs.seconds(batch_size)
        best = self._best(seconds)
        if best != self.current:
            self._change(best, batch_size)
        if self._probe_left:
            return self._wider
        if self.current < self._widths[-1] and self._since_probe >= self._steps_between_probes(seconds, batch_size):
            self.acceptance.forget(self.current - 1)
            self._since_probe = 0
            self._probe_left = 1 + _probe_steps(batch_size)
            return self._wider
        return self.current

    def planned(self, width: int, batch_size: int) -> None:
        """See `WidthPolicy`."""
        self._since_change += 1
        self._since_probe += 1
        if self._probe_left:
            self._probe_left -= 1
        self._log_change(batch_size)

    def observe(self, result: StepResult) -> None:
        """See `WidthPolicy`."""
        self.acceptance.observe(result)

    @property
    def _wider(self) -> int:
        """The next width up."""
        return self._widths[min(self._widths.index(self.current) + 1, len(self._widths) - 1)]

    def _best(self, seconds: list[float]) -> int:
        """The width to have from now on."""
        committed = self.acceptance.committed()
        speeds = {width: committed[width - 1] / s for width, s in zip(self._widths, seconds, strict=True)}
        now = speeds[self.current]
        narrower = [width for width in self._widths if width < self.current and speeds[width] > now]
        wider = [width for width in self._widths if width > self.current and speeds[width] > WIDER_GAIN * now]
        if self._since_change < SETTLING_STEPS:
            wider = []
        return max((self.current, *narrower, *wider), key=speeds.__getitem__)

    def _steps_between_probes(self, seconds: list[float], batch_size: int) -> float:
        index = self._widths.index(self.current)
        loss = max(seconds[index + 1] / seconds[index] - 1, 0.0)
        return ((1 + _probe_steps(batch_size)) * loss + PROBE_EXTRA) / PROBE_BUDGET

    def _change(self, width: int, batch_size: int) -> None:
        self.current = width
        self._since_change = self._since_probe = self._probe_left = 0
        self._log_change(batch_size)

    def _log_change(self, batch_size: int) -> None:
        if self.current == self._logged or self._clock() - self._logged_at < LOG_S:
            return
        seconds = dict(zip(self._widths, self._costs.seconds(batch_size), strict=True))
        log.info(
            "Step width %d -> %d at batch %d: guesses %s at rates %s; a step takes %.3f ms, before %.3f ms",
            *(self._logged, self.current, batch_size),
            "accepted" if self.acceptance.has_tested else "assumed to be accepted",
            " ".join(f"{rate:.2f}" for rate in self.acceptance.rates()),
            *(1000 * seconds[self.current], 1000 * seconds[self._logged]),
        )
        self._logged, self._logged_at = self.current, self._clock()


def _probe_steps(batch_size: int) -> int:
    """Steps of a probe that test a guess."""
    return max(1, -(-PROBE_TESTS // batch_size))
