"""A draft that is no good: noticed by class of requests, reported once, and not paid for.

What its width costs then, and that it comes back, is in test_scheduler_width.py.
"""

import logging
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_device import Bench, make_admit, make_ready

from overlap_spec.config import SchedulerSettings
from overlap_spec.features.adaptive_width.scheduler import MeasuredWidth
from overlap_spec.features.draft_health.scheduler import ENOUGH_DRAFTS, SETTLED, DraftHealth
from overlap_spec.messages import (
    DraftState,
    Grammar,
    GrammarKind,
    LivenessProbe,
    SamplingParams,
    Stats,
    StepCosts,
    StepResult,
    TreePaths,
)
from overlap_spec.scheduler.limits import Limits
from overlap_spec.scheduler.requests import Request
from overlap_spec.scheduler.stats import Counters
from overlap_spec.scheduler.width import BatchWidths

DEAR = StepCosts((1, 64), (1, 2, 4), ((1.0, 1.2, 1.4), (1.0, 1.5, 2.5)))
READY = make_ready(num_pages=400, num_steps=3, step_widths=(1, 2, 4), step_costs=DEAR, max_deferred=8)


class Draft:
    """First guesses are right at some rate, and as many after them."""

    def __init__(self) -> None:
        self.health = DraftHealth()
        self.counts = list(self.health.counts.values())
        self._rng = random.Random(3)

    def run(self, rate: float, windows: int = 1, index: int = 0) -> DraftState:
        for _ in range(windows):
            right = sum(self._rng.random() < rate for _ in range(ENOUGH_DRAFTS))
            own = self.counts[index]
            own.drafts, own.first_accepted = own.drafts + ENOUGH_DRAFTS, own.first_accepted + right
            own.accepted += 2 * right
            self.health.check()
        return self.state

    @property
    def state(self) -> DraftState:
        return Stats(draft_classes=self.health.figures).draft_state


def test_a_dead_draft_is_one_line_and_so_is_its_recovery(caplog: pytest.LogCaptureFixture) -> None:
    draft = Draft()
    draft.counts[0].drafts = ENOUGH_DRAFTS - 1
    with caplog.at_level(logging.INFO):
        draft.health.check()
        assert draft.state is DraftState.UNKNOWN and not draft.health.figures, "too few to judge by"
        assert draft.run(0.0, 20) is DraftState.DEAD
        (line,) = [record.getMessage() for record in caplog.records]
        assert "hardly ever right for greedy requests" in line and "made for this target" in line
        assert draft.run(0.6, 3) is DraftState.HEALTHY
        assert len(caplog.records) == 2 and "as good as usual again" in caplog.records[1].getMessage()


def test_a_collapse_is_judged_by_the_drafts_own_history(caplog: pytest.LogCaptureFixture) -> None:
    draft = Draft()
    assert draft.run(0.7, 40) is DraftState.HEALTHY
    assert draft.run(0.55, 20) is DraftState.HEALTHY, "other traffic is no collapse"
    with caplog.at_level(logging.INFO):
        assert draft.run(0.12, 4) is DraftState.COLLAPSED, "12% would do for a draft that has never been better"
        (line,) = [record.getMessage() for record in caplog.records]
        assert "for greedy requests: accept length 1.4" in line and "before 2.2" in line
        figures = draft.health.figures["greedy"]
        assert figures.accept_length < 1.5 < 2 < figures.usual_accept_length
        assert draft.run(0.12, 120) is DraftState.HEALTHY, "what lasts becomes usual"
    always_so = Draft()
    assert always_so.run(0.12, 100) is DraftState.HEALTHY


def test_a_dead_draft_is_no_habit_to_compare_with() -> None:
    draft = Draft()
    draft.run(0.7, 40)
    assert draft.run(0.0, 100) is DraftState.DEAD
    assert draft.run(0.2, 4) is DraftState.COLLAPSED, "it is not as good as usual"


