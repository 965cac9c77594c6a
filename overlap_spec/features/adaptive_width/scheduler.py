"""How wide decode steps are: the width that commits the most tokens per second, down to 1, which is plain decoding.

What a step of each width commits (`TokensByWidth`) and takes (`StepSeconds`) is learnt. What counts is the slowest of
the requests that run: of two dozen it ends 5 to 14% later than the mean.

What a wider width commits cannot be known from the steps that run. If it would be faster with the guesses of a good
draft, it is tried for a few steps; so are plain steps, if they would be with MISTAKEN times less time than was measured
and have not run for LOST_STEPS. Each class of batch sizes earns TRIALS of its time, and pays for a trial what it may
lose; it keeps no more than steps cost that take DEAREST times those of now. A width that has lost is left alone for
LOST_STEPS steps, twice as many the next time unless it has been taken since. A class without results begins with the
width that is the fastest with a fair draft and cannot lose much.

Where guesses are looked up without a model, a step may leave that out, and be faster for it. While lookups are not
promising they are paid for out of what steps without them earn, and of what guesses have gained.

**Rules**: a `--speculative-adaptive-config` file means what it means in SGLang. Between the candidates of a rule lie
borders, which its hysteresis moves, and a moving average of the guesses accepted per slot tells which of them is next.
At 0 draft steps, where nothing is measured, the next one is a probe.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from statistics import NormalDist

from overlap_spec.config import WidthRule
from overlap_spec.messages import StepCosts, StepResult, TreePaths, find
from overlap_spec.scheduler.build import Parts
from overlap_spec.scheduler.width import TokenEstimate, WidthPolicy

MEMORY, MEMORY_STEPS = 288, 2  # tests after which an older one counts 1/e; those of so many steps where that is more
RECENT = 72  # the same, of what tells that guesses have changed, and of what was known before steps without tests
CHANGED, LEAST_CHANGE = 4.0, 0.075  # deviations of such a mean, and guesses, for which what is older is forgotten
FIRST_RATE, FIRST_TESTS = 0.7, 2.0  # of guesses, each after the one before it, until as many tests outweigh it
HOPED_RATE = 0.95  # of those of a good draft
DOUBTED = 3  # power of what is seen over what a good draft has, for guesses that were never tested
DOUBT = 1.0  # standard deviations of a mean, which chance may have taken from it
FADED = 1 - 1 / 256  # what a step leaves of what it does not test
OWN_STEPS = 8  # over which a width's excess is averaged
STALE_STEPS = 256  # of wider widths, over which a narrower one loses what it exceeds its cost by more than they do
MOST_CHANGE = 0.25  # of what a step should take, is the most by which it tells that it takes longer
LEAST_COST = 0.25  # of what was measured


class TokensByWidth:
    """How many tokens a slot commits in steps of each width. `widths`: ascending, from 1. Their indices stand for them.

    A window's columns are best first and parents before children, in chains and in trees: whatever a step accepted,
    one of width w would have accepted those of its columns that are below w. So a step tests its own width and all
    narrower ones:

        widths        1         2                 4                        8
        columns       root      1                 2, 3                     4, 5, 6, 7
        committed     1   +     g1       +        g2          +            g3

    A g is how many guesses of these columns a slot has had accepted, on average over the slots that tested them. If the
    last of these, or those of the requests that are left, differ by more than chance, those before are forgotten. While
    it is not tested it fades; of the width of now it has the benefit of the doubt. Guesses of a chain that no step has
    tested are believed to be like those before.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        groups = [range(low, high) for low, high in pairwise((0, *widths))]  # of columns; group 0 is the root
        self._widths = widths
        self._group_of = [i for i, group in enumerate(groups) for _ in group]  # each column
        self._gains = [sum(FIRST_RATE**column for column in group) for group in groups]
        self._hoped = [sum(HOPED_RATE**column for column in group) for group in groups]
        self._recent = list(self._gains)
        # means of a slot's accepted guesses of a group, of their square, and the same of all that are no wider
        self._means = [[g, g, n - 1, (n - 1) * n] for g, n in zip(self._gains, accumulate(self._gains), strict=True)]
        self._tests = [FIRST_TESTS] * len(groups)
        self._fresh = [0.0] * len(groups)  # 1 if the last step tested it, 0 if none did
        self._is_chain = True  # a tree's columns are right in each other's stead: one tells little of the next

    def believed(self, now: int, behind: float = 0.0) -> list[float]:
        """Tokens of a slot that is so many deviations behind, for each width. Of those wider than `now` they fade."""
        gains = [gain if i <= now else gain * self._fresh[i] for i, gain in enumerate(self._gains)]
        known = sum([tests > FIRST_TESTS for tests in self._tests])  # groups beside the root, which no test is of
        if self._is_chain and 1 <= known <= max(now, 1):  # none is wider than now: others are about as good
            share = min(sum(self._gains[1 : known + 1]) / sum(self._hoped[1 : known + 1]), 1.0)
            gains[known + 1 :] = [hoped * share**DOUBTED for hoped in self._hoped[known + 1 :]]
        for i in range(1, now + 1):
            gains[i] += DOUBT * self._fresh[i] * _deviation(self._means[i][:2]) / math.sqrt(self._tests[i])
        return [count - behind * _deviation(self._means[i][2:]) for i, count in enumerate(accumulate(gains))]

    def hoped(self, now: int) -> list[float]:
        """The same if the draft were good beyond `now`."""
        return list(accumulate([*self._gains[: now + 1], *self._hoped[now + 1 :]]))

    def observe(self, result: StepResult, asked: int = 0, share: float = 1.0) -> None:
        """Take in a settled decode step. A slot that has none of the guesses that were `asked` for had wrong ones."""
        self._recent = [gain * share for gain in self._recent]
        trees = find(result.extensions, TreePaths)
        self._is_chain = trees is None
        paths: Iterable[int | tuple[int, ...]]  # of a chain, one beyond its last column
        paths = map(len, result.tokens) if trees is None else map(tuple, trees.paths)
        lasts = result.num_proposed if trees is None else trees.last_guesses
        rows = list[tuple[int, int, list[int]]]()  # last column with a guess, slots, guesses accepted of each width
        for (path, last), slots in Counter(zip(paths, lasts, strict=True)).items():
            accepted = [0] * len(self._widths)
            for column in range(1, path) if isinstance(path, int) else path:
                accepted[self._group_of[column]] += 1
            rows.append((last or asked, slots, list(accumulate(accepted))))
        for i, width in enumerate(self._widths[1:], 1):
            counts = [(slots, all_[i] - all_[i - 1], all_[i]) for last, slots, all_ in rows if last >= width - 1]
            if not counts:
                self._fresh[i] *= FADED
                continue
            tests, *sums = map(sum, zip(*[(s, s * n, s * n * n, s * m, s * m * m) for s, n, m in counts], strict=True))
            known = self._tests[i] if self._fresh[i] == 1.0 else min(self._tests[i], RECENT) * (self._fresh[i] or 1.0)
            share = max(1 - math.exp(-tests / RECENT), tests / (known + tests))
            self._recent[i] += (sums[0] / tests - self._recent[i]) * share
            far = CHANGED * _deviation(self._means[i][:2]) / math.sqrt(2 * RECENT)
            if abs(self._recent[i] - self._gains[i]) > max(far, LEAST_CHANGE):
                known, self._gains[i] = min(known, RECENT), self._recent[i]
            kept = known * math.exp(-tests / max(MEMORY, MEMORY_STEPS * tests))
            self._fresh[i], self._tests[i] = 1.0, kept + tests
            self._gains[i] = (kept * self._gains[i] + sums[0]) / self._tests[i]
            self._means[i] = [(kept * a + b) / self._tests[i] for a, b in zip(self._means[i], sums, strict=True)]


