"""The account of a start: phases add up to the time since the process began."""

import time

import pytest

from overlap_spec.worker import worker_actor
from overlap_spec.worker.worker_actor import StartTimes, process_age


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is; the process is 2 s old."""
    now = [100.0]
    monkeypatch.setattr(worker_actor, "process_age", lambda: 2.0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_first_phase_begins_with_the_process(clock: list[float]) -> None:
    times = StartTimes()
    clock[0] += 1
    times.end("imports")
    clock[0] += 4
    times.end("weights")
    assert times.seconds == {"imports": 3.0, "weights": 4.0}


def test_a_phase_may_have_several_parts(clock: list[float]) -> None:
    times = StartTimes()
    for phase in ("a", "b", "a"):
        clock[0] += 1
        times.end(phase)
    assert times.seconds == {"a": 4.0, "b": 1.0}


def test_waiting_for_kernels_is_no_time_of_captures(clock: list[float]) -> None:
    times = StartTimes()
    for phase, compiling in (("kernels", 0.0), ("warm-up", 0.0), ("CUDA graphs", 3.0), ("kernels", 0.0)):
        clock[0] += 4
        times.end(phase, compiling)
    assert times.seconds == {"kernels": 6.0 + 3.0 + 4.0, "warm-up": 4.0, "CUDA graphs": 1.0}
    assert times.total == 2.0 + 16.0


def test_a_process_knows_its_age() -> None:
    before = process_age()
    time.sleep(0.05)
    assert 0 < before < process_age() < 24 * 3600
