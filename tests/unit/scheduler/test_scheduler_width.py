"""The width policy against engines that are played by hand, and what narrow steps leave in the books."""

import math
import random

import pytest
from support.fake_device import Bench, expected_stream, make_admit, make_ready
from support.played_engine import Chain, Engine

from overlap_spec.features.adaptive_width.scheduler import (
    DOUBT,
    FADED,
    HOPED_RATE,
    LOST_STEPS,
    MEMORY,
    MeasuredWidth,
    StepSeconds,
    TokensByWidth,
)
from overlap_spec.messages import Phase, StepCosts, StepResult, TreePaths
from overlap_spec.scheduler.width import WidthPolicy

TRIALS = 0.01  # of the time, at most, goes into trying whether wider steps pay again

FREE = StepCosts((1, 64), (1, 2, 4), ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0)))
DEAR = StepCosts((1, 64), (1, 2, 4), ((1.0, 1.2, 1.4), (1.0, 1.5, 2.5)))  # relative to a step of width 1
NEVER, MOSTLY = Chain((0.0, 0.0, 0.0)), Chain((0.95, 0.95, 0.95))


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("rates", [(0.8, 0.7, 0.6), (0.1, 0.1, 0.1)])
def test_where_wide_steps_are_free_all_are(batch_size: int, rates: tuple[float, ...]) -> None:
    widths = Engine(FREE, Chain(rates), batch_size).run(2000)
    assert widths.count(4) > 0.99 * len(widths), "the rest are looks at what narrower steps take"


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize(("batch_size", "most"), [(1, 32), (8, 8), (64, 4)])
def test_without_acceptance_steps_become_plain_and_stay_so(batch_size: int, most: int) -> None:
    engine = Engine(DEAR, NEVER, batch_size)
    widths = engine.run(3000)
    assert 1 in widths[:most], widths[:most]
    assert widths[most:].count(1) > 0.96 * len(widths[most:]), "the rest are trials"
    engine.reset_clock()
    engine.run(6000)
    assert engine.plain_ratio() >= 1 - TRIALS


@pytest.mark.parametrize(("batch_size", "most"), [(1, 4 * MEMORY), (64, 40)])
def test_acceptance_that_is_lost_is_noticed(batch_size: int, most: int) -> None:
    engine = Engine(DEAR, MOSTLY, batch_size)
    engine.run(500)
    assert set(engine.run(100)) == {4}
    engine.guesses = NEVER
    assert 1 in engine.run(most)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_it_comes_back_when_acceptance_recovers(batch_size: int) -> None:
    engine = Engine(DEAR, NEVER, batch_size)
    engine.run(5000)
    assert engine.current == 1
    engine.guesses = MOSTLY
    engine.run(4 * LOST_STEPS)  # it has lost twice by now
    assert engine.current == 4
    assert set(engine.run(500)) == {4}


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(12)
@pytest.mark.parametrize("batch_size", [1, 4, 16, 64])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_never_much_worse_than_plain_decoding(batch_size: int, seed: int) -> None:
    """Any costs, any rates: from the second step on, when it has seen a result."""
    rng = random.Random(seed)
    for i in range(6):
        two = 1 + rng.random() / (2 if i % 2 else 10)
        costs = StepCosts((1, 64), (1, 2, 4), ((1.0, two, two + rng.random() / (1 if i % 2 else 10)),) * 2)
        engine = Engine(costs, Chain(tuple(rng.random() for _ in range(3))) if i < 4 else NEVER, batch_size)
        engine.run(200)
        engine.reset_clock()
        engine.run(3000)
        assert engine.plain_ratio() > 0.98, (costs, engine.guesses)


def test_close_calls_do_not_flap() -> None:
    """Wide steps at break-even: each change costs a step without guesses, so there are few."""
    engine = Engine(StepCosts((1,), (1, 4), ((1.0, 1.5),)), Chain((0.5, 0.0, 0.0)))
    widths = engine.run(10_000)
    changes = sum(a != b for a, b in zip(widths, widths[1:], strict=False))
    assert changes < 10_000 / 150
    assert engine.plain_ratio() > 0.98


def test_batch_sizes_between_and_beyond_the_measured_ones() -> None:
    table = StepSeconds((1, 4, 8), ((1.0, 2.0), (4.0, 8.0), (6.0, 10.0)))
    assert table.of(1) == [1.0, 2.0]
    assert table.of(2) == [2.0, 4.0]
    assert table.of(6) == [5.0, 9.0]
    assert table.of(16) == [10.0, 14.0]
    assert StepSeconds((3,), ((1.0, 2.0),)).of(30) == [1.0, 2.0]


