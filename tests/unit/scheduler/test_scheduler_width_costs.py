"""Costs of steps, corrected by the steps that are served."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.played_engine import Chain, Engine

from overlap_spec.messages import ChunkWork, StepCosts, StepPlan, StepResult
from overlap_spec.scheduler.width.batch import BatchWidths
from overlap_spec.scheduler.width.lookahead import LookaheadWidth
from overlap_spec.scheduler.width.policy import LOST_STEPS, FixedWidth
from overlap_spec.scheduler.width.seconds import COMMON_STEPS, StepSeconds, TimedStep

MS = 1e-3
COSTS = StepCosts((1, 128), (1, 2, 4), ((4 * MS, 4.4 * MS, 4.6 * MS), (6.7 * MS, 10 * MS, 16 * MS)))
SERVED = 8 * COMMON_STEPS


class Long(Engine):
    """Its requests have so much context that every step takes longer, by `more` seconds."""

    more = 0.0

    def costs(self) -> list[float]:
        return [cost + self.more for cost in super().costs()]


def test_wider_steps_pay_once_contexts_are_long() -> None:
    engine = Long(COSTS, Chain((0.3, 0.0, 0.0)), batch_size=128)
    engine.run(SERVED)
    assert set(engine.run(100)) == {1}
    engine.more = 30 * MS
    engine.run(2 * LOST_STEPS)  # it has lost before
    assert engine.run(100).count(2) > 95
    engine.more = 0.0
    engine.run(SERVED)
    assert engine.run(100).count(1) > 95


def table() -> StepSeconds:
    return StepSeconds(COSTS.batch_sizes, COSTS.seconds)


def serve(seconds: StepSeconds, kind: int, taken: float, num_steps: int = SERVED, batch_size: int = 128) -> None:
    for _ in range(num_steps):
        seconds.observe(TimedStep(batch_size, COSTS.widths[kind], False, taken), kind)


@pytest.mark.parametrize("more", [-2 * MS, 0.0])
def test_steps_that_are_as_fast_as_measured_or_faster_change_nothing(more: float) -> None:
    seconds = table()
    serve(seconds, 0, 6.7 * MS + more)
    assert seconds.of(128) == list(COSTS.seconds[1])


def test_what_a_wide_step_takes_longer_is_its_own() -> None:
    """Steps of width 4 take twice what was measured. Plain ones do not, whatever runs how long."""
    seconds = table()
    serve(seconds, 0, 6.7 * MS)
    for _ in range(20):
        serve(seconds, 2, 32 * MS, 100)
        serve(seconds, 0, 6.7 * MS, 3)
    assert seconds.of(128) == pytest.approx([6.7 * MS, 10 * MS, 32 * MS], rel=0.02)


def test_what_slows_all_is_learnt_from_the_width_that_runs() -> None:
    seconds = table()
    serve(seconds, 0, 6.7 * MS, 20)
    serve(seconds, 2, 16 * MS, 20)
    serve(seconds, 2, 26 * MS)
    assert seconds.of(128) == pytest.approx([16.7 * MS, 20 * MS, 26 * MS], rel=0.02)
    assert seconds.hoped(128)[:2] == pytest.approx([0.95 * 6.7 * MS, 9.5 * MS]), "neither was timed of late"
    serve(seconds, 0, 8 * MS, 8)
    assert seconds.of(128)[0] == pytest.approx(8 * MS, rel=0.6), "one step changes little"


def test_classes_of_batch_sizes_are_told_apart() -> None:
    seconds = table()
    serve(seconds, 2, 30 * MS)
    assert seconds.of(100)[2] > 20 * MS, "of 65 to 128 rows"
    assert seconds.of(1)[2] < 4.8 * MS, "a hundredth of the rows, of what they take beyond what was measured"
    serve(seconds, 2, 9 * MS, batch_size=1)
    assert seconds.of(1)[2] == pytest.approx(9 * MS, rel=0.02) and seconds.of(128)[2] == pytest.approx(
        30 * MS, rel=0.02
    )


def test_a_step_that_waited_for_others_changes_little() -> None:
    seconds = table()
    serve(seconds, 2, 4.6 * MS, 20, batch_size=1)
    serve(seconds, 2, 60.0, 1, batch_size=1)
    assert seconds.of(1) == pytest.approx(COSTS.seconds[0], rel=0.02)
    serve(seconds, 0, 60.0, 1, batch_size=1)
    assert seconds.of(1)[0] < 1.3 * COSTS.seconds[0][0], "nor the first of its width"
    serve(seconds, 0, 4 * MS, 2, batch_size=1)
    assert seconds.of(1)[0] == pytest.approx(4 * MS, rel=0.02)


def test_a_rest_takes_as_much_longer_as_other_steps() -> None:
    policy = LookaheadWidth(StepCosts((1,), (1, 2), ((1.0, 1.1),), (0.9,)))
    for _ in range(SERVED):
        policy.timed(TimedStep(1, 1, True, 2.9))
    assert policy._seconds.of(1) == pytest.approx([2.9, 3.0, 3.1], rel=1e-2)


class HostBound(Engine):
    """Its host takes `host_s` for a step of any width, and the device waits for it."""

    host_s = 0.0

    def costs(self) -> list[float]:
        return [max(cost, self.host_s) for cost in super().costs()]

    def waited(self, width: int) -> float:
        index = COSTS.widths.index(width)
        return self.costs()[index] - super().costs()[index]


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
    assert [(step.seconds, step.waited) for step in policy.steps] == [(6.0, 0.0), (7.0, 0.0)]
    plan = StepPlan(0, 4, [0])
    widths.timed(plan, StepResult(0, [], [], 6.0, gpu_gap=1.0, launch_time=0.5))
    assert policy.steps[-1].waited == 1.0
