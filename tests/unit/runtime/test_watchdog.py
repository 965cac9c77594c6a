"""Ages of heartbeats on a clock that the test turns: who is probed, busy, late, hung, and what a start may take."""

import logging

import pytest

from overlap_spec.runtime.watchdog import BUSY_S, BUSY_SHARE, FIRST_PHASE, LATE_S, START_TIMEOUTS, Watchdog

ACTORS = ("frontend", "scheduler", "worker")


class Run:
    """A watchdog over actors that are ready, and its clock."""

    def __init__(self, timeout_s: float = 60.0, ready: bool = True) -> None:
        self.now = 1000.0
        self.watchdog = Watchdog(timeout_s, lambda: self.now)
        self.cpu_s = dict.fromkeys(ACTORS, 0.0)
        for actor in ACTORS:
            self.watchdog.started(actor)
            if ready:
                self.watchdog.heard(actor)

    def ticks(
        self, count: int, answering: tuple[str, ...] = (), step_s: float = 0.0, working: str = "", share: float = 1.0
    ) -> None:
        """So many intervals; those `answering` answer what they are asked at once, one uses a share of a core."""
        for _ in range(count):
            self.now += self.watchdog.interval_s
            if working:
                self.cpu_s[working] += share * self.watchdog.interval_s
            for actor in self.watchdog.tick(self.cpu_s):
                if actor in answering:
                    self.watchdog.heard(actor, step_s)


def test_an_actor_is_asked_only_if_nothing_else_came_and_once() -> None:
    run = Run()
    run.now += run.watchdog.interval_s
    run.watchdog.heard("scheduler")
    assert run.watchdog.tick(run.cpu_s) == ["frontend", "worker"]
    run.now += run.watchdog.interval_s
    assert run.watchdog.tick(run.cpu_s) == ["scheduler"], "the others still owe an answer"


def test_one_that_is_silent_is_late_and_then_hangs() -> None:
    run = Run(timeout_s=60.0)
    others = ("frontend", "scheduler")
    run.ticks(4, others)
    assert (run.watchdog.unresponsive(), run.watchdog.hung()) == (None, [])
    run.ticks(1, others)
    late = run.watchdog.unresponsive()
    assert late is not None and (late.actor, late.seconds) == ("worker", 12.5) and late.seconds > LATE_S
    run.ticks(19, others)
    assert run.watchdog.hung() == []
    run.ticks(1, others)
    assert [str(each) for each in run.watchdog.hung()] == ["no heartbeat for 62.5 s"]
    assert run.watchdog.ages() == {"frontend": 0.0, "scheduler": 0.0, "worker": 62.5}
    run.watchdog.heard("worker")
    assert (run.watchdog.unresponsive(), run.watchdog.hung()) == (None, [])


def test_one_that_is_busy_is_late_after_longer_and_hangs_at_the_same_time() -> None:
    run = Run(timeout_s=60.0)
    others = ("scheduler", "worker")
    run.ticks(12, others, working="frontend", share=2 * BUSY_SHARE)
    assert run.now == 1030.0 and run.watchdog.unresponsive() is None, "it works for 30 s"
    run.ticks(1, others, working="frontend", share=2 * BUSY_SHARE)
    late = run.watchdog.unresponsive()
    assert late is not None and str(late) == "busy without a heartbeat for 32.5 s" and late.seconds > BUSY_S
    run.ticks(11, others, working="frontend")
    assert run.watchdog.hung() == []
    run.ticks(1, others, working="frontend")
    assert [str(each) for each in run.watchdog.hung()] == ["busy without a heartbeat for 62.5 s"]
    run.watchdog.heard("frontend")
    assert (run.watchdog.unresponsive(), run.watchdog.hung()) == (None, [])


