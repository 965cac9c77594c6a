"""The worker's part of a trace, with a device whose clock runs wrong by a known amount."""

import itertools
import time
from pathlib import Path

import pytest
import torch
from support.plans import SlotPart, plan_of

from overlap_spec.features.tracing import worker as trace
from overlap_spec.features.tracing.worker import MOST_LIVE_STEPS, DeviceClock, DeviceTracer, LiveTracer
from overlap_spec.messages import Phase
from overlap_spec.runtime.tracing import CLOCK_ERROR, WORKER, LiveTrace, Record, Trace, read_records
from overlap_spec.worker.step import DeviceTimes, HostTimes, StepHandle

DRIFT = 1.0001


class Reading:
    """A reading of the wrong clock."""

    is_past = True

    def __init__(self, at: float) -> None:
        self.at = at

    def since(self, earlier: "Reading") -> float:
        return self.at - earlier.at

    def passed(self) -> bool:
        return self.is_past


class WrongClock:
    """Its zero is elsewhere, and its seconds are too short."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.host = 1000.0

    def at(self, host: float) -> Reading:
        return Reading(77.0 + (host - 1000.0) * DRIFT)

    def now(self) -> Reading:
        return self.at(self.host)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> WrongClock:
    device = WrongClock()
    monkeypatch.setattr(trace.time, "monotonic", lambda: device.host)
    return device


def test_device_time_becomes_host_time(device: WrongClock) -> None:
    clock = DeviceClock(device)
    device.host += 100.0
    clock.settle()
    for host in (1000.5, 1003.0, 1003.001, 1050.0, 1099.9):
        assert clock.at(device.at(host)) == pytest.approx(host, abs=1e-9)


def test_the_clock_tells_by_how_much_it_may_be_off(device: WrongClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come some time after a question, and the reading is of the moment of the question."""

    def answers_after(*ways_s: float) -> None:
        ways = itertools.cycle(ways_s)

        def read() -> Reading:
            reading = device.at(device.host)
            device.host += next(ways)
            return reading

        monkeypatch.setattr(device, "now", read)

    answers_after(70e-6, 90e-6, 10e-6, 50e-6)
    clock = DeviceClock(device)
    assert clock.error_s == pytest.approx(5e-6, abs=1e-9)
    device.host += 100.0
    answers_after(60e-6, 40e-6)
    clock.settle()
    assert clock.error_s == pytest.approx(20e-6, abs=1e-9)
    for host, off_s in ((1001.0, 5e-6), (1050.0, 12.5e-6), (1099.0, 20e-6)):
        assert clock.at(device.at(host)) - host == pytest.approx(off_s, abs=0.5e-6)


def times(device: WrongClock, begin: float, decided: float, end: float) -> DeviceTimes:
    found = DeviceTimes()
    found.begin, found.decided, found.end = (device.at(host) for host in (begin, decided, end))
    return found


def launched(device: WrongClock, phase: Phase, width: int) -> StepHandle:
    tokens = b"1234" if phase is Phase.PREFILL else b""
    plan = plan_of(9, [SlotPart(0, tokens=tokens), SlotPart(1, tokens=tokens)], width)
    handle = StepHandle(plan, HostTimes(1001.0, 1001.1, 1001.2, 1001.4), None)
    handle.device = times(device, 1001.2, 1001.3, 1001.5)
    return handle


def written(device: WrongClock, tmp_path: Path, handle: StepHandle, marked: bool = False) -> list[Record]:
    recorder, tracer = Trace(WORKER, tmp_path), DeviceTracer(device)
    tracer.serves(recorder)
    if marked:
        for name, host in (("verify", 1001.25), ("extend", 1001.4)):
            device.host = host
            tracer.marks.mark(name)
    tracer.launched(handle)
    device.host = 1010.0
    tracer.close()
    recorder.write()
    *records, error = read_records(tmp_path)
    assert (error.name, error.args) == (CLOCK_ERROR, {"ms": 0.0}), "the device answers at once"
    return records


def spans(records: list[Record]) -> list[tuple[str, float, float]]:
    return [(record.name, round(record.begin, 6), round(record.end, 6)) for record in records]


