"""Ages of signs on a clock that the test turns: who is probed, late, hung, and what a start may take."""

import logging

import pytest

from overlap_spec.runtime.watchdog import FIRST_PHASE, LATE_S, START_TIMEOUTS, Watchdog

ACTORS = ("tokenizer", "scheduler", "worker")


class Run:
    """A watchdog over actors that are ready, and its clock."""

    def __init__(self, timeout_s: float = 60.0, ready: bool = True) -> None:
        self.now = 1000.0
        self.watchdog = Watchdog(timeout_s, lambda: self.now)
        for actor in ACTORS:
            self.watchdog.started(actor)
            if ready:
                self.watchdog.heard(actor)

    def ticks(self, count: int, answering: tuple[str, ...] = (), step_s: float = 0.0) -> None:
        """So many intervals; those `answering` answer what they are asked at once."""
        for _ in range(count):
            self.now += self.watchdog.interval_s
            for actor in self.watchdog.tick():
                if actor in answering:
                    self.watchdog.heard(actor, step_s)


def test_an_actor_is_asked_only_if_nothing_else_came_and_once() -> None:
    run = Run()
    run.now += run.watchdog.interval_s
    run.watchdog.heard("scheduler")
    assert run.watchdog.tick() == ["tokenizer", "worker"]
    run.now += run.watchdog.interval_s
    assert run.watchdog.tick() == ["scheduler"], "the others still owe an answer"


def test_one_that_is_silent_is_late_and_then_hangs() -> None:
    run = Run(timeout_s=60.0)
    others = ("tokenizer", "scheduler")
    run.ticks(4, others)
    assert (run.watchdog.unresponsive(), run.watchdog.hung()) == (None, [])
    run.ticks(1, others)
    late = run.watchdog.unresponsive()
    assert late is not None and (late.actor, late.seconds) == ("worker", 12.5) and late.seconds > LATE_S
    run.ticks(19, others)
    assert run.watchdog.hung() == []
    run.ticks(1, others)
    assert [str(each) for each in run.watchdog.hung()] == ["no sign of life for 62.5 s"]
    assert run.watchdog.ages() == {"tokenizer": 0.0, "scheduler": 0.0, "worker": 62.5}
    run.watchdog.heard("worker")
    assert (run.watchdog.unresponsive(), run.watchdog.hung()) == (None, [])


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
    asked = run.watchdog.tick()
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
    run.watchdog.heard("tokenizer")
    run.watchdog.heard("worker", phase="compiling kernels")
    ticks = int(25.0 / run.watchdog.interval_s)
    run.ticks(ticks, ("scheduler", "tokenizer"))
    assert [record.message for record in caplog.records] == [
        "worker: still compiling kernels, for 11 s",
        "worker: still compiling kernels, for 21 s",
    ]
    assert (run.watchdog.hung(), run.watchdog.unresponsive()) == ([], None)
    starting = run.watchdog.starting()
    assert starting is not None and (starting.actor, starting.seconds) == ("worker", 25.0)
    run.ticks(ticks * START_TIMEOUTS // 2, ("scheduler", "tokenizer"))
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