def _deviation(means: Sequence[float]) -> float:
    return math.sqrt(max(means[1] - means[0] ** 2, 0.0))


def size_class(batch_size: int) -> int:
    """Batch sizes of one class have about the same costs."""
    return (batch_size - 1).bit_length()


class StepSeconds:
    """How long steps of each kind take: widths, by index, and one without a draft.

    A step takes what was measured at start, and an excess that each kind learns from its own steps, for each class of
    batch sizes. What makes a wide step slow is not held against a narrower one: that is timed before the wide one is
    too slow. A wider one that was never timed is believed to exceed its cost as the next narrower one does. What makes
    it fast, text whose rows share experts, is believed of all, in proportion.
    """

    def __init__(self, sizes: Sequence[int], rows: Sequence[Sequence[float]]) -> None:
        """`rows`: the seconds of every kind that were measured, for each batch size."""
        self._sizes, self._rows = (sizes, rows) if len(sizes) > 1 else ((sizes[0], sizes[0] + 1), (*rows, *rows))
        self.measured = cache(self._measured)  # by batch size
        self._excess = defaultdict[int, dict[int, float]](dict)  # by class, of each kind that was timed

    def of(self, batch_size: int) -> list[float]:
        """For each kind."""
        costs, excess, seconds = self.measured(batch_size), self._excess[size_class(batch_size)], list[float]()
        like = min(excess, default=0)  # a kind that was timed: the nearest narrower one; at first the narrowest
        more = min(excess.get(like, 0.0), 0.0)
        for kind, cost in enumerate(costs):
            if kind in excess:
                like, more = kind, excess[kind]
            seconds.append(max(cost + _carried(more, costs[like], cost), LEAST_COST * cost))
        return seconds

    def observe(self, batch_size: int, kind: int, seconds: float) -> None:
        """Take in one step. It makes the excess little more: some wait for others on the device."""
        costs, excess = self.measured(batch_size), self._excess[size_class(batch_size)]
        known, rate = excess.get(kind, 0.0), 1 / OWN_STEPS if kind in excess else 1.0
        most = MOST_CHANGE * (costs[kind] + max(known, 0.0))
        excess[kind] = known + rate * min(seconds - costs[kind] - known, most)
        for narrower in [each for each in excess if each < kind]:
            more = _carried(excess[kind], costs[kind], costs[narrower])
            excess[narrower] -= max(excess[narrower] - more, 0.0) / STALE_STEPS

    def _measured(self, batch_size: int) -> list[float]:
        """Of each kind, at start: linear between the batch sizes that were measured, and beyond them."""
        right = min(max(bisect_left(self._sizes, batch_size), 1), len(self._sizes) - 1)
        low, high = self._sizes[right - 1], self._sizes[right]
        part, ends = (batch_size - low) / (high - low), zip(self._rows[right - 1], self._rows[right], strict=True)
        return [max(a + part * (b - a), a / 2) for a, b in ends]