def test_gains_are_of_guesses_that_were_tested() -> None:
    accepted = TokensByWidth((1, 2, 3, 4))
    of_each = StepResult(0, [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]], [3, 3, 3, 3], 0.0)  # 0, 1, 2, 3 accepted
    for _ in range(1000):
        accepted.observe(of_each)
    assert accepted.believed(0) == pytest.approx([1, 1.75, 2.25, 2.5], abs=0.01)
    for _ in range(400):
        accepted.observe(StepResult(0, [[1], [1, 2], [1]], [1, 1, 0], 0.0))  # the last slot had no guess
    faded = FADED**400
    assert accepted.believed(1)[2:] == pytest.approx(
        [accepted.believed(1)[1] + 0.5 * faded, accepted.believed(1)[1] + 0.75 * faded], abs=0.02
    )
    assert accepted.believed(0)[1] == pytest.approx(1.5, abs=0.02)
    unfaded = accepted.believed(3)
    assert unfaded[2] == pytest.approx(2.0, abs=0.06), "of steps that wide it is the best that is known"


def test_a_trial_after_a_long_time_outweighs_what_was_known() -> None:
    accepted = TokensByWidth((1, 2))
    for _ in range(100):
        accepted.observe(StepResult(0, [[1]] * 64, [1] * 64, 0.0))
    for _ in range(1000):
        accepted.observe(StepResult(0, [[1]] * 64, [0] * 64, 0.0))
    accepted.observe(StepResult(0, [[1, 2]] * 64, [1] * 64, 0.0))
    assert accepted.believed(0)[1] > 1.9


@pytest.mark.parametrize(("right", "least"), [(256, 1.85), (166, 1.6)])
def test_one_step_of_many_slots_outweighs_what_was_known_before_steps_without_guesses(right: int, least: float) -> None:
    """A trial is one step with guesses: diluted with the time before, it would lose, and be closed."""
    accepted, before = TokensByWidth((1, 2)), 0 if right == 256 else 128
    for _ in range(100):
        accepted.observe(StepResult(0, [[1, 2]] * before + [[1]] * (256 - before), [1] * 256, 0.0))
    for _ in range(100):
        accepted.observe(StepResult(0, [[1]] * 256, [0] * 256, 0.0))
    accepted.observe(StepResult(0, [[1, 2]] * right + [[1]] * (256 - right), [1] * 256, 0.0))
    assert accepted.believed(0)[1] > least


def test_the_width_of_now_has_the_benefit_of_the_doubt() -> None:
    """The standard deviation of a mean: a root of the number of tests smaller than that of a slot, 0.46."""
    accepted, of_three = TokensByWidth((1, 2)), StepResult(0, [[1]] * 14 + [[1, 2]] * 6, [1] * 20, 0.0)
    accepted.observe(of_three)
    assert accepted.believed(1)[1] - accepted.believed(0)[1] == pytest.approx(DOUBT * 0.46 / 20**0.5, rel=0.1)
    for _ in range(9):
        accepted.observe(of_three)
    kept = MEMORY * (1 - math.exp(-200 / MEMORY))
    assert accepted.believed(1)[1] - accepted.believed(0)[1] == pytest.approx(DOUBT * 0.46 / kept**0.5, rel=0.1)


def test_the_slowest_of_many_has_fewer_tokens_by_what_slots_differ() -> None:
    accepted = TokensByWidth((1, 2, 4))
    for _ in range(50):  # none of three guesses, or all, so what is accepted of all differs more than of the last two
        accepted.observe(StepResult(0, [[1]] * 10 + [[1, 2, 3, 4]] * 10, [3] * 20, 0.0))
    mean, slowest = accepted.believed(0), accepted.believed(0, 0.25)
    assert mean == pytest.approx([1, 1.5, 2.5], abs=0.02)
    assert [a - b for a, b in zip(mean, slowest, strict=True)] == pytest.approx([0, 0.125, 0.375], abs=0.02)
    assert accepted.believed(2)[1] > mean[1], "narrower ones have the benefit of the doubt, too"


def test_what_guesses_were_is_forgotten_once_they_are_others() -> None:
    """As many tests as are kept say one thing. A quarter as many that say another are believed; chance is not."""
    accepted = TokensByWidth((1, 2))
    for _ in range(200):
        accepted.observe(StepResult(0, [[1, 2]] * 6 + [[1]] * 2, [1] * 8, 0.0))
    accepted.observe(StepResult(0, [[1]] * 8, [1] * 8, 0.0))
    assert accepted.believed(0)[1] > 1.72
    for _ in range(16):
        accepted.observe(StepResult(0, [[1]] * 8, [1] * 8, 0.0))
    assert accepted.believed(0)[1] < 1.2


def test_no_estimate_is_above_what_its_windows_commit() -> None:
    """Rare acceptance of a middle column, and a wide window that is hardly tested: ratios of them would explode."""
    rng, accepted = random.Random(3), TokensByWidth((1, 2, 4, 8))
    for _ in range(3000):
        paths = [[1] + [2] * (rng.random() < 0.01) + [4] * (rng.random() < 0.5) for _ in range(8)]
        width = rng.choices((2, 4, 8), (200, 20, 1))[0]
        paths = [[column for column in path if column < width] for path in paths]
        last = [width - 1] * 8
        accepted.observe(StepResult(0, [[7]] * 8, last, 0.0, extensions=(TreePaths(paths, last),)))
        assert accepted.believed(0)[3] < 3.5
    assert accepted.believed(0) == pytest.approx([1, 2, 2.01, 2.51], abs=0.3)


