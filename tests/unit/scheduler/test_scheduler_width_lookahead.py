"""The width policy of self-drafting methods, against windows that are played by hand. Time is the costs' own."""

import random
from dataclasses import dataclass

import pytest

from overlap_spec.features.adaptive_width.scheduler import MeasuredWidth, StepSeconds
from overlap_spec.features.ngram.scheduler import MatchedTokens, MatchedWidth
from overlap_spec.messages import Extension, GuessReport, StepCosts, StepResult, TreePaths

WIDTHS = (1, 2, 4, 8, 12)
CHEAP = StepCosts((1, 64), WIDTHS, ((1.0, 1.01, 1.02, 1.03, 1.04), (1.0, 1.3, 1.8, 3.0, 4.2)))


@dataclass
class Slot:
    """What its windows hold from now on."""

    strength: int = 0
    levels: int = 0
    rate: float = 0.0  # at which each guess is right
    columns: tuple[int, ...] = tuple(range(1, 12))  # of the right guess of each level


class Engine:
    """Plays steps: `depth` in flight, windows filled whole after each."""

    def __init__(self, num_slots: int, depth: int = 2) -> None:
        self.policy = MeasuredWidth(CHEAP, MatchedTokens(CHEAP.widths))
        self.slots = [Slot() for _ in range(num_slots)]
        self.seconds = self.tokens = 0.0
        self._depth = depth
        self._rng = random.Random(5)
        self._flight: list[StepResult] = []

    def run(self, num_steps: int) -> list[int]:
        """Returns the widths of these steps."""
        return [self._step() for _ in range(num_steps)]

    def _step(self) -> int:
        count = len(self.slots)
        width = self.policy.choose(count)
        runs, proposed, paths, next_columns = [], [], [], []
        for slot in self.slots:
            right = 0
            while right < slot.levels and self._rng.random() < slot.rate:
                right += 1
            accepted = [column for column in slot.columns[:right] if column < width]
            seen = len(accepted)
            runs.append([7] * (seen + 1))
            proposed.append(min(slot.levels, width - 1))
            next_columns.append(slot.columns[seen] if right > seen else 0)
            paths.append(accepted)
        self.tokens += sum(map(len, runs)) / count
        self.seconds += StepSeconds(CHEAP.batch_sizes, CHEAP.seconds).of(count)[WIDTHS.index(width)]
        extensions: tuple[Extension, ...] = ()
        if any(slot.levels for slot in self.slots):
            levels, strengths = zip(*((slot.levels, slot.strength) for slot in self.slots), strict=True)
            extensions = (GuessReport(list(levels), list(strengths), next_columns),)
        if width > 1:
            extensions += (TreePaths(paths, [min(11, width - 1)] * count),)
        self._flight.append(StepResult(0, runs, proposed, 0.0, extensions=extensions))
        if len(self._flight) == self._depth:
            self.policy.observe(self._flight.pop(0))
        return width


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_slots", [1, 8, 64])
def test_without_a_match_steps_are_plain_from_the_first_on(num_slots: int, depth: int) -> None:
    engine = Engine(num_slots, depth)
    assert set(engine.run(500)) == {1}
    assert engine.seconds == engine.tokens == 500


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_match_widens_steps_at_once_and_its_end_narrows_them(depth: int) -> None:
    engine = Engine(64, depth)
    for _ in range(20):
        engine.run(10)
        engine.slots = [Slot(strength=12, levels=11, rate=1.0)] * 64
        assert engine.run(20)[depth:] == [12] * (20 - depth), "as soon as a result has said so"
        engine.slots = [Slot()] * 64
        assert engine.run(24)[-8:] == [1] * 8


def test_between_matches_that_follow_each_other_steps_stay_wide_where_that_is_cheap() -> None:
    engine, widths = Engine(1), []
    for _ in range(30):
        engine.slots[0] = Slot(strength=12, levels=11, rate=1.0)
        engine.run(6)
        engine.slots[0] = Slot()
        widths = engine.run(3)
    assert widths == [12] * 3
    assert engine.run(400)[-200:] == [1] * 200, "until no match has followed for long"


def test_what_is_guessed_decides_not_what_could_be() -> None:
    engine = Engine(1)
    engine.slots[0] = Slot(strength=12, levels=3, rate=1.0)
    assert set(engine.run(50)[2:]) == {4}


def test_weak_matches_that_do_not_pay_are_left_alone_where_rows_cost() -> None:
    engine = Engine(64)
    engine.slots = [Slot(strength=1, levels=11, rate=0.05) for _ in engine.slots]
    assert set(engine.run(200)[20:]) == {1}
    engine.slots = [Slot(strength=1, levels=11, rate=0.9) for _ in engine.slots]
    assert engine.run(40)[-1] >= 4, "at width 1 it is seen that guesses would have been right, and so at every width"


def test_strong_and_weak_matches_are_told_apart() -> None:
    """In one batch at a time: the weak ones' failures do not speak against the strong ones."""
    weak, strong = Slot(strength=1, levels=11, rate=0.0), Slot(strength=9, levels=11, rate=0.95)
    engine = Engine(8)
    for _ in range(30):
        engine.slots = [weak] * 8
        assert set(engine.run(10)[4:]) <= {1, 2}
        engine.slots = [strong] * 8
        assert set(engine.run(10)[4:]) <= {8, 12}


def test_a_few_matches_in_a_large_batch_do_not_widen_everybodys_step() -> None:
    engine = Engine(64)
    engine.slots[0] = Slot(strength=12, levels=11, rate=1.0)
    assert set(engine.run(100)) == {1}
    engine.slots[1:33] = [Slot(strength=12, levels=11, rate=1.0)] * 32
    assert engine.run(100)[-1] > 1


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("num_slots", [1, 16, 64])
def test_it_is_never_much_slower_than_plain_decoding(num_slots: int) -> None:
    rng = random.Random(num_slots)
    engine = Engine(num_slots)
    for _ in range(300):
        strength = rng.choice([0, 1, 2, 5, 12])
        kind = Slot(strength, rng.randint(1, 11) if strength else 0, rng.random() * strength / 12)
        engine.slots = [rng.choice([Slot(), kind]) for _ in engine.slots]
        engine.run(10)
    assert engine.tokens / engine.seconds > 0.99


@pytest.mark.parametrize(("columns", "best"), [((1, 2, 3), 4), ((2, 5, 6), 8), ((4, 9, 11), 12)])
def test_a_step_is_as_wide_as_what_is_right_in_its_tree(columns: tuple[int, ...], best: int) -> None:
    engine = Engine(1)
    engine.slots[0] = Slot(strength=12, levels=3, rate=1.0, columns=columns)
    engine.run(100)
    assert set(engine.run(100)) == {best}


def test_explicit_numbers_are_kept_unless_nothing_matches() -> None:
    policy = MatchedWidth(12)
    assert policy.choose(4) == 12
    policy.observe(StepResult(0, [[7]] * 4, [0] * 4, 0.0))
    assert policy.choose(4) == 1
    matched = GuessReport([0, 0, 3, 0], [0, 0, 1, 0], [0] * 4)
    policy.observe(StepResult(0, [[7]] * 4, [0] * 4, 0.0, extensions=(matched,)))
    assert policy.choose(64) == 12
