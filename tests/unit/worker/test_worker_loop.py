"""The worker's loop over a device that is done when the test says so."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.plans import SlotPart, parts_of, plan_of

from overlap_spec.messages import LivenessProbe, Shutdown, StepPlan, StepResult
from overlap_spec.runtime.step_link import SpinPolicy
from overlap_spec.worker.hooks import Hooks
from overlap_spec.worker.loop import GLANCE_S, Worker
from overlap_spec.worker.step import HostTimes


class FakeHandle:
    def __init__(self, plan: StepPlan, received: float) -> None:
        self.plan = plan
        self.is_last = True
        self.host = HostTimes(received, received)
        self.done = threading.Event()

    def ready(self) -> bool:
        return self.done.is_set()

    def wait(self) -> StepResult:
        return StepResult(self.plan.step_id, [[1]], [0], 0.0, is_last=self.is_last)


class FakeLaunch:
    def __init__(self, *handles: FakeHandle) -> None:
        self.handle = handles[0]
        self.handles = handles

    def advance(self) -> bool:
        return True


class FakeExecutor:
    """`drafted`: steps whose draft has been launched."""

    hooks = Hooks()

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once
        self.handles: list[FakeHandle] = []
        self.drafted: list[int] = []

    def start(self, plan: StepPlan, on_published: Callable[[Any], None], received: float) -> FakeLaunch:
        if not parts_of(plan):
            raise KeyError("no work")
        handles = [FakeHandle(part, received) for part in plan.parts()]
        handles[0].is_last = len(handles) == 1
        for handle in handles:
            if self.at_once:
                handle.done.set()
            self.handles.append(handle)
            on_published(handle)
        self.drafted += [handle.plan.step_id for handle in handles]
        return FakeLaunch(*handles)


class ScriptedInbox:
    """Hands out one batch of messages per poll; what happens between is up to `between`."""

    def __init__(self, batches: list[list[Any]], between: Callable[[], None] = lambda: None) -> None:
        self._batches = deque(batches)
        self._between = between
        self.waits: list[float | None] = []

    def poll(self) -> list[Any]:
        self._between()
        return self._batches.popleft()

    def wait(self, timeout_s: float | None) -> None:
        self.waits.append(timeout_s)


class Sent(list[Any]):
    def send(self, message: Any) -> None:
        self.append(message)

    def close(self) -> None: ...


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, 1, [0])


STOP = [Shutdown(False)]
NO_PATIENCE = SpinPolicy(0.0)


def serve(executor: FakeExecutor, inbox: ScriptedInbox, scheduler: Sent, spin: SpinPolicy = NO_PATIENCE) -> None:
    Worker(executor, inbox, scheduler, spin).run()  # fakes


def test_where_the_host_is_the_device_tokens_leave_before_the_draft_works() -> None:
    executor, drafted_when_sent = FakeExecutor(at_once=True), []

    class Noting(Sent):
        def send(self, message: Any) -> None:
            super().send(message)
            drafted_when_sent.append(list(executor.drafted))

    scheduler = Noting()
    serve(executor, ScriptedInbox([[plan(1), plan(2)], STOP]), scheduler)
    assert [result.step_id for result in scheduler] == [1, 2]
    assert drafted_when_sent == [[], [1]]


def test_results_leave_in_the_order_of_plans() -> None:
    """Step 2 is done first, as no device would have it; its result still waits for step 1's."""
    executor, scheduler = FakeExecutor(at_once=False), Sent()
    seen: list[list[int]] = []

    def script() -> Iterator[None]:
        yield
        yield
        executor.handles[1].done.set()
        yield
        seen.append([result.step_id for result in scheduler])
        executor.handles[0].done.set()
        yield

    steps = script()
    inbox = ScriptedInbox([[plan(1), plan(2)], [], [], [], STOP], lambda: next(steps, None))
    serve(executor, inbox, scheduler)
    assert seen == [[]]
    assert [result.step_id for result in scheduler] == [1, 2]


def test_it_looks_after_steps_in_flight_and_sleeps_without_them() -> None:
    executor = FakeExecutor(at_once=False)
    glances = ScriptedInbox([[plan(1)], [], [], STOP])
    serve(executor, glances, Sent())
    assert all(timeout is not None and timeout < 0.01 for timeout in glances.waits) and glances.waits
    idle = ScriptedInbox([[], STOP])
    serve(executor, idle, Sent())
    assert idle.waits == [None]


