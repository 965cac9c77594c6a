"""Step widths by the rules of a `--speculative-adaptive-config` file, which mean what they mean in SGLang.

Each rule holds from a batch size on and has its own memory: a moving average of the guesses accepted per slot. Let s be
the draft steps of now, and s' the next fewer of the rule's candidates. Every `update_interval` decode steps, after
`warmup_batches`:

    average <= s' - 0.5 + down_hysteresis (0.5 + .. for s' = 0)   go down, and on, as long as it holds
    else average > s - 0.5 + up_hysteresis                        go up, and on
    at s = 0, where nothing is measured                           go up by one candidate: a probe
    ceiling_coeff c > 0                                           no more than max(1, ceil(c x average)), going up apart
"""

import bisect
import logging
import math
from collections.abc import Sequence

from overlap_spec.config import WidthRule
from overlap_spec.messages import StepResult
from overlap_spec.scheduler.width.seconds import TimedStep

log = logging.getLogger(__name__)


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
            self.steps = self._next()

    def _next(self) -> int:
        candidates, index = self.rule.candidate_steps, self.rule.candidate_steps.index(self.steps)
        if self.steps == 0:
            chosen = candidates[min(1, len(candidates) - 1)]
            self.average = self.average if self.average >= 0 else float(chosen - 1)
            return chosen
        begin = index
        while index > 0 and self.average <= max(candidates[index - 1] - 0.5, 0.5) + self.rule.down_hysteresis:
            index -= 1
        if index == begin:
            while index < len(candidates) - 1 and self.average > candidates[index] - 0.5 + self.rule.up_hysteresis:
                index += 1
        if self.rule.ceiling_coeff > 0 and candidates[index] <= self.steps:
            ceiling = max(1, math.ceil(self.average * self.rule.ceiling_coeff))
            while index > 0 and candidates[index] > ceiling:
                index -= 1
        return candidates[index]


class RuledWidth:
    """`WidthPolicy` of a config file. `padded`: the batch sizes that are captured, to which a batch is rounded up."""

    def __init__(self, rules: Sequence[WidthRule], padded: Sequence[int]) -> None:
        self._rules = [RuledSteps(rule) for rule in sorted(rules, key=lambda rule: rule.batch_size)]
        self._from = [rule.rule.batch_size for rule in self._rules]
        self._padded = padded

    def choose(self, batch_size: int, num_plain: int = 0) -> int:
        """See `WidthPolicy`."""
        return self._rule_for(batch_size).steps + 1

    def after_prompts(self, batch_size: int) -> int:
        """See `WidthPolicy`."""
        return self.choose(batch_size)

    def drafts(self) -> bool:
        """See `WidthPolicy`."""
        return True

    def observe(self, result: StepResult) -> None:
        """See `WidthPolicy`."""
        tokens = result.tokens
        rule = self._rule_for(len(tokens))
        before = rule.steps
        had_guesses = any(result.num_proposed)
        rule.observe(sum(map(len, tokens)) / len(tokens) - 1 if had_guesses else None)
        if rule.steps != before and 0 not in (rule.steps, before):  # a rule with 0 probes for ever
            log.info("Draft steps %d -> %d: %.2f guesses accepted on average", before, rule.steps, rule.average)

    def timed(self, step: TimedStep) -> None:
        """See `WidthPolicy`."""

    def _rule_for(self, batch_size: int) -> RuledSteps:
        index = bisect.bisect_left(self._padded, batch_size)
        padded = self._padded[index] if index < len(self._padded) else batch_size
        return self._rules[max(bisect.bisect_right(self._from, padded) - 1, 0)]
