"""When the worker received, launched and published each step, and when the device worked on it, on the host's clock.

Steps leave points in the device's own time (`DeviceEvent`) as they are launched. `DeviceTracer` turns all into host
time at the end, so that nothing is asked of the device meanwhile. `LiveTracer` tells of the newest steps while it is
asked, and never waits for the device: the two clocks meet where the host saw a step's tokens.

Marks inside a step show where its time goes. Steps that are launched operation by operation record an event at every
mark. A CUDA graph records its marks anew with every replay, so only those of its last replay can be read, and only when
nothing follows it.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from overlap_spec.messages import Phase, Record, Value
from overlap_spec.runtime.tracing import CLOCK_ERROR, GPU, LAST_STEP_SPLIT, WORKER, Recorder
from overlap_spec.worker.build import Parts
from overlap_spec.worker.devices import CudaEvent, Device, DeviceEvent
from overlap_spec.worker.hooks import StepHook
from overlap_spec.worker.step import DeviceTimes, GraphMarks, HostTimes, StepHandle

Marks = tuple[tuple[str, DeviceEvent], ...]
TimeOf = Callable[[DeviceEvent], float]  # time.monotonic() at which the device came to it

MOST_STEPS = 20_000  # older ones make room
MOST_LIVE_STEPS = 128  # between two questions: an answer takes the worker a millisecond at most
REANCHOR_S = 1.0  # CUDA measures in float32 milliseconds: long distances lose microseconds
LEAST_TRIES, MOST_TRIES = 8, 64  # where others use the device too, most of them wait for their turn
TRIES_S = 0.5  # after which the least number will do: a process that is to end has not much time
BEFORE_TOKENS, AFTER_TOKENS = "before tokens", "after tokens"
# What a step does until its tokens are out and after it, where marks do not tell more.
WHOLE = {Phase.DECODE: ("verify+accept", "extend+draft"), Phase.PREFILL: ("prefill", "draft's prefill")}


def attach(parts: Parts) -> StepHook | None:
    """All steps for files of traces, or the newest ones while someone watches. Of several ranks, rank 0 tells."""
    if parts.rank:
        return None
    if parts.settings.trace_dir is not None:
        return DeviceTracer(parts.device)
    return LiveTracer(parts.device) if parts.settings.watched else None


class TimedMarks:
    """Marks on one device: `ProfileMarks`, and what they have found."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._on_cuda = device.torch_device.type == "cuda"
        self._marks: list[tuple[str, DeviceEvent]] = []
        self._captured: list[tuple[str, torch.cuda.Event]] = []
        self._last: GraphMarks = ()

    def mark(self, name: str) -> None:
        if self._on_cuda and torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True, external=True)  # a node of the graph
            event.record()
            self._captured.append((name, event))
        else:
            self._marks.append((name, self._device.now()))

    def take(self) -> Marks:
        """What was marked since the last call, in a step that was launched operation by operation."""
        marks, self._marks = tuple(self._marks), []
        return marks

    def captured(self) -> GraphMarks:
        marks, self._captured = tuple(self._captured), []
        return marks

    def replayed(self, marks: GraphMarks) -> None:
        self._last = marks

    def split(self, device: DeviceTimes) -> dict[str, float]:
        """Milliseconds of each part of the last step, if it was a replay; else empty. Everything must have passed."""
        if not self._last:
            return {}
        events = dict(self._last)
        begin, decided, end = (_event(event) for event in (device.begin, device.decided, device.end))
        parts = {"verify": begin.elapsed_time(events["verify"]), "accept": events["verify"].elapsed_time(decided)}
        if "extend" in events:
            parts["extend"] = decided.elapsed_time(events["extend"])
            parts["draft"] = events["extend"].elapsed_time(end)
        return parts


def _event(event: DeviceEvent) -> torch.cuda.Event:
    assert isinstance(event, CudaEvent), "graphs run on CUDA"
    return event.event


@dataclass(frozen=True, slots=True)
class Seen:
    """What is kept of a step."""

    step: int
    phase: Phase
    batch: int
    width: int
    host: HostTimes
    device: DeviceTimes
    marks: Marks
    left_out: int  # slots that took no part

    @classmethod
    def of(cls, handle: StepHandle, marks: Marks) -> "Seen":
        """Of a step that has been launched."""
        plan = handle.plan
        sizes = len(plan.rows), plan.width
        return cls(plan.step_id, plan.phase, *sizes, handle.host, handle.device, marks, len(handle.left_out))


