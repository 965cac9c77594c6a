"""The widths' grid, played: times are an H200's (8B shape, EAGLE-3 and SmolLM2, n-grams), acceptance is synthetic.

Of a cell the median of three rounds is taken, as on the device: in one of them a trial may be paid for with what was
earned in others. What the policy does not decide (prompts through the draft, a draft that catches up) is not played.
"""

import random
import statistics
from itertools import pairwise
from typing import NamedTuple

import pytest
from support.played_engine import Engine, Guesses, Synthetic
from support.played_texts import Text
from support.step_tables import LEVELS, SERVED, START, WIDTHS, Table, between, costs_of

from overlap_spec.features.adaptive_width.scheduler import LOST_STEPS, MeasuredWidth
from overlap_spec.features.ngram.scheduler import MatchedTokens
from overlap_spec.messages import GuessReport, StepCosts, StepResult

BATCHES = (1, 8, 24, 32, 100, 128, 200, 256)
PREFILLED = 16  # prompts of a step while a batch begins
MEANS = (1.3, 2.5, 3.5)


class Cell(NamedTuple):
    """Tokens per second over those of plain decoding, and over those of the best fixed width."""

    of_plain: float
    of_best: float


class Served(Engine):
    """An engine whose steps take what they took on the device."""

    def __init__(self, guesses: Guesses) -> None:
        super().__init__(costs_of(START), guesses)

    def costs(self) -> list[float]:
        return [ms / 1000 for ms in between(SERVED, self.batch_size)]

    def answer(self, batch_size: int, num_tokens: int) -> Cell:
        """Requests come, a few more with each prefill step, have so many tokens, and go."""
        self.reset_clock()
        plain_s = 0.0
        sizes = [*range(PREFILLED, batch_size, PREFILLED)]
        while self.tokens < num_tokens:
            self.batch_size = sizes.pop(0) if sizes else batch_size
            if sizes:
                self._num_guesses = self.policy.after_prompts(self.batch_size) - 1
            before = self.tokens
            self.run(1)
            plain_s += (self.tokens - before) * self.costs()[0]
        costs = self.costs()
        best = max(self.guesses.committed(width) / s for width, s in zip(WIDTHS, costs, strict=True))
        return Cell(plain_s / self.seconds, plain_s / self.seconds / (best * costs[0]))


def grid(mean: float, seed: int) -> dict[tuple[int, int], Cell]:
    """Cells in an order that is drawn, one after another in one engine."""
    order = [(batch_size, num_tokens) for batch_size in BATCHES for num_tokens in (64, 256)]
    random.Random(seed).shuffle(order)
    engine = Served(Synthetic(mean, LEVELS[mean]))
    rounds = {cell: [engine.answer(*cell) for _ in range(3)] for cell in order}
    return {cell: Cell(*map(statistics.median, zip(*found, strict=True))) for cell, found in rounds.items()}


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mean", MEANS)
def test_no_cell_is_slower_than_plain_decoding_and_long_ones_are_near_the_best_width(mean: float, seed: int) -> None:
    found = grid(mean, seed)
    for (batch_size, num_tokens), cell in found.items():
        assert cell.of_plain > 0.97, (batch_size, num_tokens)
        assert cell.of_best > 0.95 or num_tokens < 256, batch_size
    assert statistics.geometric_mean(cell.of_best for (_, num), cell in found.items() if num == 256) > 0.98


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("batch_size", BATCHES)
@pytest.mark.parametrize("num_tokens", [64, 256])
def test_an_engine_that_has_served_nothing_is_not_slower_either(batch_size: int, num_tokens: int) -> None:
    for mean in MEANS:
        assert Served(Synthetic(mean, LEVELS[mean])).answer(batch_size, num_tokens).of_plain > 0.97, mean


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize("batch_size", [1, 32, 128, 256])
def test_acceptance_that_falls_is_answered_within_a_few_steps(batch_size: int) -> None:
    engine = Served(Synthetic(3.5, LEVELS[3.5]))
    for before in BATCHES:
        engine.answer(before, 256)
    engine.answer(batch_size, 256)
    begin = len(engine.widths)
    engine.guesses = Synthetic(1.3, LEVELS[3.5])
    assert engine.answer(batch_size, 256).of_plain > 0.97
    usual = max(set(engine.widths[begin - 20 : begin]), key=engine.widths[begin - 20 : begin].count)
    after = engine.widths[begin:]
    assert after.count(usual) < (200 if batch_size == 1 else 24), "of one slot each step tells little"


