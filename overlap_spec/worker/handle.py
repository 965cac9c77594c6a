"""A launched step: its tokens, and the times of its stages."""

import time
from array import array
from dataclasses import dataclass
from typing import TypedDict

from overlap_spec_kernels import PublishedColumns

from overlap_spec.messages import Phase, StepPlan, StepResult
from overlap_spec.worker.devices import DeviceEvent, Download
from overlap_spec.worker.log_probs import NOT_SCORED, LogProbColumns

PADDING = -1  # of published runs


@dataclass(slots=True)
class HostTimes:
    """Readings of time.monotonic(), in seconds; 0 before the event."""

    received: float
    launch_begin: float
    launch_end: float = 0.0
    published: float = 0.0
    waited: float = 0.0  # seconds that the launch waited for tokens, windows or masks of grammars
    masks_begin: float = 0.0
    masks_end: float = 0.0


class DeviceTimes:
    """Points in the device's own time; each is set when the work before it has been enqueued."""

    __slots__ = ("begin", "decided", "end")

    begin: DeviceEvent
    decided: DeviceEvent  # tokens are out; what follows is the draft's
    end: DeviceEvent


class StepHandle:
    """A launched step. Its tokens leave as soon as they are copied out, while the draft still works.

    `before`: the step before. Its draft works after its tokens have left, and that time counts as this step's.
    """

    def __init__(self, plan: StepPlan, host: HostTimes, before: DeviceTimes | None) -> None:
        self.plan = plan
        self.host = host
        self.device = DeviceTimes()
        self.download: Download
        self.columns: PublishedColumns  # of what is downloaded
        self.scored = NOT_SCORED
        self.left_out: dict[int, int] = {}  # rows whose masks were late, and their slots: they commit nothing
        self._before = before

    def ready(self) -> bool:
        """Whether the tokens are on the host."""
        return self.download.ready()

    def wait(self) -> StepResult:
        """Block until the tokens are on the host; at most once a step."""
        rows, columns = self.download.rows(), self.columns
        gpu_time, gpu_gap = self._device_seconds()
        launch_time = (self.host.launch_end or time.monotonic()) - self.host.launch_begin - self.host.waited
        self.host.published = time.monotonic()
        tokens = self._runs(rows)
        num_guesses = columns.num_guesses  # looked up once, not for every row
        return StepResult(
            self.plan.step_id,
            tokens,
            [row[num_guesses] for row in rows],
            gpu_time,
            gpu_gap,
            launch_time if self.download.asynchronous else 0.0,
            **_width_columns(rows, columns),
            leads=_leads(rows) if self.plan.audit and self.plan.phase is Phase.DECODE else [],
            **self._log_probs(),
        )

    def tokens(self) -> list[list[int]]:
        """What the step committed, without `NO_TOKEN`, once it is ready; may be asked before `wait` too."""
        return [[token for token in run if token >= 0] for run in self._runs(self.download.rows())]

    def _runs(self, rows: list[list[int]]) -> list[list[int]]:
        runs = _runs(rows, self.columns)
        for row in self.left_out:
            runs[row] = []
        return runs

    def _log_probs(self) -> LogProbColumns:
        if not self.scored.asked:
            return LogProbColumns()
        return self.scored.columns(self.download.blocks(), self.tokens(), self.columns.longest)

    def _device_seconds(self) -> tuple[float, float]:
        """How long the device worked since the last step's tokens left, and how long it had nothing to do."""
        worked = self.device.decided.since(self.device.begin)
        before, self._before = self._before, None
        if before is None:
            return worked, 0.0
        return worked + before.end.since(before.decided), self.device.begin.since(before.end)


def _runs(rows: list[list[int]], columns: PublishedColumns) -> list[list[int]]:
    """The tokens of each row, without the padding at their end."""
    tokens = columns.tokens
    return [run if run[-1] != PADDING else run[: run.index(PADDING)] for run in [row[tokens] for row in rows]]


def _leads(rows: list[list[int]]) -> list[float]:
    """The last column of an audit's rows, whose bits are a float64's."""
    return list(array("d", array("q", (row[-1] for row in rows)).tobytes()))


class WidthColumns(TypedDict, total=False):
    """The columns of a `StepResult` that help to choose widths."""

    paths: list[list[int]]
    last_guesses: list[int]
    levels: list[int]
    strengths: list[int]
    next_columns: list[int]


def _width_columns(rows: list[list[int]], columns: PublishedColumns) -> WidthColumns:
    """The columns that this kind of step publishes."""
    found = WidthColumns()
    if columns.is_tree:
        path, last_guess = columns.path, columns.last_guess
        found["paths"] = [[column for column in row[path] if column >= 0] for row in rows]
        found["last_guesses"] = [row[last_guess] for row in rows]
    if columns.is_self_drafting:
        lookahead = columns.lookahead
        levels, strengths, next_columns = map(list, zip(*(row[lookahead] for row in rows), strict=True))
        if any(levels):
            found["levels"], found["strengths"], found["next_columns"] = levels, strengths, next_columns
    return found
