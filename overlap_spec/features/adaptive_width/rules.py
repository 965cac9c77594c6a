"""Draft steps by the rules of a `--speculative-adaptive-config` file, which means what it means in SGLang.

A rule has a moving average of the guesses accepted per slot. Let s be the draft steps of now, and s' the next fewer of
its candidates. Every `update_interval` decode steps, after `warmup_batches`:

    average <= s' - 0.5 + down_hysteresis (0.5 + .. for s' = 0)   go down, and on, as long as it holds
    else average > s - 0.5 + up_hysteresis                        go up, and on
    at s = 0, where nothing is measured                           go up by one candidate: a probe
    ceiling_coeff c > 0                                           no more than max(1, ceil(c x average)), going up apart
"""

import math
from bisect import bisect_left, bisect_right

from overlap_spec.config import WidthRule


class RuledSteps:
    """One rule at work. Candidates are ascending."""

    def __init__(self, rule: WidthRule) -> None:
        self.rule, self.steps = rule, rule.initial_steps
        self.average = float(self.steps - 1)  # neutral: it stays
        self._num_batches = 0

    def observe(self, accepted: float | None) -> None:
        """Take in a decode step: guesses accepted per slot, None where there were none to accept."""
        if accepted is not None:
            self.average += self.rule.ema_alpha * (accepted - self.average)
        self._num_batches += 1
        since_warm = self._num_batches - self.rule.warmup_batches
        if since_warm > 0 and since_warm % self.rule.update_interval == 0:
            self.steps = self._next()

    def _next(self) -> int:
        rule, steps, now = self.rule, self.rule.candidate_steps, self.rule.candidate_steps.index(self.steps)
        if self.steps == 0:
            self.average = self.average if self.average >= 0 else float(steps[:2][-1] - 1)
            return steps[:2][-1]
        borders = [max(each - 0.5, 0.5) for each in steps]  # from each candidate to the next
        index = bisect_left(borders, self.average, hi=now, key=lambda border: border + rule.down_hysteresis)
        if index == now:
            index = bisect_left(borders, self.average, now, len(steps) - 1, key=lambda each: each + rule.up_hysteresis)
        if rule.ceiling_coeff > 0 and index <= now:
            most = max(1, math.ceil(self.average * rule.ceiling_coeff))
            index = min(index, max(bisect_right(steps, most) - 1, 0))
        return steps[index]