def test_history_takes_a_while_to_count() -> None:
    draft = Draft()
    draft.run(0.7, SETTLED - 4)
    assert draft.run(0.2, 4) is DraftState.HEALTHY
    settled = Draft()
    settled.run(0.7, SETTLED)
    assert settled.run(0.2, 4) is DraftState.COLLAPSED


def test_classes_of_requests_are_judged_apart() -> None:
    draft = Draft()
    draft.run(0.7, 12, index=0)
    draft.run(0.0, 2, index=2)
    assert draft.state is DraftState.DEAD
    assert {name: figures.state.value for name, figures in draft.health.figures.items()} == {
        "greedy": "healthy",
        "constrained": "dead",
    }
    grammar = Grammar(GrammarKind.REGEX, "a+")
    sampled = SamplingParams(temperature=0.7)
    kinds = [SamplingParams(temperature=0.0), sampled, SamplingParams(temperature=0.0, grammar=grammar)]
    root: Any = None
    requests = [
        Request(make_admit(uid, [1, 2], 9, temperature=each.temperature, grammar=each.grammar), root)
        for uid, each in enumerate(kinds)
    ]
    assert [request.draw for request in requests] == ["greedy", "sampled", "constrained"]
    counters, health = Counters([0] * 5), DraftHealth()
    result = StepResult(0, [[1, 2, 3], [1], [1, 2], [4]], [3, 3, 3, 0], 0.0)
    health.verified(counters.verified([*requests, requests[0]], result), True)
    assert [(each.drafts, each.accepted, each.first_accepted) for each in health.counts.values()] == [
        *((2, 2, 1), (1, 0, 0), (1, 1, 1))
    ]
    health.verified(counters.verified(requests, StepResult(0, [[1], [1], [1]], [0, 0, 0], 0.0)), False)
    assert [each.drafts for each in health.counts.values()] == [2, 1, 1] and counters.drafts == 3


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_draft_that_gives_no_guess_ends_at_width_1(is_tree: bool) -> None:
    """Its logits are NaN. Steps after one of width 1 have no guess of any draft, and teach nothing."""
    widths = BatchWidths(Limits(READY, SchedulerSettings(4, 2, 16, 0)))
    widths.policy = MeasuredWidth(DEAR)
    requests: Any = [SimpleNamespace(is_limited=False)] * 4
    queues: Any = SimpleNamespace(running=requests, num_limited=0)
    trees = (TreePaths([[]] * 4, [0] * 4),) if is_tree else ()
    chosen = [4]
    for _ in range(6000):
        width = widths.choose(queues)
        asked = width if min(width, chosen[-1]) > 1 else 0
        chosen.append(width)
        widths.observe(requests, StepResult(0, [[7]] * 4, [0] * 4, 0.0, extensions=trees), asked)
    assert 1 in chosen[:64] and chosen[64:].count(1) > 0.97 * len(chosen[64:]), "the rest are trials"


def test_reports_state_it_and_so_does_the_answer_to_a_probe(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(READY)
    told: list[DraftState] = []
    bench.scheduler.links = replace(bench.scheduler.links, report_alive=lambda report: told.append(report.draft_state))
    bench.scheduler.dispatch(LivenessProbe())
    health = bench.scheduler.hooks.by_name["draft_health"]
    assert isinstance(health, DraftHealth)
    health.counts["sampled"].drafts = ENOUGH_DRAFTS
    bench.admit(make_admit(1, [1, 2, 3], 5))
    bench.finish_all()
    bench.scheduler.send_replies()
    bench.scheduler.dispatch(LivenessProbe())
    assert told == [DraftState.UNKNOWN, DraftState.DEAD]
    assert bench.stats[-1].draft_is_dead and bench.stats[-1].draft_classes["sampled"].state is DraftState.DEAD
    assert "hardly ever right for sampled requests" in caplog.text
