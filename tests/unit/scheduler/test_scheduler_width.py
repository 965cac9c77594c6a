"""The width policy against engines that are played by hand, and what narrow steps leave in the books."""

import logging
import random

import pytest
from support.fake_device import Bench, expected_stream, make_admit, make_ready
from support.played_engine import Chain, Engine

from overlap_spec.messages import Phase, StepCosts, StepResult
from overlap_spec.scheduler.width.acceptance import HOPED_RATE, MEMORY, AcceptedTokens
from overlap_spec.scheduler.width.policy import LASTING_STEPS, CostTable, FixedWidth, MeasuredWidth

TRIALS = 0.01  # of the time, at most, goes into trying whether wider steps pay again

FREE = StepCosts((1, 64), (1, 2, 4), ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0)))
DEAR = StepCosts((1, 64), (1, 2, 4), ((1.0, 1.2, 1.4), (1.0, 1.5, 2.5)))  # relative to a step of width 1
NEVER, MOSTLY = Chain((0.0, 0.0, 0.0)), Chain((0.95, 0.95, 0.95))


@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("rates", [(0.8, 0.7, 0.6), (0.1, 0.1, 0.1)])
def test_where_wide_steps_are_free_all_are(batch_size: int, rates: tuple[float, ...]) -> None:
    assert set(Engine(FREE, Chain(rates), batch_size).run(2000)) == {4}


@pytest.mark.parametrize(("batch_size", "most"), [(1, 32), (8, 8), (64, 4)])
def test_without_acceptance_steps_become_plain_and_stay_so(batch_size: int, most: int) -> None:
    engine = Engine(DEAR, NEVER, batch_size)
    widths = engine.run(3000)
    assert 1 in widths[:most], widths[:most]
    assert widths[most:].count(1) > 0.97 * len(widths[most:]), "the rest are trials"
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


@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_it_comes_back_when_acceptance_recovers(batch_size: int) -> None:
    engine = Engine(DEAR, NEVER, batch_size)
    engine.run(5000)
    assert engine.policy.current == 1
    engine.guesses = MOSTLY
    engine.run(2500)
    assert engine.policy.current == 4
    assert set(engine.run(500)) == {4}


@pytest.mark.slow_but_every(5)
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
    assert changes < 10_000 / 200
    assert engine.plain_ratio() > 0.98


def test_batch_sizes_between_and_beyond_the_measured_ones() -> None:
    table = CostTable(StepCosts((1, 4, 8), (1, 2), ((1.0, 2.0), (4.0, 8.0), (6.0, 10.0))))
    assert table.seconds(1) == [1.0, 2.0]
    assert table.seconds(2) == [2.0, 4.0]
    assert table.seconds(6) == [5.0, 9.0]
    assert table.seconds(16) == [10.0, 14.0]
    assert CostTable(StepCosts((3,), (1, 2), ((1.0, 2.0),))).seconds(30) == [1.0, 2.0]


def test_gains_are_of_guesses_that_were_tested() -> None:
    accepted = AcceptedTokens((1, 2, 3, 4))
    of_each = StepResult(0, [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]], [3, 3, 3, 3], 0.0)  # 0, 1, 2, 3 accepted
    for _ in range(1000):
        accepted.observe(of_each)
    assert accepted.committed() == pytest.approx([1, 1.75, 2.25, 2.5], abs=0.01)
    for _ in range(400):
        accepted.observe(StepResult(0, [[1], [1, 2], [1]], [1, 1, 0], 0.0))  # the last slot had no guess
    # what is not tested stays, and the first of it gets better slowly
    assert accepted.committed() == pytest.approx([1, 1.5, 1.5 + 1 / 3, 2.0], abs=0.02)


def test_hope_comes_back_slowly() -> None:
    accepted = AcceptedTokens((1, 2, 3, 4))
    for _ in range(1000):
        accepted.observe(StepResult(0, [[1]], [3], 0.0))
    assert accepted.committed() == pytest.approx([1, 1, 1, 1], abs=0.01)
    for _ in range(1000):
        accepted.observe(StepResult(0, [[1]], [0], 0.0))
    assert 1.02 < accepted.committed()[1] < 1.05
    for _ in range(100_000):
        accepted.observe(StepResult(0, [[1], [1, 2]], [1, 1], 0.0))
    assert accepted.committed()[:3] == pytest.approx([1, 1.5, 1.5 + 0.5 * HOPED_RATE], abs=0.01)


def test_a_change_is_logged_once_and_trials_are_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = Engine(DEAR, NEVER)
        engine.run(8000)
        widths = engine.run(8000)
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("Step width 4 -> 1 at batch 1: 1.") and "in 1000.000 ms, before 1." in line
    assert set(widths) > {1}


def test_a_change_that_is_taken_back_has_no_line(caplog: pytest.LogCaptureFixture) -> None:
    policy = MeasuredWidth(StepCosts((1,), (1, 2), ((1.0, 1.5),)))
    with caplog.at_level(logging.INFO):
        for tokens, width in (([1], 1), ([1, 2], 2), ([1], 1)):
            for _ in range(4 * MEMORY):
                policy.observe(StepResult(0, [tokens], [1], 0.0))
            assert not caplog.records
            assert {policy.choose(1) for _ in range(LASTING_STEPS - 1)} == {width}
        assert policy.choose(1) == 1
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("Step width 2 -> 1")


def test_a_fixed_width_is_what_a_worker_without_costs_gets() -> None:
    bench = Bench(make_ready())
    assert isinstance(bench.scheduler.planner.widths.policy, FixedWidth)
    bench.admit(make_admit(1, [1, 2, 3], 30))
    bench.finish_all()
    assert {plan.width for plan in bench.all_plans} == {4}
    assert not any(plan.catch_up for plan in bench.all_plans)


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
