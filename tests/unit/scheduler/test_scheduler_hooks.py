"""Where features attach to the scheduler: what a hook is asked and told, and an engine without one of them."""

import subprocess
import sys
from collections.abc import Sequence

import msgspec
import pytest
from support.fake_device import Bench, make_admit, make_ready

from overlap_spec import features
from overlap_spec.errors import RequestError
from overlap_spec.features.grammar import GrammarFailed
from overlap_spec.messages import Extension, FinishKind, Grammar, GrammarKind, Stats, StepResult, ToScheduler
from overlap_spec.scheduler.hooks import Hooks, Runs, SchedulerHook
from overlap_spec.scheduler.requests import Request, Step

PROMPT = [1, 2, 3]
REGEX = Grammar(GrammarKind.REGEX, "a+")


class Holds(SchedulerHook):
    """Holds every request until it is told otherwise."""

    def __init__(self) -> None:
        self.closed_uids: list[int] = []

    def admitted(self, request: Request) -> bool:
        return True

    def closed(self, request: Request) -> None:
        self.closed_uids.append(request.uid)


class Notes(SchedulerHook):
    """Notes what it is told of a step, and adds to reports."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.rows = 0
        self.is_drafted: list[bool] = []

    def verified(self, runs: Runs, was_drafted: bool) -> None:
        self.rows += sum(runs.values())
        self.is_drafted.append(was_drafted)

    def settled(self, step: Step, result: StepResult) -> None:
        self.steps.append(result.step_id)

    def report(self, stats: Stats) -> Stats:
        return Stats(num_queued=self.rows)


class Told(Extension, frozen=True):
    """A message of one of the two below."""


class Takes(SchedulerHook):
    """Takes that message, and answers."""

    def __init__(self) -> None:
        self.answers: list[Told] = []

    def message(self, message: Extension) -> bool:
        if isinstance(message, Told):
            self.answers.append(message)
        return isinstance(message, Told)

    def replies(self) -> Sequence[Extension]:
        answers, self.answers = self.answers, []
        return answers


def test_a_hook_is_asked_only_where_it_overrides_a_point() -> None:
    hooks = Hooks()
    hooks.add("notes", notes := Notes())
    hooks.add("idle", SchedulerHook())
    assert hooks.settled == [notes.settled] and hooks.verified == [notes.verified] and hooks.report == [notes.report]
    assert not (hooks.admitted or hooks.started or hooks.closed or hooks.next_step or hooks.message or hooks.replies)
    assert list(hooks.by_name) == ["notes", "idle"]


def test_a_request_is_queued_when_every_hook_has_released_it() -> None:
    bench = Bench(make_ready())
    for name in ("first", "second"):
        bench.scheduler.hooks.add(name, Holds())
    bench.admit(make_admit(1, PROMPT, 4))
    hooks, queues = bench.scheduler.hooks, bench.scheduler.queues
    assert not bench.all_plans and list(queues.held) == [1] == list(queues.open)
    assert bench.scheduler.reporter.snapshot().num_queued == 1
    hooks.release(1)
    assert queues.held and not queues.waiting
    hooks.release(1)
    assert not queues.held and len(queues.waiting) == 1
    bench.scheduler.plan_ahead()
    assert queues.running


def test_a_request_that_ends_while_it_is_held_is_closed_once() -> None:
    bench = Bench(make_ready())
    bench.scheduler.hooks.add("holds", holds := Holds())
    for uid in (1, 2):
        bench.admit(make_admit(uid, PROMPT, 4))
    bench.abort(1)
    bench.scheduler.hooks.fail(2, RequestError("grammar", "no further"))
    bench.scheduler.hooks.fail(2, RequestError("grammar", "and once more"))
    bench.scheduler.send_replies()
    for message in bench.frontend.drain():
        bench._receive(message)
    assert bench.finishes[1].kind is FinishKind.ABORT and bench.refused[2].message == "no further"
    assert bench.refused[2].field == "grammar"
    assert holds.closed_uids == [1, 2] and not bench.scheduler.queues.held
    bench.check_drained()


def test_steps_are_told_in_order_and_reports_are_added_to() -> None:
    bench = Bench(make_ready())
    bench.scheduler.hooks.add("notes", notes := Notes())
    bench.admit(make_admit(1, PROMPT, 12))
    bench.finish_all()
    assert notes.steps == [plan.step_id for plan in bench.all_plans]
    assert notes.is_drafted == [True] * (len(bench.all_plans) - 1)
    assert 0 < notes.rows <= len(notes.is_drafted), "late rows of a request that is gone count for nothing"
    assert bench.scheduler.reporter.snapshot() == Stats(num_queued=notes.rows) == bench.scheduler.reporter.last


def test_a_message_is_taken_or_the_engine_ends() -> None:
    bench = Bench(make_ready())
    with pytest.raises(AssertionError, match="no feature takes Told"):
        bench.scheduler.dispatch(Told())
    bench.scheduler.hooks.add("takes", Takes())
    bench.scheduler.dispatch(Told())
    assert not bench.scheduler.outbox
    sent: list[object] = []
    bench.scheduler.links.frontend.send = sent.append
    bench.scheduler.send_replies()
    assert sent == [Told()]


def test_a_message_of_a_feature_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its type is not in the link's union: a payload of it is as bad as any other."""
    payload = msgspec.msgpack.encode(GrammarFailed(1, "no text satisfies it"))
    assert msgspec.msgpack.decode(payload, type=features.link(ToScheduler)) == GrammarFailed(1, "no text satisfies it")
    with pytest.raises(msgspec.ValidationError, match=r"Expected `str`, got `int` - at `\$\[2\]`"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(["GrammarFailed", 1, 2]), type=features.link(ToScheduler))
    monkeypatch.setattr(features, "NAMES", ())
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'GrammarFailed'"):
        msgspec.msgpack.decode(payload, type=features.link(ToScheduler))


# --- without a feature ------------------------------------------------------------------------------------

HIDDEN = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        is_hidden = (name + ".").startswith("overlap_spec.features.{}.")
        return None if is_hidden else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
from overlap_spec import features
from overlap_spec.bench.scheduler import Load, measure_scheduler

assert measure_scheduler(4, 200)["verify_steps_per_step"] > 3
print(*Load(1).scheduler.hooks.by_name)
"""


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(8)
@pytest.mark.parametrize("name", features.NAMES)
def test_the_scheduler_serves_with_any_feature_s_folder_hidden(name: str) -> None:
    ran = subprocess.run([sys.executable, "-c", HIDDEN.format(name)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    attached = {"grammar", "draft_health", "log_probs"} - set(features.absent())
    assert set(ran.stdout.split()) == attached - {name}


def test_what_a_feature_that_is_not_there_is_needed_for_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "NAMES", ())
    bench = Bench(make_ready())
    assert not bench.scheduler.hooks.by_name
    bench.admit(make_admit(1, PROMPT, 4, grammar=REGEX))
    bench.admit(make_admit(2, PROMPT, 4))
    bench.finish_all()
    assert "needs a grammar" in bench.refused[1].message and bench.finishes[2].kind is FinishKind.LENGTH
    bench.check_streams()
    bench.check_drained()