@pytest.mark.full
def test_acceptance_that_comes_back_is_found_after_every_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only a trial can tell: all requests begin at once, and steps of two columns pay by a few percent."""
    monkeypatch.setitem(SERVED, 256, (9.08, 15.6, 29.3, 56.3))
    engine = Served(Synthetic(3.5, LEVELS[3.5]))
    engine.batch_size = 256
    engine.run(400)
    assert engine.current == 2
    for _ in range(3):
        engine.guesses = Synthetic(1.3, LEVELS[3.5])
        engine.reset_clock()
        engine.run(300)
        assert engine.current == 1 and engine.plain_ratio() > 0.96, "trials are paid with what was earned before"
        engine.guesses = Synthetic(3.5, LEVELS[3.5])
        engine.reset_clock()
        assert 2 in engine.run(LOST_STEPS + 200)[-20:], "not twice as long: it was taken since it lost"
        assert engine.plain_ratio() > 0.99


def test_what_was_measured_too_slow_at_start_is_learnt() -> None:
    """A step of width 8 was thought to take half as long again as it does. It is tried, timed and taken."""
    slow = {rows: (*row[:3], 1.5 * row[3]) for rows, row in START.items()}
    engine = Served(Synthetic(2.5, LEVELS[2.5]))
    engine.policy = MeasuredWidth(costs_of(slow))
    engine.answer(24, 1024)
    assert engine.answer(24, 256).of_best > 0.95


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize(("batch_size", "mean"), [(1, 1.0), (8, 1.0), (32, 1.3), (128, 1.0), (128, 1.3)])
@pytest.mark.parametrize(("times", "calls"), [(1.3, 1), (1.6, 1), (2.0, 2)])
def test_plain_steps_that_were_measured_too_slow_at_start_are_found(
    batch_size: int, mean: float, times: float, calls: int
) -> None:
    """Wide steps are chosen by that, and were for good: 0.77 to 0.94 of plain decoding."""
    slow = {rows: (times * row[0], *row[1:]) for rows, row in START.items()}
    engine = Served(Synthetic(mean, LEVELS[1.3]))
    engine.policy = MeasuredWidth(costs_of(slow))
    for _ in range(calls):
        engine.answer(batch_size, 256)
    assert engine.answer(batch_size, 256).of_plain > 0.97


def test_plain_steps_are_looked_at_where_they_may_be_faster_and_that_is_paid_for() -> None:
    """A good draft is faster than plain steps of any time that is likely: it has no step without guesses for them."""
    good, fair = Served(Synthetic(3.5, LEVELS[3.5])), Served(Synthetic(1.5, LEVELS[1.3]))
    good.batch_size = fair.batch_size = 8
    assert good.run(4 * LOST_STEPS).count(1) == 0
    chosen = fair.run(4 * LOST_STEPS)
    begins = [i for i, (last, width) in enumerate(pairwise(chosen), 1) if last > width == 1]
    assert begins[0] > 48, "a step earns 0.035 ms, and two plain ones and one without guesses lose 3"
    assert min(after - before for before, after in pairwise(begins)) >= LOST_STEPS and chosen.count(1) < 16


# --- n-grams ----------------------------------------------------------------------------------------------

NGRAM_WIDTHS = (1, 2, 4, 8, 12)
SMALL: Table = {  # of SmolLM2: without lookups, and of each width
    1: (0.43, 0.50, 0.55, 0.60, 0.70, 0.81),
    8: (0.47, 0.56, 0.63, 0.70, 0.84, 0.97),
    32: (0.67, 0.76, 0.82, 0.88, 0.97, 1.05),
    100: (0.93, 1.02, 1.08, 1.17, 1.38, 1.60),
    256: (1.22, 1.35, 1.55, 1.90, 2.40, 2.95),
}
TOKENS = 256


class Call:
    """Requests that begin together, of which some come to copy. Each has so many tokens, and goes."""

    def __init__(self, num_slots: int, copying: float, seed: int) -> None:
        seconds = tuple(tuple(ms / 1000 for ms in row[1:]) for row in SMALL.values())
        costs = StepCosts(tuple(SMALL), NGRAM_WIDTHS, seconds, tuple(row[0] / 1000 for row in SMALL.values()))
        rng = random.Random(seed)
        ends = [rng.randint(20, 220) if rng.random() < copying else TOKENS for _ in range(num_slots)]
        self.policy = MeasuredWidth(costs, MatchedTokens(NGRAM_WIDTHS))
        self.texts = [Text("chat", 1000 * seed + i, end) for i, end in enumerate(ends)]
        self.ms, self._flight, self._looked = 0.0, list[StepResult](), True
        self._marks: dict[int, list[tuple[float, int]]] = {id(text): [] for text in self.texts}
        self._plain_ms = between(SMALL, num_slots)[0]

    def run(self) -> tuple[float, float]:
        """Returns over plain decoding: the speed of the call, and that of answers between their quarters."""
        live = self.texts
        while live:
            self._step(live)
            live = [text for text in live if text.position < TOKENS]
        middles = [(last[1] - first[1], last[0] - first[0]) for first, last in self._marks.values()]
        tokens, ms = map(sum, zip(*middles, strict=True))
        return TOKENS * self._plain_ms / self.ms, tokens / ms * self._plain_ms

    def _step(self, live: list[Text]) -> None:
        width = self.policy.choose(len(live))
        found = [text.window() for text in live]
        runs = [1 + min(right, width - 1) * self._looked for _, right in found]
        levels = [stretch.levels if self._looked else -1 for stretch, _ in found]
        following = [run if self._looked and right >= run else 0 for run, (_, right) in zip(runs, found, strict=True)]
        looks = self.policy.drafts()
        self.ms += between(SMALL, len(live))[1 + NGRAM_WIDTHS.index(width) if looks else 0]
        rows = GuessReport(levels, [stretch.strength for stretch, _ in found], following)
        self._flight.append(StepResult(0, [[7] * run for run in runs], levels, 0.0, extensions=(rows,)))
        if len(self._flight) == 2:
            self.policy.observe(self._flight.pop(0))
        self._looked = looks
        for text, run in zip(live, runs, strict=True):
            text.position += run
            marks = self._marks[id(text)]
            if len(marks) < 2 and text.position >= TOKENS * (0.25, 0.75)[len(marks)]:
                marks.append((self.ms, text.position))


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize(("copying", "least"), [(0.0, 0.98), (0.1, 0.98), (0.3, 0.98), (0.5, 1.08)])
def test_slots_that_copy_do_not_make_the_others_wait(copying: float, least: float) -> None:
    """A call ends with the slowest answer, which waits for wide steps of others: 0.91 if the slots' mean decides."""
    calls, answers = map(statistics.mean, zip(*(Call(100, copying, seed).run() for seed in range(2)), strict=True))
    assert calls > 0.955 and answers > least