def test_a_step_in_two_halves(device: WrongClock, tmp_path: Path) -> None:
    records = written(device, tmp_path, launched(device, Phase.DECODE, 4))
    assert spans(records) == [
        ("plan received", 1001.0, 1001.0),
        ("launch", 1001.1, 1001.2),
        ("verify+accept", 1001.2, 1001.3),
        ("extend+draft", 1001.3, 1001.5),
        ("result sent", 1001.4, 1001.4),
    ]
    assert {record.step for record in records} == {9} and {record.track for record in records} == {WORKER}
    assert records[2].args == {"phase": "decode", "batch": 2, "width": 4, "part": "before tokens"}


def test_marks_cut_the_halves(device: WrongClock, tmp_path: Path) -> None:
    handle = launched(device, Phase.DECODE, 4)
    device_spans = [r for r in written(device, tmp_path, handle, marked=True) if "phase" in r.args]
    assert spans(device_spans) == [
        ("verify", 1001.2, 1001.25),
        ("accept", 1001.25, 1001.3),
        ("extend", 1001.3, 1001.4),
        ("draft", 1001.4, 1001.5),
    ]


def test_a_plain_step_drafts_nothing_and_a_prefill_is_named_so(device: WrongClock, tmp_path: Path) -> None:
    cases = ((Phase.DECODE, 1, ["verify+accept"]), (Phase.PREFILL, 4, ["prefill", "draft's prefill"]))
    for phase, width, want in cases:
        records = written(device, tmp_path, launched(device, phase, width))
        assert [record.name for record in records if "phase" in record.args] == want


def test_marks_of_the_warm_up_are_nobodys(device: WrongClock, tmp_path: Path) -> None:
    tracer = DeviceTracer(device)
    tracer.marks.mark("verify")
    tracer.serves(Trace(WORKER, tmp_path))
    assert tracer.marks.take() == ()


def test_who_watches_is_told_of_steps_that_are_done(device: WrongClock) -> None:
    recorder = LiveTrace(WORKER, lambda: device.host)
    tracer = LiveTracer(device)
    tracer.serves(recorder)
    tracer.launched(launched(device, Phase.DECODE, 4))  # before the first question
    device.host = 1001.0
    tracer.watched(5.0)
    assert recorder.take() == []
    late, prompt, running = (launched(device, Phase.DECODE, 4) for _ in range(3))
    prompt.host.published = 1001.3  # as soon as its tokens were out: this one tells the device's time
    running.device.end.is_past = False
    for handle in (late, prompt, running):
        tracer.launched(handle)
    tracer.watched(0.0)
    assert recorder.take() == []
    tracer.watched(5.0)
    told = recorder.take()
    assert [(name, round(begin, 4), round(end, 4)) for name, begin, end in spans(told[:5])] == [
        ("plan received", 1001.0, 1001.0),
        ("launch", 1001.1, 1001.2),
        ("result sent", 1001.4, 1001.4),
        ("verify+accept", 1001.2, 1001.3),
        ("extend+draft", 1001.3, 1001.5),
    ]
    assert len(told) == 10
    running.device.end.is_past = True
    tracer.watched(5.0)
    assert len(recorder.take()) == 5
    for _ in range(3 * MOST_LIVE_STEPS):
        tracer.launched(launched(device, Phase.DECODE, 4))
    tracer.watched(5.0)
    assert len(recorder.take()) == 5 * MOST_LIVE_STEPS
    device.host = 1007.0
    tracer.launched(launched(device, Phase.DECODE, 4))
    assert not recorder.is_on, "the last question was long ago"


def test_a_watch_that_begins_again_tells_nothing_of_the_last_one(device: WrongClock) -> None:
    recorder = LiveTrace(WORKER, lambda: device.host)
    tracer = LiveTracer(device)
    tracer.serves(recorder)
    device.host = 1001.0
    tracer.watched(5.0)
    tracer.launched(launched(device, Phase.DECODE, 4))
    device.host = 1020.0
    tracer.launched(launched(device, Phase.DECODE, 4))
    tracer.watched(5.0)
    tracer.watched(5.0)
    assert recorder.take() == []


def test_the_cpus_clock_is_the_hosts() -> None:
    """`CpuEvent` reads perf_counter; the trace is in time.monotonic()."""
    before, between, after = time.monotonic(), time.perf_counter(), time.monotonic()
    assert before - 0.001 <= between <= after + 0.001, "however long a busy host takes from one to the next"
