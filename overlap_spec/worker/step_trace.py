"""When the worker received, launched and published each step, and when the device worked on it, on the host's clock.

Steps leave points in the device's own time (`DeviceEvent`) as they are launched; all are turned into host time at the
end, so that nothing is asked of the device meanwhile.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch

from overlap_spec.messages import Phase
from overlap_spec.runtime.tracing import GPU, LAST_STEP_SPLIT, WORKER, Record, Recorder, Value
from overlap_spec.worker.devices import Device, DeviceEvent
from overlap_spec.worker.handle import DeviceTimes, HostTimes, StepHandle
from overlap_spec.worker.profile_marks import Marks, ProfileMarks

MOST_STEPS = 20_000  # older ones make room
REANCHOR_S = 1.0  # CUDA measures in float32 milliseconds: long distances lose microseconds
TRIES = 8
BEFORE_TOKENS, AFTER_TOKENS = "before tokens", "after tokens"
# What a step does until its tokens are out and after it, where marks do not tell more.
WHOLE = {Phase.DECODE: ("verify+accept", "extend+draft"), Phase.PREFILL: ("prefill", "draft's prefill")}


class StepTracer(Protocol):
    """Told of every step that has been launched."""

    def launched(self, handle: StepHandle) -> None:
        """Sync: never."""
        ...

    def finish(self) -> None:
        """Write down what was seen. Sync: waits for the device; nothing may follow."""
        ...


class NoStepTracer:
    """Sees nothing."""

    def launched(self, handle: StepHandle) -> None:
        pass

    def finish(self) -> None:
        pass


NO_TRACER = NoStepTracer()


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
    left_out: int  # slots whose masks were late


class DeviceClock:
    """The device's time in the host's: two references that both know, and what lies between them is in proportion."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._anchor, self._begin = _reference(device)
        self._anchor_s = 0.0  # device seconds since the first reference
        self._scale = 1.0

    def settle(self) -> None:
        """Take the second reference. Events are asked for after this, in the order of time."""
        event, at = _reference(self._device)
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


class DeviceTracer:
    """Keeps the newest steps until the end. Made while the device is idle, after the warm-up."""

    def __init__(self, trace: Recorder, device: Device, parts: ProfileMarks) -> None:
        self._trace = trace
        self._track = GPU if device.torch_device.type == "cuda" else WORKER  # a CPU's work is within its launch
        self._parts = parts
        self._clock = DeviceClock(device)
        self._seen: deque[Seen] = deque(maxlen=MOST_STEPS)
        parts.take()  # those of the warm-up

    def launched(self, handle: StepHandle) -> None:
        """See `StepTracer`."""
        plan = handle.plan
        sizes, marks = (len(plan.work), plan.width), self._parts.take()
        seen = Seen(plan.step_id, plan.phase, *sizes, handle.host, handle.device, marks, len(handle.left_out))
        self._seen.append(seen)

    def finish(self) -> None:
        """See `StepTracer`."""
        self._clock.settle()
        for seen in self._seen:
            self._add_host(seen)
            self._add_device(seen)
        last = self._seen[-1] if self._seen else None
        if last is not None and last.phase is Phase.DECODE and (split := self._parts.split(last.device)):
            self._trace.instant(LAST_STEP_SPLIT, last.step, **split)

    def _add_host(self, seen: Seen) -> None:
        host = seen.host
        self._add(WORKER, "plan received", host.received, host.received, seen.step)
        self._add(WORKER, "launch", host.launch_begin, host.launch_end, seen.step)
        if host.masks_end:
            self._add(WORKER, "masks of grammars", host.masks_begin, host.masks_end, seen.step)
        if host.published:
            self._add(WORKER, "result sent", host.published, host.published, seen.step)

    def _add_device(self, seen: Seen) -> None:
        """The step's parts, each ending where the next begins."""
        args: dict[str, Value] = {"phase": seen.phase.value, "batch": seen.batch, "width": seen.width}
        if seen.left_out:
            args["left_out"] = seen.left_out
        before, after = WHOLE[seen.phase]
        marks = dict(seen.marks)
        halves = [(seen.device.decided, "verify", "accept", before, BEFORE_TOKENS)]
        if seen.width > 1:
            halves.append((seen.device.end, "extend", "draft", after, AFTER_TOKENS))
        begin = self._clock.at(seen.device.begin)
        for end, first, second, whole, half in halves:
            middle = [(marks[first], first), (end, second)] if first in marks else [(end, whole)]
            for event, name in middle:
                at = max(self._clock.at(event), begin)
                self._add(self._track, name, begin, at, seen.step, args | {"part": half})
                begin = at

    def _add(
        self, track: str, name: str, begin: float, end: float, step: int, args: dict[str, Value] | None = None
    ) -> None:
        self._trace.add(Record(track, name, begin, end, step, args or {}))


def _reference(device: Device) -> tuple[DeviceEvent, float]:
    """An event and the host's time at it, off by at most half the quickest way there and back."""
    tries = []
    for _ in range(TRIES):
        before = time.monotonic()
        event = device.now()
        if device.torch_device.type == "cuda":
            torch.cuda.synchronize(device.torch_device)
        after = time.monotonic()
        tries.append((after - before, event, (before + after) / 2))
    _, event, at = min(tries, key=lambda entry: entry[0])
    return event, at
