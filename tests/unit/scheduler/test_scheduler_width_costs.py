"""Costs of steps, corrected by the steps that are served."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.played_engine import Chain, Engine

from overlap_spec.messages import Phase, StepCosts, StepPlan, StepResult
from overlap_spec.scheduler.width.batch import BatchWidths
from overlap_spec.scheduler.width.lookahead import LookaheadWidth
from overlap_spec.scheduler.width.policy import CORRECTION_STEPS, CostTable, FixedWidth, TimedStep

MS = 1e-3
COSTS = StepCosts((1, 128), (1, 2, 4), ((4 * MS, 4.4 * MS, 4.6 * MS), (6.7 * MS, 10 * MS, 16 * MS)))
SERVED = 8 * CORRECTION_STEPS


class Long(Engine):
    """Its requests have so much context that every step takes longer, by `more` seconds."""

    more = 0.0

    def run(self, num_steps: int) -> list[int]:
        widths = []
        for _ in range(num_steps):
            widths += super().run(1)
            index = COSTS.widths.index(widths[-1])
            taken = CostTable(COSTS).seconds(self.batch_size)[index] + self.more
            self.policy.timed(TimedStep(self.batch_size, widths[-1], False, taken))
        return widths


def test_wider_steps_pay_once_contexts_are_long() -> None:
    engine = Long(COSTS, Chain((0.3, 0.0, 0.0)), batch_size=128)
    engine.run(SERVED)
    assert set(engine.run(100)) == {1}
    engine.more = 30 * MS
    engine.run(SERVED)
    assert set(engine.run(100)) == {2}
    engine.more = 0.0
    engine.run(SERVED)
    assert set(engine.run(100)) == {1}


@pytest.mark.parametrize("more", [-2 * MS, 0.0])
def test_steps_that_are_as_fast_as_measured_or_faster_change_nothing(more: float) -> None:
    table = CostTable(COSTS)
    for _ in range(SERVED):
        table.correct(TimedStep(128, 1, False, 6.7 * MS + more))
    assert table.seconds(128) == list(COSTS.seconds[1])


def test_a_step_that_waited_for_others_changes_little() -> None:
    table = CostTable(COSTS)
    table.correct(TimedStep(1, 4, False, 60.0))
    assert table.seconds(1)[0] < 2.1 * COSTS.seconds[0][0]
    for _ in range(SERVED):
        table.correct(TimedStep(1, 4, False, 4.6 * MS))
    assert table.seconds(1) == pytest.approx(COSTS.seconds[0], rel=1e-2)


def test_steps_that_rest_take_as_much_longer_as_others() -> None:
    policy = LookaheadWidth(StepCosts((1,), (1, 2), ((1.0, 1.1),), (0.9,)))
    for _ in range(SERVED):
        policy.timed(TimedStep(1, 1, True, 2.9))
    assert policy._costs.seconds(1) == pytest.approx([3.0, 3.1], rel=1e-2)


class HostBound(Engine):
    """Its host takes `host_s` for a step of any width, and the device waits for it."""

    host_s = 0.0

    def run(self, num_steps: int) -> list[int]:
        widths = []
        for _ in range(num_steps):
            widths += super().run(1)
            device_s = CostTable(COSTS).seconds(self.batch_size)[COSTS.widths.index(widths[-1])]
            taken = max(device_s, self.host_s)
            self.policy.timed(TimedStep(self.batch_size, widths[-1], False, taken, taken - device_s))
        return widths


def test_steps_are_wide_where_the_device_waits_for_the_host() -> None:
    """Also if the host is but a little slower than the narrow steps, and then not slower at all."""
    engine = HostBound(COSTS, Chain((0.3, 0.1, 0.1)), batch_size=128)
    engine.run(SERVED)
    assert set(engine.run(100)) == {1}
    engine.host_s = 20 * MS
    engine.run(SERVED)
    assert set(engine.run(100)) == {4}
    engine.host_s = 11 * MS
    engine.run(4 * SERVED)
    assert set(engine.run(100)) == {2}
    engine.host_s = 1 * MS
    engine.run(4 * SERVED)
    assert set(engine.run(100)) == {1}


class Noted(FixedWidth):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(4)
        self.steps: list[TimedStep] = []

    def timed(self, step: TimedStep) -> None:
        self.steps.append(step)


def test_a_step_counts_after_another_of_its_kind_alone() -> None:
    limits: Any = SimpleNamespace(step_widths=(1, 2, 4), num_steps=3, is_self_drafting=False, width=4)
    policy = Noted()
    widths = BatchWidths(policy, limits)

    def settle(seconds: float, **changed: Any) -> None:
        plan = StepPlan(0, **({"phase": Phase.DECODE, "work": [], "width": 4} | changed))
        widths.timed(plan, StepResult(0, [], [], seconds, gpu_gap=1.0))

    others: list[dict[str, Any]] = [
        {"phase": Phase.PREFILL},
        {"width": 1},
        {"width": 1, "rests": True},
        {"catch_up": True},
        {"joined": True},
    ]
    for other in others:
        settle(2.0)
        settle(3.0, **other)
    assert not policy.steps
    settle(4.0)
    settle(5.0)
    settle(6.0)
    assert [(step.seconds, step.waited) for step in policy.steps] == [(6.0, 0.0), (7.0, 0.0)]
    plan = StepPlan(0, Phase.DECODE, [], 4)
    widths.timed(plan, StepResult(0, [], [], 6.0, gpu_gap=1.0, launch_time=0.5))
    assert policy.steps[-1].waited == 1.0
