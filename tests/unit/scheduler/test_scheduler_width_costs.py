"""Costs of steps, corrected by the steps that are served."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.played_engine import Chain, Engine

from overlap_spec.features.adaptive_width.scheduler import (
    LOST_STEPS,
    OWN_STEPS,
    STALE_STEPS,
    MeasuredWidth,
    StepSeconds,
)
from overlap_spec.features.ngram.scheduler import MatchedTokens
from overlap_spec.messages import NEVER_S, ChunkWork, StepCosts, StepPlan, StepResult
from overlap_spec.scheduler.width import BatchWidths, WidthPolicy

MS = 1e-3
COSTS = StepCosts((1, 128), (1, 2, 4), ((4 * MS, 4.4 * MS, 4.6 * MS), (6.7 * MS, 10 * MS, 16 * MS)))
SERVED = 8 * OWN_STEPS


class Long(Engine):
    """Its requests have so much context that every step takes longer, by `more` seconds."""

    more = 0.0

    def costs(self) -> list[float]:
        return [cost + self.more for cost in super().costs()]


@pytest.mark.slow
def test_wider_steps_pay_once_contexts_are_long() -> None:
    engine = Long(COSTS, Chain((0.3, 0.0, 0.0)), batch_size=128)
    assert engine.run(200)[-100:].count(1) > 95, "the rest are trials"
    engine.more = 30 * MS
    engine.run(2 * LOST_STEPS)  # it has lost before
    assert engine.run(100).count(2) > 95
    engine.more = 0.0
    engine.run(4 * STALE_STEPS)
    assert engine.run(100).count(1) > 95


def table() -> StepSeconds:
    return StepSeconds(COSTS.batch_sizes, COSTS.seconds)


def serve(seconds: StepSeconds, kind: int, taken: float, num_steps: int = SERVED, batch_size: int = 128) -> None:
    for _ in range(num_steps):
        seconds.observe(batch_size, kind, taken)


def test_a_width_has_its_own_time_whatever_was_measured() -> None:
    """Also one that is faster: what was measured at start was measured once, and others may be as much faster."""
    seconds = table()
    serve(seconds, 2, 12 * MS)
    assert seconds.of(128) == pytest.approx([0.75 * 6.7 * MS, 7.5 * MS, 12 * MS], rel=1e-3)
    serve(seconds, 2, 1 * MS)
    assert seconds.of(128)[2] == pytest.approx(4 * MS), "a quarter of what was measured, at least"


def test_what_a_wide_step_takes_longer_is_its_own() -> None:
    """Steps of width 4 take twice what was measured. Plain ones do not, whatever runs how long."""
    seconds = table()
    serve(seconds, 0, 6.7 * MS)
    for _ in range(20):
        serve(seconds, 2, 32 * MS, 100)
        serve(seconds, 0, 6.7 * MS, 3)
    assert seconds.of(128) == pytest.approx([6.7 * MS, 10 * MS, 32 * MS], rel=0.02)
    seconds = table()  # plain steps were never timed
    serve(seconds, 2, 32 * MS)
    assert seconds.of(128) == pytest.approx([6.7 * MS, 10 * MS, 32 * MS], rel=0.02)


def test_what_slows_narrow_steps_slows_wider_ones_that_were_never_timed() -> None:
    seconds = table()
    serve(seconds, 0, 9.7 * MS)
    assert seconds.of(128) == pytest.approx([9.7 * MS, 13 * MS, 19 * MS], rel=1e-3)
    serve(seconds, 2, 16 * MS, 1)
    assert seconds.of(128)[2] == pytest.approx(16 * MS, rel=1e-3), "this one was"


def test_what_has_slowed_narrow_steps_is_forgotten_while_wide_ones_are_fast() -> None:
    """Contexts were long, and plain steps were the last that ran: nothing else would show that they are fast again."""
    seconds = table()
    serve(seconds, 0, 9.7 * MS)
    serve(seconds, 2, 16 * MS, STALE_STEPS)
    assert seconds.of(128)[0] == pytest.approx(6.7 * MS + 3 * MS / 2.718, rel=0.01)
    serve(seconds, 2, 19 * MS, 8 * STALE_STEPS)
    assert seconds.of(128)[0] == pytest.approx(7.8 * MS, rel=0.01), "it is not raised by that"


def test_classes_of_batch_sizes_are_told_apart() -> None:
    seconds = table()
    serve(seconds, 2, 30 * MS)
    assert seconds.of(100)[2] > 20 * MS, "of 65 to 128 rows"
    assert seconds.of(1)[2] == 4.6 * MS
    serve(seconds, 2, 9 * MS, batch_size=1)
    assert seconds.of(1)[2] == pytest.approx(9 * MS, rel=0.02)
    assert seconds.of(128)[2] == pytest.approx(30 * MS, rel=0.02)


def test_a_step_that_waited_for_others_changes_little() -> None:
    seconds = table()
    serve(seconds, 2, 4.6 * MS, 20, batch_size=1)
    serve(seconds, 2, 60.0, 1, batch_size=1)
    assert seconds.of(1) == pytest.approx(COSTS.seconds[0], rel=0.04)
    serve(seconds, 0, 60.0, 1, batch_size=1)
    assert seconds.of(1)[0] < 1.3 * COSTS.seconds[0][0], "nor the first of its width"
    serve(seconds, 0, 2.0 * MS, 1)
    assert seconds.of(128)[0] == pytest.approx(2.0 * MS), "no step is faster for others"


def test_steps_without_lookups_have_a_time_of_their_own() -> None:
    costs = StepCosts((1,), (1, 2), ((1.0, 1.1),), (0.9,))
    policy = MeasuredWidth(costs, MatchedTokens(costs.widths))
    for _ in range(SERVED):
        policy.timed(1, 1, False, 2.9)
    assert policy.seconds.of(1) == pytest.approx([2.9, 3.0, 3.1], rel=1e-2), "others take no less longer"
    for _ in range(SERVED):
        policy.timed(1, 1, True, 1.0)
    assert policy.seconds.of(1)[1] == pytest.approx(1.0, rel=1e-2)


@pytest.mark.slow
def test_steps_that_are_not_captured_are_not_run_however_much_is_accepted() -> None:
    costs = StepCosts((64, 128), (1, 2, 4), ((4 * MS, 4.1 * MS, 4.2 * MS), (4 * MS, 4.1 * MS, NEVER_S)))
    for batch_size in (65, 128):
        engine = Long(costs, Chain((1.0, 1.0, 1.0)), batch_size)
        engine.more = 30 * MS
        assert engine.run(4 * LOST_STEPS)[-1000:].count(2) >= 998, "the rest are looks at what plain steps take"
        assert 4 not in engine.widths
    assert Engine(costs, Chain((1.0, 1.0, 1.0)), 64).run(200)[-1] == 4


class HostBound(Engine):
    """Its host takes `host_s` for a step of any width, and the device waits for it."""

    host_s = 0.0

    def costs(self) -> list[float]:
        return [max(cost, self.host_s) for cost in super().costs()]


@pytest.mark.slow
def test_steps_are_wide_where_the_device_waits_for_the_host() -> None:
    engine = HostBound(COSTS, Chain((0.3, 0.1, 0.1)), batch_size=128)
    assert engine.run(200)[-100:].count(1) > 95, "the rest are trials"
    engine.host_s = 20 * MS
    engine.run(2 * LOST_STEPS)
    assert engine.run(100).count(1) < 20, "a wide step takes no longer"
    engine.host_s = 1 * MS
    engine.run(4 * STALE_STEPS)
    assert engine.run(100).count(1) > 95


class Noted(WidthPolicy):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(4)
        self.steps: list[tuple[int, int, bool, float]] = []

    def timed(self, batch_size: int, width: int, drafts: bool, seconds: float) -> None:
        self.steps.append((batch_size, width, drafts, seconds))


def test_a_step_counts_after_another_of_its_kind_alone() -> None:
    limits: Any = SimpleNamespace(width=4)
    widths = BatchWidths(limits)
    policy = widths.policy = Noted()

    def settle(seconds: float, caught_up: bool = False, **changed: Any) -> None:
        plan = StepPlan(0, **({"width": 4, "slots": [0]} | changed))
        widths.timed(plan, StepResult(0, [], [], seconds, gpu_gap=1.0, caught_up=caught_up))

    others: list[dict[str, Any]] = [
        {"slots": [], "chunks": [ChunkWork(0, 0, b"1234")]},
        {"width": 1},
        {"width": 1, "drafts": False},
        {"caught_up": True},
        {"chunks": [ChunkWork(1, 0, b"1234")], "first_width": 4},
    ]
    for other in others:
        settle(2.0)
        settle(3.0, **other)
    assert not policy.steps
    settle(4.0)
    settle(5.0)
    settle(6.0)
    assert policy.steps == [(1, 4, True, 6.0), (1, 4, True, 7.0)], "with the pause before it"
