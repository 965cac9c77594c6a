"""Whether lookups pay, against texts that are played: windows change as tokens come. Time is the costs' own."""

import random
from dataclasses import dataclass

import pytest

from overlap_spec.messages import MOST_RESTING, LookaheadRows, StepCosts, StepResult
from overlap_spec.scheduler.width.lookahead import LookaheadWidth
from overlap_spec.scheduler.width.policy import FixedWidth
from overlap_spec.scheduler.width.seconds import StepSeconds

WIDTHS = (1, 2, 4, 8, 12)
NARROW = (0.55, 0.57, 0.60, 0.67, 0.70)  # ms of a small model on a large GPU
RESTING = 0.47
LONGEST = 8000  # tokens of a text
ALWAYS = StepCosts((1, 8), WIDTHS, (NARROW, NARROW))
COSTS = StepCosts((1, 8), WIDTHS, (NARROW, NARROW), (RESTING, RESTING))


@dataclass(frozen=True)
class Stretch:
    """A part of a text. Each guess is right at this rate."""

    share: float
    strength: int
    levels: int
    rate: float
    longest: int  # tokens


TEXTS = {
    "nothing is found": (Stretch(1, 0, 0, 0.0, 9),),
    "what is found is wrong": (Stretch(1, 2, 11, 0.1, 3),),
    "chat": (Stretch(0.45, 0, 0, 0.0, 5), Stretch(0.45, 2, 6, 0.25, 5), Stretch(0.1, 6, 11, 0.8, 5)),
    "copy": (Stretch(0.12, 0, 0, 0.0, 4), Stretch(0.13, 1, 9, 0.3, 2), Stretch(0.75, 12, 11, 0.85, 40)),
}


class Text:
    """One slot's text: the same, however it is decoded."""

    def __init__(self, kind: str, seed: int) -> None:
        rng = random.Random(seed)
        self.stretches: list[Stretch] = []  # of each token
        self.position = 0
        while len(self.stretches) < LONGEST:
            (stretch,) = rng.choices(TEXTS[kind], [each.share for each in TEXTS[kind]])
            self.stretches += [stretch] * rng.randint(1, stretch.longest)
        self._right = [rng.random() < stretch.rate for stretch in self.stretches]

    def window(self) -> tuple[Stretch, int]:
        """What is found at the position, and how many guesses are right."""
        stretch = self.stretches[self.position]
        following = self._right[self.position + 1 : self.position + 1 + stretch.levels]
        return stretch, following.index(False) if False in following else len(following)


class Engine:
    """Plays steps, two in flight."""

    def __init__(self, costs: StepCosts, num_slots: int) -> None:
        self.policy = LookaheadWidth(costs)
        self.rested: list[bool] = []
        self._num_slots = num_slots
        self._table = StepSeconds(costs.batch_sizes, costs.seconds)
        self._flight: list[StepResult] = []
        self._drafted = True

    def speed(self, kind: str, num_tokens: int) -> float:
        """Tokens in the time of a step at rest, per slot."""
        texts = [Text(kind, seed) for seed in range(self._num_slots)]
        tokens, seconds = 0.0, 0.0
        while tokens < num_tokens:
            width = self.policy.choose(self._num_slots)
            tokens += self._judge(texts, width) / self._num_slots
            self._drafted = self.policy.drafts()
            assert self._drafted or width == 1
            self.rested.append(not self._drafted)
            seconds += self._table.of(8)[WIDTHS.index(width)] if self._drafted else RESTING
        return tokens * RESTING / seconds

    def _judge(self, texts: list[Text], width: int) -> int:
        """Returns how many tokens are committed."""
        runs, levels, strengths, next_columns = [], [], [], []
        for text in texts:
            stretch, right = text.window()
            run = 1 + min(right, width - 1) * self._drafted
            text.position += run
            runs.append(run)
            levels.append(stretch.levels if self._drafted else -1)
            strengths.append(stretch.strength)
            next_columns.append(run if self._drafted and right >= run else 0)
        lookahead = (LookaheadRows(levels, strengths, next_columns),) if any(levels) else ()
        proposed = [max(min(level, width - 1), 0) for level in levels]
        self._flight.append(StepResult(0, [[7] * run for run in runs], proposed, 0.0, extensions=lookahead))
        if len(self._flight) == 2:
            self.policy.observe(self._flight.pop(0))
        return sum(runs)


@pytest.mark.parametrize("num_slots", [1, 8])
@pytest.mark.parametrize("text", ["nothing is found", "what is found is wrong", "chat"])
def test_a_text_without_matches_is_decoded_as_fast_as_without_lookups(text: str, num_slots: int) -> None:
    resting, always = Engine(COSTS, num_slots), Engine(ALWAYS, num_slots)
    assert resting.speed(text, 3000) > 0.98
    assert always.speed(text, 1000) < 0.98, "and would be slower with them"


@pytest.mark.parametrize("num_slots", [1, 8])
@pytest.mark.parametrize("before", ["nothing is found", "what is found is wrong", "chat"])
def test_copies_are_found_at_once_whatever_came_before(before: str, num_slots: int) -> None:
    resting, always = Engine(COSTS, num_slots), Engine(ALWAYS, num_slots)
    for engine in (resting, always):
        engine.speed(before, 1000)
    begin = len(resting.rested)
    assert resting.speed("copy", 5000) > 0.99 * always.speed("copy", 5000) > 2.5
    assert sum(resting.rested[begin:]) < 0.02 * len(resting.rested[begin:])


def test_a_request_that_copies_is_as_fast_as_with_whole_windows() -> None:
    """Steps are planned before a match is known: one that ends is followed by another one soon."""
    adaptive, fixed = Engine(COSTS, 1), Engine(COSTS, 1)
    fixed.policy = FixedWidth(WIDTHS[-1])  # type: ignore[assignment]  # another policy in its place
    assert adaptive.speed("copy", 5000) > 0.98 * fixed.speed("copy", 5000) > 2.5


def test_it_never_rests_longer_than_is_made_up_for() -> None:
    engine, longest, now = Engine(COSTS, 1), 0, 0
    for text in ("copy", "what is found is wrong", "chat", "nothing is found"):
        engine.speed(text, 1000)
    for rested in engine.rested:
        now = now + 1 if rested else 0
        longest = max(longest, now)
    assert MOST_RESTING / 2 < longest < MOST_RESTING


def test_it_never_rests_where_the_cost_of_that_is_not_known() -> None:
    engine = Engine(ALWAYS, 8)
    engine.speed("nothing is found", 500)
    assert not any(engine.rested)


def test_what_some_gain_pays_for_all() -> None:
    """One of eight requests wants guesses, and its next one is always right: lookups cost the batch more than that."""
    policy, looked = LookaheadWidth(COSTS), 0
    for _ in range(1000):
        width = policy.choose(8, 7)
        looked += policy.drafts()
        run = [7] * (1 + (width > 1))
        policy.observe(StepResult(0, [run], [1], 0.0, extensions=(LookaheadRows([1], [9], [1]),)))
    assert looked < 150
