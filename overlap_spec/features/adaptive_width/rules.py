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
from collections.abc import Sequence

from overlap_spec.config import WidthRule
from overlap_spec.messages import StepResult
from overlap_spec.scheduler.width import WidthPolicy


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


class RuledWidth(WidthPolicy):
    """The rules of a file. `padded`: the batch sizes that are captured, to which a batch is rounded up."""

    learns = True

    def __init__(self, rules: Sequence[WidthRule], padded: Sequence[int]) -> None:
        self._rules = [RuledSteps(rule) for rule in sorted(rules, key=lambda rule: rule.batch_size)]
        self._padded = padded

    def choose(self, batch_size: int, num_plain: int = 0) -> int:
        return self._rule_for(batch_size).steps + 1

    def observe(self, result: StepResult, asked: int = 0) -> None:
        num_slots, had_guesses = len(result.tokens), asked or any(result.num_proposed)
        accepted = sum(map(len, result.tokens)) / num_slots - 1
        self._rule_for(num_slots).observe(accepted if had_guesses else None)

    def _rule_for(self, batch_size: int) -> RuledSteps:
        padded = next((size for size in self._padded if size >= batch_size), batch_size)
        return self._rules[max(sum(each.rule.batch_size <= padded for each in self._rules) - 1, 0)]