@pytest.mark.parametrize(("at_once", "sleep"), [(True, None), (False, GLANCE_S)], ids=["idle", "a step hangs"])
def test_it_polls_while_its_patience_lasts_and_then_sleeps(at_once: bool, sleep: float | None) -> None:
    """20 ms after the last event it polls no more: without steps it sleeps, with one it looks after it now and then."""
    now = 0.0

    def pass_time() -> None:
        nonlocal now
        now += 0.001

    inbox = ScriptedInbox([[plan(1)], *[[]] * 40, STOP], pass_time)
    serve(FakeExecutor(at_once), inbox, Sent(), SpinPolicy(0.02, lambda: now))
    assert inbox.waits == [sleep] * len(inbox.waits)
    assert len(inbox.waits) in (20, 21, 22)


def test_a_probe_is_answered_with_the_age_of_the_oldest_step_and_is_no_reason_to_poll() -> None:
    ages: list[float] = []

    def serve_and_note(executor: FakeExecutor, inbox: ScriptedInbox) -> None:
        worker = Worker(executor, inbox, Sent(), SpinPolicy(0.02, lambda: 0.0))  # fakes
        worker.report_alive = ages.append
        worker.run()

    probe = [LivenessProbe()]
    idle = ScriptedInbox([probe, probe, STOP])
    serve_and_note(FakeExecutor(at_once=True), idle)
    assert (ages, idle.waits) == ([0.0, 0.0], [None, None])
    ages.clear()
    executor = FakeExecutor(at_once=False)
    inbox = ScriptedInbox([[plan(1)], [plan(2)], probe, STOP])
    serve_and_note(executor, inbox)
    assert len(ages) == 1 and 0 < ages[0] < 60


def test_what_a_step_raises_ends_the_worker() -> None:
    with pytest.raises(KeyError, match="no work"):
        serve(FakeExecutor(at_once=True), ScriptedInbox([[plan_of(1, [], 1)]]), Sent())


@pytest.mark.parametrize("at_once", [True, False])
def test_a_step_of_windows_and_prompts_has_two_results(at_once: bool) -> None:
    """Each leaves as soon as its tokens are out, in order."""
    executor, scheduler = FakeExecutor(at_once), Sent()
    mixed = plan_of(1, [SlotPart(0), SlotPart(1, tokens=b"1234")], 1, first_width=1)
    seen: list[int] = []

    def script() -> Iterator[None]:
        yield
        for part in (1, 0) if not at_once else ():  # no device is done with the second part first
            yield
            seen.append(len(scheduler))
            executor.handles[part].done.set()
        yield

    steps = script()
    inbox = ScriptedInbox([[mixed, plan(2)], [], [], [], STOP], lambda: next(steps, None))
    serve(executor, inbox, scheduler)
    results = [(result.step_id, result.is_last) for result in scheduler]
    assert results == [(1, False), (1, True), (2, True)][: 3 if at_once else 2]
    assert seen == ([] if at_once else [0, 0])


def test_a_probe_of_a_step_whose_windows_are_out_tells_its_age() -> None:
    """The plan's, which both parts have."""
    executor, ages = FakeExecutor(at_once=False), list[float]()
    mixed = plan_of(1, [SlotPart(0), SlotPart(1, tokens=b"1234")], 1, first_width=1)

    def script() -> Iterator[None]:
        yield
        yield
        executor.handles[0].done.set()
        yield

    steps = script()
    inbox = ScriptedInbox([[mixed], [], [], [LivenessProbe()], STOP], lambda: next(steps, None))
    scheduler = Sent()
    worker = Worker(executor, inbox, scheduler, SpinPolicy(0.0))  # fakes
    worker.report_alive = ages.append
    worker.run()
    assert [result.is_last for result in scheduler] == [False] and len(ages) == 1 and ages[0] > 0


def test_the_oldest_plan_that_waits_tells_for_how_long() -> None:
    worker = Worker(None, None, None, SpinPolicy(0.0))
    assert worker._oldest_step_s(5.0) == 0.0
    worker._arrived.extend((plan_of(step, [], 1), float(step)) for step in (1, 3))
    assert worker._oldest_step_s(5.0) == 4.0