class DeviceClock:
    """The device's time in the host's: two references that both know, and what lies between them is in proportion.

    `error_s`: by which it may be off, at most; of both references, once it is settled.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._anchor, self._begin, self.error_s = _reference(device)
        self._anchor_s = 0.0  # device seconds since the first reference
        self._scale = 1.0

    def settle(self) -> None:
        """Take the second reference. Events are asked for after this, in the order of time."""
        event, at, error_s = _reference(self._device)
        self.error_s = max(self.error_s, error_s)
        elapsed = event.since(self._anchor)
        if elapsed > REANCHOR_S:
            self._scale = (at - self._begin) / elapsed

    def at(self, event: DeviceEvent) -> float:
        """Seconds of time.monotonic()."""
        since = event.since(self._anchor)
        seconds = self._anchor_s + since
        if since > REANCHOR_S:
            self._anchor, self._anchor_s = event, seconds
        return self._begin + seconds * self._scale


class StepRecords:
    """Writes down steps, once the device has done them."""

    def __init__(self, trace: Recorder, device: Device) -> None:
        self._trace = trace
        self._track = GPU if device.torch_device.type == "cuda" else WORKER  # a CPU's work is within its launch

    def add(self, seen: Seen, at: TimeOf) -> None:
        self._add_host(seen)
        self._add_device(seen, at)

    def _add_host(self, seen: Seen) -> None:
        host = seen.host
        self._add(WORKER, "plan received", host.received, host.received, seen.step)
        self._add(WORKER, "launch", host.launch_begin, host.launch_end, seen.step)
        for name, begin, end in host.of_features:
            self._add(WORKER, name, begin, end, seen.step)
        if host.published:
            self._add(WORKER, "result sent", host.published, host.published, seen.step)

    def _add_device(self, seen: Seen, at: TimeOf) -> None:
        """The step's parts, each ending where the next begins."""
        args: dict[str, Value] = {"phase": seen.phase.value, "batch": seen.batch, "width": seen.width}
        if seen.left_out:
            args["left_out"] = seen.left_out
        before, after = WHOLE[seen.phase]
        marks = dict(seen.marks)
        halves = [(seen.device.decided, "verify", "accept", before, BEFORE_TOKENS)]
        if seen.width > 1:
            halves.append((seen.device.end, "extend", "draft", after, AFTER_TOKENS))
        begin = at(seen.device.begin)
        for end, first, second, whole, half in halves:
            middle = [(marks[first], first), (end, second)] if first in marks else [(end, whole)]
            for event, name in middle:
                passed = max(at(event), begin)
                self._add(self._track, name, begin, passed, seen.step, args | {"part": half})
                begin = passed

    def _add(
        self, track: str, name: str, begin: float, end: float, step: int, args: dict[str, Value] | None = None
    ) -> None:
        self._trace.add(Record(track, name, begin, end, step, args or {}))


class DeviceTracer(StepHook):
    """Keeps the newest steps until the end."""

    def __init__(self, device: Device) -> None:
        self.marks: TimedMarks = TimedMarks(device)
        self._device = device
        self._trace: Recorder
        self._records: StepRecords
        self._clock: DeviceClock
        self._seen: deque[Seen] = deque(maxlen=MOST_STEPS)

    def serves(self, trace: Recorder) -> None:
        """The device is idle, so that its clock can be read."""
        self._trace, self._records, self._clock = trace, StepRecords(trace, self._device), DeviceClock(self._device)
        self.marks.take()  # those of the warm-up

    def launched(self, handle: StepHandle) -> None:
        self._seen.append(Seen.of(handle, self.marks.take()))

    def close(self) -> None:
        """Write down what was seen. Sync: waits for the device; nothing may follow."""
        self._clock.settle()
        for seen in self._seen:
            self._records.add(seen, self._clock.at)
        self._trace.instant(CLOCK_ERROR, ms=round(1000 * self._clock.error_s, 4))
        last = self._seen[-1] if self._seen else None
        if last is not None and last.phase is Phase.DECODE and (split := self.marks.split(last.device)):
            self._trace.instant(LAST_STEP_SPLIT, last.step, **split)


class LiveTracer(StepHook):
    """Keeps the newest steps while the engine is watched."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._trace: Recorder
        self._records: StepRecords
        self._seen: deque[Seen] = deque(maxlen=MOST_LIVE_STEPS)

    def serves(self, trace: Recorder) -> None:
        self._trace, self._records = trace, StepRecords(trace, self._device)

    def launched(self, handle: StepHandle) -> None:
        if self._trace.is_on and self._trace.now():
            self._seen.append(Seen.of(handle, ()))

    def watched(self, seconds: float) -> None:
        """Tells of the steps since the last question that are done."""
        if not seconds:
            return
        if not self._trace.is_on:
            self._seen.clear()  # of long ago: the device's time is not told so far back
        self._trace.watch(seconds)
        done = []
        while self._seen and self._seen[0].host.published and self._seen[0].device.end.passed():
            done.append(self._seen.popleft())
        if done:
            at = _time_by_tokens(done)
            for seen in done:
                self._records.add(seen, at)


def _time_by_tokens(done: Sequence[Seen]) -> TimeOf:
    """Device time in the host's: tokens were out at most as late as the host saw them, and once hardly earlier."""
    first = done[0].device.begin
    begin = min(seen.host.published - seen.device.decided.since(first) for seen in done)
    return lambda event: begin + event.since(first)


def _reference(device: Device) -> tuple[DeviceEvent, float, float]:
    """An event, the host's time at it, and by how much that may be off: half the quickest way there and back."""
    tries: list[tuple[DeviceEvent, float, float]] = []
    ends = time.monotonic() + TRIES_S
    while len(tries) < LEAST_TRIES or len(tries) < MOST_TRIES and time.monotonic() < ends:
        before = time.monotonic()
        event = device.now()
        if device.torch_device.type == "cuda":
            torch.cuda.synchronize(device.torch_device)
        after = time.monotonic()
        tries.append((event, (before + after) / 2, (after - before) / 2))
    return min(tries, key=lambda entry: entry[2])
