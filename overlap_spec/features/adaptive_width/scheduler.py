"""How wide decode steps are: the width that commits the most tokens per second, down to 1, which is plain decoding.

What a step of each width commits and takes is learnt (`estimates.py`). What counts is the slowest of the requests that
run: of two dozen it ends 5 to 14% later than the mean. A width is left for what is faster by more than chance has it.

What a wider width commits cannot be known from the steps that run. If it would be faster with the guesses of a good
draft, it is tried for a few steps. Each class of batch sizes earns TRIALS of its time, and pays for a trial what it may
lose; it keeps no more than steps cost that take DEAREST times those of now, so that one answer does not pay for all
trials of a long good phase. Wider ones are reached by narrower ones. A width that has lost is left alone for LOST_STEPS
steps of the class, twice as many the next time unless it has been taken since. A class without results begins with the
width that is the fastest with a fair draft and cannot lose much.

Where guesses are looked up without a model, a step may leave that out, and be faster for it. While lookups are not
promising they are paid for out of what steps without them earn, and of what guesses have gained.

**Rules**: with a `--speculative-adaptive-config` file, which means what it means in SGLang, draft steps follow its
rules. A rule has a moving average of the guesses accepted per slot. Let s be the draft steps of now, and s' the next
fewer of its candidates. Every `update_interval` decode steps, after `warmup_batches`:

    average <= s' - 0.5 + down_hysteresis (0.5 + .. for s' = 0)   go down, and on, as long as it holds
    else average > s - 0.5 + up_hysteresis                        go up, and on
    at s = 0, where nothing is measured                           go up by one candidate: a probe
    ceiling_coeff c > 0                                           no more than max(1, ceil(c x average)), going up apart
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from overlap_spec.config import WidthRule
from overlap_spec.features.adaptive_width.estimates import StepSeconds, TokensByWidth, size_class
from overlap_spec.messages import StepCosts, StepResult
from overlap_spec.scheduler.build import Parts
from overlap_spec.scheduler.width import TokenEstimate, WidthPolicy


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


ANSWER_STEPS = 96  # of the answers whose slowest counts: of 64 tokens, one that just pays for its time loses 3%
TRIALS = 0.0075  # the share of its time that a class spends on trials, at most
LOOKS = 8  # steps from one look for a trial to the next: it takes some microseconds
DEAREST = 3.0  # times a step of now, may a step take that is tried
TRIAL_STEPS, MOST_TRIAL_STEPS = 2, 8  # the first has no guesses, and a step is timed after another of its width
TRIAL_TESTS = 24  # slots that a trial tests, at least
SETTLING = 4  # steps after a trial until its results have come, after it
LOST_STEPS, MOST_LOST_STEPS, LEFT_STEPS = 1024, 16384, 128  # the last: after a width was taken, and left
FIRST_COST = 1.5  # times a plain step's: what is taken without a result costs no more
PROMISING = 1.25  # tokens per second, over steps without lookups, for which the next one is not paid for
LOOKED_UP = 1 / 128  # what a step without lookups earns for one, in steps
MOST_SAVED, MOST_OWED = 1.0, 0.2  # steps


def attach(parts: Parts) -> None:
    """Give the scheduler its policy, unless nothing was measured and there are no rules: then it keeps its own."""
    settings, costs, widths = parts.settings.scheduler, parts.limits.step_costs, parts.planner.widths
    if settings.width_rules:
        widths.policy = RuledWidth(settings.width_rules, settings.width_padding)
    elif costs.widths and not settings.keeps_width:
        widths.policy = MeasuredWidth(costs, widths.tokens)


@dataclass
class Place:
    """A class of batch sizes: the width of its steps, and its trials. Widths are indices."""

    now: int
    earned_s: float = 0.0  # for trials
    num_steps: int = 0
    tried: int = 0
    left: int = 0  # steps until it is known how the trial went
    lost_steps: dict[int, int] = field(default_factory=lambda: defaultdict(lambda: LOST_STEPS))  # after the next loss
    closed_until: dict[int, int] = field(default_factory=lambda: defaultdict(int))


class MeasuredWidth(WidthPolicy):
    """The policy of this module's docstring."""

    learns = yields = True

    def __init__(self, costs: StepCosts, tokens: TokenEstimate | None = None) -> None:
        self.tokens = tokens or TokensByWidth(costs.widths)
        rows = [(*costs.undrafted[i : i + 1], *row) for i, row in enumerate(costs.seconds)]
        self.seconds = StepSeconds(costs.batch_sizes, rows)
        self._first = len(costs.undrafted[:1])  # kind of steps: before it is the one without lookups, if there is any
        self._widths = costs.widths
        self._places: dict[int, Place] = {}
        self._planned = 0.0, 1.0  # how much longer that step takes with lookups, and the share of slots that want them
        self._saved = MOST_SAVED  # steps that lookups may cost
        self._looks = self._looked = True  # after the step that is planned, and after the one before it

    def choose(self, batch_size: int, num_plain: int = 0) -> int:
        kinds, share = self.seconds.of(batch_size), 1 - num_plain / batch_size
        seconds, place = kinds[self._first :], self._place(batch_size, kinds, share)
        place.num_steps += 1
        place.earned_s += TRIALS * seconds[place.now]
        place.left = max(place.left - 1, 0)
        if place.left > SETTLING:
            return self._widths[place.tried]
        before, behind = place.now, _behind(batch_size)
        speeds = _speeds(self.tokens.believed(before, behind), seconds, share)
        if place.left == 1:  # the results of a trial have come
            speeds[place.tried] = _speeds(self.tokens.believed(place.tried, behind), seconds, share)[place.tried]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        if speeds[best] > speeds[before]:
            place.now = best
            place.lost_steps.pop(best, None)
            for index in range(best + 1, before + 1):
                place.closed_until[index] = place.num_steps + LEFT_STEPS
        if place.left == 1:  # what is not taken has lost, with what it tested
            for index in range(max(before, best) + 1, place.tried + 1):
                place.closed_until[index] = place.num_steps + place.lost_steps[index]
                place.lost_steps[index] = min(2 * place.lost_steps[index], MOST_LOST_STEPS)
        elif not place.left and place.num_steps % LOOKS == 0:
            self._try(place, batch_size, seconds, share)
        self._looks = self._saved > 0 or speeds[best] * kinds[0] > PROMISING
        now = place.now if self._looks and self._looked else 0  # after a step without lookups there is no guess
        self._planned = seconds[now] / kinds[0] - 1, share
        return self._widths[now]

    def after_prompts(self, batch_size: int) -> int:
        place = self._place(batch_size, self.seconds.of(batch_size), 1.0)
        return self._widths[-1 if self._first else place.tried if place.left > SETTLING + 1 else place.now]

    def drafts(self) -> bool:
        if self._first:
            self._looked = self._looks
            self._saved = max(self._saved - (self._planned[0] if self._looks else -LOOKED_UP), -MOST_OWED)
        return self._looks

    def observe(self, result: StepResult, asked: int = 0) -> None:
        self.tokens.observe(result, asked)
        if self._first:
            gained = sum(map(len, result.tokens)) / len(result.tokens) - 1
            self._saved = min(self._saved + gained * self._planned[1], MOST_SAVED)

    def timed(self, batch_size: int, width: int, drafts: bool, seconds: float) -> None:
        self.seconds.observe(batch_size, self._first + self._widths.index(width) if drafts else 0, seconds)

    def _place(self, batch_size: int, kinds: list[float], share: float) -> Place:
        if (place := self._places.get(size_class(batch_size))) is None:
            seconds = kinds[self._first :]
            speeds = _speeds(self.tokens.believed(len(seconds) - 1, _behind(batch_size)), seconds, share)
            usable = [i for i in range(len(speeds)) if seconds[i] <= FIRST_COST * seconds[0]]
            place = self._places[size_class(batch_size)] = Place(max(usable, key=speeds.__getitem__))
        return place

    def _try(self, place: Place, batch_size: int, seconds: list[float], share: float) -> None:
        """Begin to try what may be faster than now and has been paid for: at worst it commits what steps of now do."""
        now, hoped = place.now, _speeds(self.tokens.hoped(place.now), seconds, share)
        num_steps = min(max(TRIAL_STEPS, -(-TRIAL_TESTS // batch_size)), MOST_TRIAL_STEPS)
        place.earned_s = min(place.earned_s, num_steps * (DEAREST - 1) * seconds[now])
        for index in sorted(range(now + 1, len(hoped)), key=hoped.__getitem__, reverse=True):
            price = num_steps * max(seconds[index] - seconds[now], 0.0)
            is_open = place.closed_until[index] <= place.num_steps
            if is_open and hoped[index] > hoped[now] and place.earned_s >= price:
                place.earned_s -= price
                place.tried, place.left = index, num_steps + SETTLING + 1
                return


def _behind(batch_size: int) -> float:
    """Deviations of a step's tokens by which the slowest of so many answers is behind: Blom's (1958) of the largest."""
    return NormalDist().inv_cdf((batch_size - 3 / 8) / (batch_size + 1 / 4)) / math.sqrt(ANSWER_STEPS)


def _speeds(tokens: list[float], seconds: list[float], share: float) -> list[float]:
    """Tokens per second and slot of each width, if so large a share of the slots has guesses."""
    return [(1 + (count - 1) * share) / s for count, s in zip(tokens, seconds, strict=True)]


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
