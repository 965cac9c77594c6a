"""A launched step: its tokens, and when what happened to it."""

import time
from dataclasses import dataclass

from overlap_spec.messages import StepPlan, StepResult
from overlap_spec.worker.devices import DeviceEvent, Download

LOOKAHEAD_SHIFT = 8  # bits of the published number of guesses; above it there is the lookahead, where a method has one


@dataclass(slots=True)
class HostTimes:
    """Readings of time.monotonic(), in seconds. 0: not yet."""

    received: float
    launch_begin: float
    launch_end: float = 0.0
    published: float = 0.0


class DeviceTimes:
    """Points in the device's own time; each is set when the work before it has been enqueued."""

    __slots__ = ("begin", "decided", "end")

    begin: DeviceEvent
    decided: DeviceEvent  # tokens are out; what follows is the draft's
    end: DeviceEvent


class StepHandle:
    """A launched step. Its tokens leave as soon as they are copied out, while the draft still works.

    `before`: the step before; what the device did after its tokens left is accounted to this one.
    """

    def __init__(self, plan: StepPlan, host: HostTimes, before: DeviceTimes | None) -> None:
        self.plan = plan
        self.host = host
        self.device = DeviceTimes()
        self.download: Download
        self.has_paths = False  # whether the last but one of a row's numbers is a path, as windows of trees have
        self._before = before

    def ready(self) -> bool:
        """Whether the tokens are on the host."""
        return self.download.ready()

    def wait(self) -> StepResult:
        """Block until the tokens are on the host; at most once a step."""
        rows = self.download.rows()
        num_columns = -2 if self.has_paths else -1
        tokens = [[token for token in row[:num_columns] if token >= 0] for row in rows]
        gpu_time, gpu_gap = self._device_seconds()
        launch_time = (self.host.launch_end or time.monotonic()) - self.host.launch_begin
        self.host.published = time.monotonic()
        return StepResult(
            self.plan.step_id,
            tokens,
            [row[-1] & (1 << LOOKAHEAD_SHIFT) - 1 for row in rows],
            gpu_time,
            gpu_gap,
            launch_time if self.download.asynchronous else 0.0,
            [row[-1] >> LOOKAHEAD_SHIFT for row in rows] if any(row[-1] >> LOOKAHEAD_SHIFT for row in rows) else [],
            [row[-2] for row in rows] if self.has_paths else [],
        )

    def _device_seconds(self) -> tuple[float, float]:
        """How long the device worked since the last step's tokens left, and how long it had nothing to do."""
        worked = self.device.decided.since(self.device.begin)
        before, self._before = self._before, None
        if before is None:
            return worked, 0.0
        return worked + before.end.since(before.decided), self.device.begin.since(before.end)
