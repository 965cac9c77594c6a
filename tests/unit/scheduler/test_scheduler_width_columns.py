"""The width policy where guesses branch, against trees that are played by hand: each column has its own rate."""

import random
from itertools import pairwise

import pytest
from support.fake_device import Bench, make_admit, make_ready
from support.played_engine import Engine, Tree

from overlap_spec.features.adaptive_width.scheduler import FADED, MeasuredWidth, TokensByWidth
from overlap_spec.messages import Phase, StepCosts, StepResult, TreePaths

WIDTHS = (1, 2, 4, 8)
DEAR = StepCosts((1, 64), WIDTHS, ((1.0, 1.2, 1.4, 1.6), (1.0, 1.2, 1.4, 1.6)))
RICH = Tree((0, 0, 1, 2, 1, 2, 3), (0.55, 0.4, 0.6, 0.6, 0.35, 0.35, 0.6))  # 8 is best
POOR = Tree((0, 0, 0, 1, 2, 3, 4), (0.5, 0.3, 0.15, 0.08, 0.08, 0.08, 0.08))  # 4 is best
WRONG = Tree((0, 0, 0, 1, 2, 3, 4), (0.0,) * 7)
BEST = {RICH: 8, POOR: 4, WRONG: 1}


def speeds(tree: Tree, costs: StepCosts) -> dict[int, float]:
    """Tokens per second of each width."""
    return {width: tree.committed(width) / s for width, s in zip(costs.widths, costs.seconds[0], strict=True)}


@pytest.mark.parametrize("tree", BEST)
def test_the_trees_are_what_they_are_said_to_be(tree: Tree) -> None:
    ranked = sorted(speeds(tree, DEAR).items(), key=lambda item: -item[1])
    assert ranked[0][0] == BEST[tree] and ranked[0][1] > 1.08 * ranked[1][1], ranked


@pytest.mark.full_but_every(3)
@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 8, 64])
@pytest.mark.parametrize("tree", BEST)
def test_it_converges_to_the_best_width(tree: Tree, batch_size: int, depth: int) -> None:
    engine = Engine(DEAR, tree, batch_size, depth)
    engine.run(1000)
    widths = engine.run(500)
    assert widths.count(BEST[tree]) > 0.93 * len(widths), "the rest are trials"


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize(("before", "after"), [(RICH, POOR), (RICH, WRONG), (POOR, RICH), (WRONG, RICH)])
def test_it_follows_when_guesses_change(before: Tree, after: Tree, batch_size: int) -> None:
    engine = Engine(DEAR, before, batch_size)
    engine.run(1500)
    assert engine.current == BEST[before]
    engine.guesses = after
    engine.run(2500 if batch_size > 1 else 8000)
    assert engine.current == BEST[after]


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("batch_size", [1, 16])
def test_trials_cost_little(batch_size: int) -> None:
    engine = Engine(DEAR, WRONG, batch_size)
    engine.run(200)
    engine.reset_clock()
    engine.run(6000)
    assert engine.plain_ratio() >= 0.98


@pytest.mark.full_but_every(3)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_it_is_nearly_as_fast_as_the_best_width_for_any_tree(seed: int) -> None:
    """Trees that are best first, as drafts make them."""
    rng = random.Random(seed)
    first = rng.random()
    tree = Tree((0, 1, 0, 2, 1, 4, 3), tuple(min(first, rate) for rate in (0.9, 0.8, 0.1, 0.7, 0.1, 0.6, 0.5)))
    two = 1 + rng.random() / 4
    four = two + rng.random() / 4
    costs = StepCosts((1,), WIDTHS, ((1.0, two, four, four + rng.random() / 2),))
    engine = Engine(costs, tree, batch_size=4)
    engine.run(500)
    engine.reset_clock()
    engine.run(4000)
    assert engine.plain_ratio() > 0.95 * max(speeds(tree, costs).values())


Row = tuple[list[int], int]  # the columns of a path, and the last one with a guess


def path(*columns: int, last: int) -> Row:
    return list(columns), last


def result(*rows: Row) -> StepResult:
    paths, last_guesses = map(list, zip(*rows, strict=True))
    return StepResult(0, [[7]] * len(rows), [0] * len(rows), 0.0, extensions=(TreePaths(paths, last_guesses),))


def test_each_column_is_tested_by_the_windows_that_have_it() -> None:
    accepted = TokensByWidth((1, 2, 3, 5))
    for _ in range(1000):
        accepted.observe(result(path(1, 3, last=4), path(2, last=4), path(1, 3, 4, last=4), path(last=4)))
    assert accepted.believed(0) == pytest.approx([1, 1.5, 1.75, 2.5], abs=0.01)
    for _ in range(100):
        accepted.observe(result(path(1, 2, last=2), path(last=0)))  # narrower, and no guess at all
    first, second, rest = (b - a for a, b in pairwise(accepted.believed(0)))
    assert 0.7 < first < 1 and 0.6 < second < 1 and rest == pytest.approx(0.75 * FADED**100, abs=0.01), (
        "3 and 4 were not tested"
    )


def test_the_widest_window_there_is() -> None:
    accepted = TokensByWidth((1, 63, 64))
    for _ in range(1000):
        accepted.observe(result(path(1, 63, last=63)))
    assert accepted.believed(0) == pytest.approx([1, 2, 3], abs=0.01)


def test_a_scheduler_learns_from_the_paths_of_results() -> None:
    """The fake device's paths are random columns, each in half of the steps that have it."""
    costs = StepCosts((1, 8), (1, 2, 4), ((1.0, 1.1, 2.0),) * 2)
    bench = Bench(make_ready(step_costs=costs, max_deferred=4, num_pages=200), branches=True)
    policy = bench.scheduler.planner.widths.policy
    assert isinstance(policy, MeasuredWidth)
    for uid in range(1, 5):
        bench.admit(make_admit(uid, [uid, 2, 3], 150))
    bench.finish_all()
    bench.check_streams()
    widths = [plan.width for plan in bench.all_plans if plan.phase is Phase.DECODE]
    assert widths[30:].count(2) > 0.9 * len(widths[30:])