def test_one_that_stops_working_is_late_from_then_on() -> None:
    run = Run(timeout_s=60.0)
    others = ("scheduler", "worker")
    run.ticks(6, others, working="frontend")
    run.ticks(4, others, working="frontend", share=BUSY_SHARE / 2)
    assert run.watchdog.unresponsive() is None, "idle for 10 s of 25"
    run.ticks(1, others)
    late = run.watchdog.unresponsive()
    assert late is not None and (str(late), late.idle_s) == ("no heartbeat for 27.5 s", 12.5)


def test_time_that_this_process_slept_makes_no_actor_idle() -> None:
    run = Run(timeout_s=60.0)
    run.ticks(6, ("scheduler", "worker"), working="frontend")
    run.now += 600.0
    run.ticks(1, ("scheduler", "worker"))
    assert run.watchdog.unresponsive() is None, "it has worked until then"


@pytest.mark.parametrize("timeout_s", [3.0, 60.0, 0.0])
def test_five_seconds_of_work_are_no_silence(timeout_s: float) -> None:
    """A short timeout leaves less time; a busy process has more of it than an idle one all the same."""
    run = Run(timeout_s)
    busy_s = min(5.0, run.watchdog.busy_s)
    run.ticks(int(busy_s / run.watchdog.interval_s), working="frontend", answering=("scheduler", "worker"))
    assert (run.watchdog.unresponsive(), run.watchdog.hung()) == (None, [])
    assert run.watchdog.late_s < run.watchdog.busy_s and (not timeout_s or run.watchdog.busy_s < timeout_s)


def test_a_worker_that_answers_hangs_all_the_same_with_one_step_in_flight() -> None:
    run = Run(timeout_s=60.0)
    run.ticks(3, ACTORS, step_s=0.4)
    assert (run.watchdog.unresponsive(), run.watchdog.hung()) == (None, [])
    run.watchdog.heard("worker", step_s=60.5)
    assert [(each.actor, str(each)) for each in run.watchdog.hung()] == [
        ("worker", "a step has been in flight for 60.5 s")
    ]


@pytest.mark.parametrize("slept_s", [600.0, 4.0])
def test_time_that_this_process_slept_counts_against_no_actor(slept_s: float) -> None:
    """Answers of that time wait to be read."""
    run = Run(timeout_s=4.0)
    run.ticks(2, ACTORS)
    run.now += slept_s
    asked = run.watchdog.tick(run.cpu_s)
    assert run.watchdog.hung() == []
    for actor in asked:
        run.watchdog.heard(actor)
    run.ticks(2, ACTORS)
    assert run.watchdog.unresponsive() is None
    run.ticks(20)
    assert len(run.watchdog.hung()) == 3, "later silence does"


