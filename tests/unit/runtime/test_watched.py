"""Records of all processes, as those see them who watch."""

from overlap_spec.messages import Record
from overlap_spec.runtime.watchdog import BETWEEN_S, GIVEN_UP_S, KEPT_S, WatchedRecords

ROLES = ("frontend", "worker")


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_newest_are_kept_in_order() -> None:
    clock = Clock()
    watched = WatchedRecords(clock)
    old, new = Record("worker host", "launch", 96.5, 97.0, 1), Record("scheduler", "plan", 99.0, 99.5, 2)
    watched.add("worker", [new])
    watched.add("scheduler", [old])
    assert watched.newest() == [old, new]
    clock.now = old.end + KEPT_S + 0.1
    assert watched.newest() == [new]


def test_a_question_without_an_answer_is_not_asked_again_for_a_while() -> None:
    clock = Clock()
    watched = WatchedRecords(clock)
    assert watched.to_ask(ROLES) == ["frontend", "worker"]
    watched.add("frontend", [])
    assert watched.to_ask(ROLES) == []  # too soon, for a second one who watches
    clock.now += BETWEEN_S
    assert watched.to_ask(ROLES) == ["frontend"]
    clock.now += GIVEN_UP_S
    assert watched.to_ask(ROLES) == ["frontend", "worker"]
