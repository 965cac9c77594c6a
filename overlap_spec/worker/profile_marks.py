"""Marks inside a step, which show where its time goes. Off by default: `NO_MARKS` marks nothing.

Steps that are launched operation by operation record an event at every mark. A CUDA graph records its marks anew with
every replay, so only those of its last replay can be read, and only when nothing follows it.
"""

from typing import Protocol

import torch

from overlap_spec.worker.devices import CudaEvent, Device, DeviceEvent
from overlap_spec.worker.step import DeviceTimes

Marks = tuple[tuple[str, DeviceEvent], ...]
GraphMarks = tuple[tuple[str, torch.cuda.Event], ...]


class ProfileMarks(Protocol):
    """Receives the ends of a step's parts. `mark(name)` ends the part `name`."""

    def mark(self, name: str) -> None:
        """Sync: never."""
        ...

    def take(self) -> Marks:
        """What was marked since the last call, in a step that was launched operation by operation."""
        ...

    def captured(self) -> GraphMarks:
        """What was marked since the last call, in captures."""
        ...

    def replayed(self, marks: GraphMarks) -> None:
        """Say which captures are run."""
        ...

    def split(self, device: DeviceTimes) -> dict[str, float]:
        """Milliseconds of each part of the last step, if it was a replay; empty if nothing was marked."""
        ...


class NoMarks:
    """Marks nothing."""

    def mark(self, name: str) -> None:
        pass

    def take(self) -> Marks:
        return ()

    def captured(self) -> GraphMarks:
        return ()

    def replayed(self, marks: GraphMarks) -> None:
        pass

    def split(self, device: DeviceTimes) -> dict[str, float]:
        return {}


NO_MARKS = NoMarks()


class TimedMarks:
    """Marks on one device."""

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
        marks, self._marks = tuple(self._marks), []
        return marks

    def captured(self) -> GraphMarks:
        marks, self._captured = tuple(self._captured), []
        return marks

    def replayed(self, marks: GraphMarks) -> None:
        self._last = marks

    def split(self, device: DeviceTimes) -> dict[str, float]:
        """See `ProfileMarks`. Everything must have passed."""
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