def test_a_phase_of_a_start_is_named_while_it_takes_long(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    run = Run(timeout_s=10.0, ready=False)
    run.ticks(1, ("scheduler",))
    starting = run.watchdog.starting()
    assert starting is not None and starting.doing == FIRST_PHASE
    run.watchdog.heard("frontend")
    run.watchdog.heard("worker", phase="compiling kernels")
    ticks = int(25.0 / run.watchdog.interval_s)
    run.ticks(ticks, ("scheduler", "frontend"))
    assert [record.message for record in caplog.records] == [
        "worker: still compiling kernels, for 11 s",
        "worker: still compiling kernels, for 21 s",
    ]
    assert (run.watchdog.hung(), run.watchdog.unresponsive()) == ([], None)
    starting = run.watchdog.starting()
    assert starting is not None and (starting.actor, starting.seconds) == ("worker", 25.0)
    run.ticks(ticks * START_TIMEOUTS // 2, ("scheduler", "frontend"))
    assert [each.actor for each in run.watchdog.hung()] == ["worker"]
    run.watchdog.heard("worker")
    assert (run.watchdog.hung(), run.watchdog.starting()) == ([], None)


def test_without_a_timeout_nothing_is_given_up() -> None:
    run = Run(timeout_s=0.0)
    run.ticks(1000)
    assert run.watchdog.hung() == []
    assert run.watchdog.unresponsive() is not None
    run.watchdog.ended("worker")
    assert "worker" not in run.watchdog.ages()


class RanksRun(Run):
    """Two ranks beside the scheduler, which always answers."""

    def __init__(self, ready: bool = True) -> None:
        super().__init__(60.0, ready)
        self.watchdog.started("worker-1")
        if ready:
            self.watchdog.heard("worker-1")

    def wait(
        self, seconds: float, waiting: tuple[str, ...], answering: tuple[str, ...] = (), step: bool = False
    ) -> None:
        """Ranks that wait tell so; with `step`, those that answer have a step in flight since the beginning."""
        begun = self.now
        while self.now < begun + seconds:
            self.ticks(1, ("frontend", "scheduler"))
            for role in waiting:
                self.watchdog.waits(role, self.now - begun)
            for role in answering:
                self.watchdog.heard(role, self.now - begun if step else 0.0)

    @property
    def given_up(self) -> list[str]:
        return [late.actor for late in self.watchdog.hung()]


@pytest.mark.parametrize("stopped", ["worker", "worker-1"])
def test_of_ranks_the_one_that_is_silent_hangs_and_not_the_one_that_waits_for_it(stopped: str) -> None:
    run = RanksRun()
    (other,) = {"worker", "worker-1"} - {stopped}
    run.wait(45.0, waiting=(other,))
    late = run.watchdog.unresponsive()
    assert late is not None and late.actor == stopped, "/health names it"
    assert run.given_up == []
    run.wait(25.0, waiting=(other,))
    assert run.given_up == [stopped]


def test_a_rank_that_began_to_wait_before_the_other_was_stopped_is_not_given_up_first() -> None:
    run = RanksRun()
    run.wait(55.0, waiting=("worker",), answering=("worker-1",))  # a long step of it, which answers
    assert run.given_up == []
    run.wait(10.0, waiting=())
    run.watchdog.waits("worker", 65.0)
    assert run.given_up == [], "the silent one is late soon"
    run.wait(55.0, waiting=("worker",))
    assert run.given_up == ["worker-1"]


@pytest.mark.parametrize("stopped", ["worker", "worker-1"])
def test_a_rank_that_answers_with_an_old_step_is_not_given_up_for_the_silent_one(stopped: str) -> None:
    """As on a GPU, whose reduction waits while the host goes on."""
    run = RanksRun()
    (other,) = {"worker", "worker-1"} - {stopped}
    run.wait(65.0, waiting=(), answering=(other,), step=True)
    assert run.given_up == [stopped]


def test_ranks_that_all_wait_hang() -> None:
    run = RanksRun()
    run.wait(58.0, waiting=("worker", "worker-1"))
    assert run.given_up == []
    run.wait(65.0, waiting=("worker", "worker-1"))
    assert run.given_up == ["worker", "worker-1"]


def test_ranks_that_all_answer_with_an_old_step_hang() -> None:
    run = RanksRun()
    run.wait(65.0, waiting=(), answering=("worker", "worker-1"), step=True)
    assert run.given_up == ["worker", "worker-1"]


def test_a_rank_that_waits_while_it_starts_stays_in_its_phase() -> None:
    run = RanksRun(ready=False)
    for role in ("frontend", "scheduler"):
        run.watchdog.heard(role)
    for role in ("worker", "worker-1"):
        run.watchdog.heard(role, phase="loading weights")
    run.wait(START_TIMEOUTS * 60.0 - 20, waiting=("worker",))
    starting = run.watchdog.starting()
    assert starting is not None and starting.doing == "loading weights" and run.given_up == []
    run.wait(30.0, waiting=("worker",))
    assert run.given_up == ["worker-1"]


def test_an_answer_ends_a_wait() -> None:
    run = RanksRun()
    run.wait(50.0, waiting=("worker", "worker-1"))
    run.watchdog.heard("worker")
    run.watchdog.heard("worker-1")
    run.wait(30.0, waiting=(), answering=("worker", "worker-1"))
    assert run.given_up == [] and run.watchdog.unresponsive() is None
