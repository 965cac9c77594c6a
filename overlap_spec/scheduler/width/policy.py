"""How wide decode steps are: the whole window, or the width that commits the most tokens per second.

The worker measures at start what a step of each width takes (`StepCosts`); `AcceptedTokens` learns slowly how
many tokens it commits. The fastest width is taken, down to 1, which is plain decoding. It is kept until another one is
faster by more than `CLEAR_GAIN`, so that the width does not swing between two that are about equal.
"""

import bisect
import logging
from typing import Protocol

from overlap_spec.messages import StepCosts, StepResult
from overlap_spec.scheduler.width.acceptance import AcceptedTokens

CLEAR_GAIN = 1.02  # the width changes for so many times the tokens per second of now
LASTING_STEPS = 1024  # a width is logged once it was kept for so many: trials are not

log = logging.getLogger(__name__)


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
        if speeds[best] > CLEAR_GAIN * speeds[self._now]:
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
