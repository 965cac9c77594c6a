"""Draft steps by a rule of a `--speculative-adaptive-config` file, which means what it means in SGLang.

A rule has a moving average of the guesses accepted per slot. Let s be the draft steps of now, and s' the next fewer of
its candidates. Every `update_interval` decode steps, after `warmup_batches`:

    average <= s' - 0.5 + down_hysteresis (0.5 + .. for s' = 0)   go down, and on, as long as it holds
    else average > s - 0.5 + up_hysteresis                        go up, and on
    at s = 0, where nothing is measured                           go up by one candidate: a probe
    ceiling_coeff c > 0                                           no more than max(1, ceil(c x average)), going up apart
"""

import math

from overlap_spec.config import WidthRule


class RuledSteps:
    """One rule at work."""

    def __init__(self, rule: WidthRule) -> None:
        self.rule = rule
        self.steps = rule.initial_steps
        self.average = float(self.steps - 1)  # neutral: it stays
        self._num_batches = 0

    def observe(self, accepted: float | None) -> None:
        """Take in a decode step: guesses accepted per slot, None where there were none to accept."""
        rule = self.rule
        if accepted is not None:
            self.average += rule.ema_alpha * (accepted - self.average)
        self._num_batches += 1
        since_warm = self._num_batches - rule.warmup_batches
        if since_warm > 0 and since_warm % rule.update_interval == 0:
            self.steps = self._next() if self.steps else self._probe()

    def _probe(self) -> int:
        chosen = self.rule.candidate_steps[:2][-1]
        self.average = self.average if self.average >= 0 else float(chosen - 1)
        return chosen

    def _next(self) -> int:
        rule, steps = self.rule, self.rule.candidate_steps
        begin = index = steps.index(self.steps)
        while index > 0 and self.average <= max(steps[index - 1] - 0.5, 0.5) + rule.down_hysteresis:
            index -= 1
        if index == begin:
            while index < len(steps) - 1 and self.average > steps[index] - 0.5 + rule.up_hysteresis:
                index += 1
        if rule.ceiling_coeff > 0 and steps[index] <= self.steps:
            while index > 0 and steps[index] > max(1, math.ceil(self.average * rule.ceiling_coeff)):
                index -= 1
        return steps[index]
