"""Rules of an adaptive config file, step by step and by hand."""

import pytest

from overlap_spec.config import WidthRule
from overlap_spec.features.adaptive_width.scheduler import RuledSteps, RuledWidth
from overlap_spec.messages import StepResult


def rule(candidates: tuple[int, ...], initial: int, **fields) -> WidthRule:
    defaults = {"warmup_batches": 0, "update_interval": 1, "ema_alpha": 1.0, "down_hysteresis": 0.0}
    return WidthRule(1, candidates, initial_steps=initial, **{**defaults, **fields})


def steps_after(rule_: WidthRule, *accepted: float | None) -> list[int]:
    ruled = RuledSteps(rule_)
    seen = []
    for value in accepted:
        ruled.observe(value)
        seen.append(ruled.steps)
    return seen


@pytest.mark.parametrize(
    ("initial", "accepted", "expected"),
    [
        (3, 1.0, 3),  # above 1 - 0.5, not above 3 - 0.5
        (3, 0.5, 1),  # at the threshold: down
        (3, 2.6, 7),
        (3, 2.5, 3),
        (7, 2.5, 3),
        (7, 0.1, 1),  # down twice at once
        (1, 6.9, 7),  # up twice
        (7, 7.0, 7),
    ],
)
def test_thresholds_lie_between_candidates(initial: int, accepted: float, expected: int) -> None:
    assert steps_after(rule((1, 3, 7), initial), accepted) == [expected]


def test_hysteresis_moves_the_thresholds() -> None:
    assert steps_after(rule((1, 3), 3, down_hysteresis=-0.25), 0.5) == [3]
    assert steps_after(rule((1, 3), 3, down_hysteresis=-0.25), 0.25) == [1]
    assert steps_after(rule((1, 3), 1, up_hysteresis=0.3), 0.8) == [1]
    assert steps_after(rule((1, 3), 1, up_hysteresis=0.3), 0.81) == [3]


def test_nothing_changes_while_warming_up_and_then_only_at_intervals() -> None:
    waiting = rule((1, 3), 3, warmup_batches=2, update_interval=3)
    assert steps_after(waiting, *[0.0] * 6) == [3, 3, 3, 3, 1, 1]


def test_the_average_is_smoothed() -> None:
    ruled = RuledSteps(rule((1, 3), 3, ema_alpha=0.5))
    assert ruled.average == 2.0
    ruled.observe(0.0)
    ruled.observe(0.0)
    assert ruled.average == 0.5 and ruled.steps == 1


def test_zero_steps_are_left_again_to_see_whether_they_are_still_right() -> None:
    assert steps_after(rule((0, 1, 3), 1), 0.5, None, 0.0, None) == [0, 1, 0, 1]


def test_a_ceiling_caps_what_does_not_rise() -> None:
    assert steps_after(rule((1, 3, 7), 7, ceiling_coeff=1.5), 3.9) == [3]  # ceil(5.85) = 6 < 7
    assert steps_after(rule((1, 3, 7), 3, ceiling_coeff=1.5), 2.6) == [7], "going up is not capped"


def test_a_rule_holds_from_its_batch_size_on_after_padding() -> None:
    rules = [rule((3,), 3), WidthRule(8, (1,), initial_steps=1), WidthRule(32, (0,), initial_steps=0)]
    widths = RuledWidth(rules, padded=(1, 4, 8, 16))
    assert [widths.choose(size) for size in (1, 4, 5, 8, 16, 17, 31, 32, 99)] == [4, 4, 2, 2, 2, 2, 2, 1, 1]


def test_results_reach_the_rule_of_their_batch_size() -> None:
    widths = RuledWidth([rule((1, 3), 3), WidthRule(4, (3, 5), initial_steps=3)], padded=())
    widths.observe(StepResult(0, [[1], [1]], [0, 0], 0.0))
    assert widths.choose(2) == 4, "the first step after a change has no guesses: nothing is measured"
    widths.observe(StepResult(0, [[1], [1, 2]], [3, 3], 0.0))  # 0.5 accepted on average
    assert widths.choose(2) == 2
    assert widths.choose(4) == 4
