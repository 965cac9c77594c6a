"""Requests that limit their speculation, as the scheduler sees them; and a draft that is never right."""

from typing import TYPE_CHECKING

import pytest
from support.fake_device import Bench, make_admit, make_ready

from overlap_spec import features
from overlap_spec.messages import Phase, Speculative, StepCosts, StepResult
from overlap_spec.scheduler.prefix_cache import Node, Share
from overlap_spec.scheduler.requests import Request

if TYPE_CHECKING:
    from overlap_spec.features.adaptive_width.scheduler import MeasuredWidth

COSTS = StepCosts((1, 4), (1, 2, 4), ((1.0, 1.01, 1.02), (1.0, 1.01, 1.02)))
READY = make_ready(num_pages=400, num_steps=3, step_widths=(1, 2, 4), step_costs=COSTS, max_deferred=8)
LEARNS = pytest.mark.skipif(not features.is_there("adaptive_width"), reason="the policy that learns is not there")


def run(bench: Bench, limits: list[int | None], num_tokens: int = 40) -> set[int]:
    """Serve requests with these limits together. Returns the widths of the decode steps."""
    bench.all_plans.clear()
    for uid, limit in enumerate(limits, start=len(bench.admits) + 1):
        bench.admit(make_admit(uid, [1, 2, 3], num_tokens, speculative=Speculative(num_steps=limit)))
    while bench.plans or bench.results:
        bench.run_device() if bench.plans else bench.deliver_result()
    return {plan.width for plan in bench.all_plans if plan.phase is Phase.DECODE}


def measured(bench: Bench) -> "MeasuredWidth":
    """The policy that learns."""
    from overlap_spec.features.adaptive_width.scheduler import MeasuredWidth

    policy = bench.scheduler.planner.widths.policy
    assert isinstance(policy, MeasuredWidth)
    return policy


@pytest.mark.parametrize(("limits", "widest"), [([0, 0], 1), ([0, 1], 2), ([2, 1], 4), ([0, None], 4), ([None], 4)])
def test_steps_are_as_wide_as_the_batch_needs(limits: list[int | None], widest: int) -> None:
    bench = Bench(READY)
    assert max(run(bench, limits)) == widest
    bench.check_streams()
    assert bench.scheduler.queues.num_limited == 0


def test_an_engine_of_one_width_keeps_it() -> None:
    assert run(Bench(make_ready(num_pages=400, num_steps=3)), [0, 0]) == {4}


@LEARNS
def test_requests_without_guesses_teach_nothing_and_count_as_no_verify_steps() -> None:
    bench = Bench(READY)
    tokens = measured(bench).tokens
    before = tokens.believed(2)
    run(bench, [0, 1, 2])
    counters = bench.scheduler.planner.counters
    assert tokens.believed(2) == before
    plain, *others = (bench.usages[uid].spec_verify_ct for uid in (1, 2, 3))
    assert plain == 0 < min(others) and counters.verify_steps == sum(others)
    run(bench, [0, None])
    assert tokens.believed(2) != before
    assert 0 < counters.drafts <= counters.verify_steps


@LEARNS
def test_a_policy_learns_from_whole_speculation_alone() -> None:
    bench = Bench(READY)
    seen: list[StepResult] = []
    measured(bench).observe = lambda result, asked, share: seen.append(result)
    run(bench, [None, 0, None, 1])
    assert seen and all(len(result.tokens) == len(result.num_proposed) <= 2 for result in seen)


@LEARNS
def test_what_is_learnt_becomes_that_of_the_requests_that_are_left() -> None:
    """Of eight one has no guess accepted. It is left alone, and its steps are believed to be like its own."""
    bench = Bench(READY)
    shares: list[float] = []
    measured(bench).observe = lambda result, asked, share: shares.append(share)
    widths = bench.scheduler.planner.widths

    def settle(*running: Request) -> None:
        widths.observe(running, StepResult(0, [[1]] * len(running), [3] * len(running), 0.0))

    root = Node(None, b"", [], Share("", 0.0))
    all_ = [Request(make_admit(uid, [1, 2, 3], 200), root) for uid in range(8)]
    for request, guesses in zip(all_, (0, *[2] * 7), strict=True):
        request.verify_steps = 48
        request.tokens.extend([5] * (1 + 48 * (1 + guesses)))
    settle(*all_)
    settle(all_[0], *all_[2:])
    settle(all_[0])
    settle(all_[0])
    settle(*all_[1:5])
    settle(all_[0])
    settle(*all_[:2])
    settle(all_[1])
    expected = [1.0, 0.98, 8 / (8 + 48 * 576 / 336), *[1.0] * 5]
    assert shares == pytest.approx(expected, abs=0.001), "it came after others; what is left is not worse"
    shares.clear()
    for request in all_:
        request.verify_steps += 400
        request.tokens.extend([5] * 400)
    settle(*all_)
    settle(all_[0])
    assert shares == pytest.approx([1.0, 8 / (8 + 448 * 672 / (8 * 448))], abs=0.001), "plain steps tell nothing"