def _carried(excess: float, cost: float, other: float) -> float:
    """What a kind of step of another cost is believed to exceed that by: as much, or as much less in proportion."""
    return excess if excess >= 0 else excess * other / cost


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
MISTAKEN = 2.0  # times the time of a plain step may have been measured
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
        if (place.now, place.tried)[place.left > SETTLING] == 0:
            place.closed_until[0] = place.num_steps + LOST_STEPS
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

    def observe(self, result: StepResult, asked: int = 0, share: float = 1.0) -> None:
        self.tokens.observe(result, asked, share)
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
        speed, hoped[0] = hoped[now], hoped[0] * MISTAKEN
        for index in sorted((0, *range(now + 1, len(hoped))), key=hoped.__getitem__, reverse=True):
            length, price = num_steps, num_steps * max(seconds[index] - seconds[now], 0.0)
            if index == 0:  # one token a step, and one in the wide step after them, which has no guesses
                length, price = TRIAL_STEPS, TRIAL_STEPS * seconds[0] + seconds[now] - (TRIAL_STEPS + 1) / speed
            if place.closed_until[index] <= place.num_steps and hoped[index] > speed and place.earned_s >= price:
                place.earned_s -= price
                place.tried, place.left = index, length + SETTLING + 1
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

    def observe(self, result: StepResult, asked: int = 0, share: float = 1.0) -> None:
        num_slots, had_guesses = len(result.tokens), asked or any(result.num_proposed)
        accepted = sum(map(len, result.tokens)) / num_slots - 1
        self._rule_for(num_slots).observe(accepted if had_guesses else None)

    def _rule_for(self, batch_size: int) -> RuledSteps:
        padded = next((size for size in self._padded if size >= batch_size), batch_size)
        return self._rules[max(sum(each.rule.batch_size <= padded for each in self._rules) - 1, 0)]