def test_hope_is_of_what_is_wider_than_now() -> None:
    accepted = TokensByWidth((1, 2, 4, 8))
    good = accepted.hoped(0)
    assert good[1] == 1 + HOPED_RATE and good[3] > 4, "nothing has been tested"
    for _ in range(100):
        accepted.observe(StepResult(0, [[1]], [7], 0.0))
    assert accepted.hoped(0) == good
    assert accepted.hoped(1)[3] - accepted.hoped(1)[1] == pytest.approx(good[3] - good[1])
    assert accepted.hoped(1)[1] < 1.1 and accepted.hoped(3)[3] < 1.3, "what runs is known"


def test_a_fixed_width_is_what_a_worker_without_costs_gets() -> None:
    bench = Bench(make_ready())
    assert type(bench.scheduler.planner.widths.policy) is WidthPolicy
    bench.admit(make_admit(1, [1, 2, 3], 30))
    bench.finish_all()
    assert {plan.width for plan in bench.all_plans} == {4}
    assert not bench.device.num_catch_ups


def test_the_engine_narrows_by_what_its_results_say() -> None:
    """Whole scheduler: acceptance is measured from results, the width arrives in plans."""
    costs = StepCosts((1, 8), (1, 2, 4), ((1.0, 2.1, 4.5),) * 2)  # no acceptance pays for that
    bench = Bench(make_ready(step_costs=costs, max_deferred=4, num_pages=200))
    for uid in range(1, 5):
        bench.admit(make_admit(uid, [uid, 2, 3], 60))
    bench.finish_all()
    bench.check_streams()
    widths = [plan.width for plan in bench.all_plans if plan.phase is Phase.DECODE]
    assert widths[0] == 1, "an optimist's rates are not enough either"
    assert bench.device.num_catch_ups["full"] > 5


def test_a_prompt_proposes_for_the_width_of_the_steps_after_it() -> None:
    """What is guessed beyond it nothing verifies. A chunk whose prompt goes on proposes nothing."""
    costs = StepCosts((1, 8), (1, 2, 4), ((1.0, 1.1, 4.5),) * 2)  # a second column pays, with a fair draft
    bench = Bench(make_ready(step_costs=costs, max_deferred=4, num_pages=200, chunk_tokens=16))
    bench.admit(make_admit(1, list(range(1, 41)), 12))
    bench.finish_all()
    bench.check_streams()
    prompts = [plan.width for plan in bench.all_plans if plan.phase is Phase.PREFILL]
    assert prompts == [1, 1, 2]
    assert next(plan.width for plan in bench.all_plans if plan.phase is Phase.DECODE) == 2


def test_what_is_tried_is_proposed_for() -> None:
    policy = MeasuredWidth(StepCosts((1,), (1, 2), ((1.0, 1.8),)))
    assert policy.after_prompts(1) == 1
    widths = [(policy.choose(1), policy.after_prompts(1)) for _ in range(4 * LOST_STEPS)]
    tried = [after for (chosen, _), (_, after) in zip(widths[1:], widths, strict=False) if chosen == 2]
    assert tried and set(tried) == {2}, "before each step of a trial"


def narrow_bench(width_seed: int = 0) -> Bench:
    bench = Bench(make_ready(max_deferred=16), depth=1, widths_seed=width_seed)
    bench.scheduler.planner.widths.policy._now = 1
    bench.scheduler.planner.widths.policy._left = 1000
    return bench


def test_pages_with_deferred_draft_rows_are_not_handed_on() -> None:
    """The fake device holds every row of a prefix hit against what the draft should have there."""
    bench = narrow_bench()
    first = make_admit(1, [1, 2, 3], 14)
    bench.admit(first)
    bench.finish_all()
    assert [plan.width for plan in bench.all_plans[1:]] == [1] * 13
    request_tokens = [1, 2, 3, *expected_stream(first)[0]]
    bench.admit(make_admit(2, [*request_tokens, 5], 3))
    bench.finish_all()
    assert bench.usages[2].cached_tokens == 0, "the prompt fills no page, and the answer's draft rows are deferred"
    bench.check_streams()


def test_rows_are_cached_once_they_are_absorbed() -> None:
    bench = narrow_bench()
    first = make_admit(1, [1, 2, 3], 30)
    bench.admit(first)
    bench.finish_all()  # 29 steps of width 1: the 17th catches up with 16 rows
    assert bench.device.num_catch_ups == {"full": 1}
    bench.admit(make_admit(2, [1, 2, 3, *expected_stream(first)[0], 5], 3))
    bench.finish_all()
    assert bench.usages[2].cached_tokens == 16  # of 3 + 16 positions with draft KV, whole pages of 4
    bench.check_streams()
