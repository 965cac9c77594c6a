"""What a step is laid out for, its launch, and what is launched: its tokens, the times of its stages, its marks."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, Protocol

import torch
from overlap_spec_kernels import Published, PublishedColumns
from torch import Tensor

from overlap_spec.messages import GuessReport, Rows, StepPlan, StepResult, TreePaths
from overlap_spec.sampling.stages import RowPacker
from overlap_spec.speculative.rows import ChunkPlace
from overlap_spec.worker.devices import Device, DeviceEvent, Download

ROWS = (16, 32, 64, 128, 256, 512)  # prompt tokens that are captured for
FINER_ROWS = (384, 640, 768, 896, 1024)  # and these, where 128 rows more take a millisecond or longer
FINER_BELOW = 4096  # rows of a captured step, at most, of a model that is so large
CHUNKS = 8  # requests in a captured step; one more chunk takes the rows that are left over
BATCH_ROWS = (512, 1024, 1536, 2048, 3072, 4096)  # of steps with more requests
BATCH_CHUNKS = 64
LONGEST = 1024  # rows of one request in such a step, and more than may be left over
READS_ALL = 256  # rows of a step, at most, that computes all of the last layer: its time is that of the weights
PADDING = -1  # of published runs
GraphMarks = tuple[tuple[str, torch.cuda.Event], ...]  # with the names of the parts that end there


@dataclass(frozen=True)
class PromptShape:
    """What a prefill step is laid out for. `max_rows` bounds the rows of one request."""

    rows: int
    chunks: int
    max_rows: int
    places: tuple[ChunkPlace, ...] = ()  # of all chunks, if it is exactly for them
    reads_last: bool = False  # what the last layer gives is read at each chunk's last row only
    are_drawn: bool = False  # the last rows of one chunk, which are computed as windows are

    @property
    def sizes(self) -> tuple[int, ...]:
        """Integers of each field, in order (`prefill.py`: `Chunks.laid_out`, `PromptInputs`)."""
        return (*[self.rows] * 4, *[self.chunks] * 5, self.chunks + 1, *[4] * self.are_drawn)


@dataclass(slots=True)
class HostTimes:
    """Readings of time.monotonic(), in seconds; 0 before the event."""

    received: float
    launch_begin: float
    launch_end: float = 0.0
    published: float = 0.0
    waited: float = 0.0  # seconds that the launch waited for what features wait for
    of_features: tuple[tuple[str, float, float], ...] = ()  # their work within the launch: name, begin, end


class DeviceTimes:
    """Points in the device's own time; each is set when the work before it has been enqueued."""

    __slots__ = ("begin", "decided", "end")

    begin: DeviceEvent
    decided: DeviceEvent  # tokens are out; what follows is the draft's
    end: DeviceEvent


class ProfileMarks(Protocol):
    """Receives the ends of a step's parts. `mark(name)` ends the part `name`."""

    def mark(self, name: str) -> None:
        """Sync: never."""

    def captured(self) -> GraphMarks:
        """What was marked since the last call, in captures."""

    def replayed(self, marks: GraphMarks) -> None:
        """Say which captures are run."""


class NoMarks:
    """Marks nothing."""

    def mark(self, name: str) -> None:
        pass

    def captured(self) -> GraphMarks:
        return ()

    def replayed(self, marks: GraphMarks) -> None:
        pass


NO_MARKS = NoMarks()


class StepHandle:
    """A launched step, or a part of one. Its tokens leave as soon as they are copied out, while the draft still works.

    `before`: the step before. Its draft works after its tokens have left, and that time counts as this step's.
    `is_last`: the step has no other part after it.
    """

    def __init__(self, plan: StepPlan, host: HostTimes, before: DeviceTimes | None, is_last: bool = True) -> None:
        self.plan = plan
        self.host = host
        self.is_last = is_last
        self.device = DeviceTimes()
        self.download: Download
        self.columns: PublishedColumns  # of what is downloaded
        self.packers: Sequence[RowPacker | None] = ()  # of outputs, in their order; empty where no slot asks for any
        self.num_outputs = 0  # that were written for tokens; those of prompts come after them
        self.caught_up = False
        self.left_out: dict[int, int] = {}  # rows that commit nothing in this step, and their slots
        self._before = before

    def leave_out(self, row: int) -> None:
        """A row of a decode step commits nothing, and its slot stays as it is. Before tokens are drawn."""
        self.left_out[row] = self.plan.slots[row]

    def copy_out(self, device: Device, published: Published, of_prompts: Sequence[Tensor]) -> None:
        """Begin to copy the rows of its slots, without padding, and outputs that are asked for. Sync: never."""
        self.columns, num_slots = published.columns, len(self.plan.rows)
        self.num_outputs, num_rows = len(published.outputs), num_slots * published.columns.longest
        outputs = [output[:num_rows] for output in published.outputs]
        self.download = device.download(published.rows[:num_slots], *outputs, *of_prompts)
        self.device.decided = self.download.done

    def ready(self) -> bool:
        """Whether the tokens are on the host."""
        return self.download.ready()

    def wait(self) -> StepResult:
        """Block until the tokens are on the host; at most once."""
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
            tuple(self._extensions(rows, tokens)),
            self.caught_up,
            self.is_last,
        )

    def tokens(self) -> list[list[int]]:
        """What was committed, without `NO_TOKEN`, once it is ready; may be asked before `wait` too."""
        return _drawn(self._runs(self.download.rows()))

    def _runs(self, rows: list[list[int]]) -> list[list[int]]:
        runs = _runs(rows, self.columns)
        for row in self.left_out:
            runs[row] = []
        return runs

    def _extensions(self, rows: list[list[int]], tokens: list[list[int]]) -> Iterator[Rows]:
        """What this kind of step gives beside its tokens."""
        columns = self.columns
        if columns.is_tree:
            yield _paths(rows, columns)
        if columns.is_self_drafting and (report := _guess_report(rows, columns)) is not None:
            yield report
        if self.packers:
            yield from self._outputs(_drawn(tokens))

    def _outputs(self, tokens: list[list[int]]) -> Iterator[Rows]:
        blocks: list[memoryview | None] = [*self.download.blocks()]
        of_tokens, of_prompts = blocks[: self.num_outputs], blocks[self.num_outputs :]
        for packer, *of_output in zip_longest(self.packers, of_tokens, of_prompts):
            found = None if packer is None else packer.pack(tokens, self.columns.longest, *of_output)
            if found is not None:
                yield found

    def _device_seconds(self) -> tuple[float, float]:
        """How long the device worked since the last step's tokens left, and how long it had nothing to do."""
        worked = self.device.decided.since(self.device.begin)
        before, self._before = self._before, None
        if before is None:
            return worked, 0.0
        return worked + before.end.since(before.decided), self.device.begin.since(before.end)


class Timeline:
    """Where steps begin and end on the device. `before`: the step whose work was enqueued last."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.before: DeviceTimes | None = None

    def begin(self) -> DeviceEvent:
        """Where a step begins: at the end of the one before, if the device is not there yet.

        An event of its own at the same place would take the device more than a microsecond.
        """
        before = self.before
        return self._device.now() if before is None or before.end.passed() else before.end

    def end(self, handle: StepHandle) -> tuple[DeviceEvent, float]:
        """All of a part is launched. Returns when, in the device's time and in the host's."""
        handle.device.end, handle.host.launch_end = self._device.now(), time.monotonic()
        self.before = handle.device
        return handle.device.end, handle.host.launch_end


def _runs(rows: list[list[int]], columns: PublishedColumns) -> list[list[int]]:
    """The tokens of each row, without the padding at their end."""
    tokens = columns.tokens
    return [run if run[-1] != PADDING else run[: run.index(PADDING)] for run in [row[tokens] for row in rows]]


def _drawn(runs: list[list[int]]) -> list[list[int]]:
    """Runs without `NO_TOKEN`."""
    return [[token for token in run if token >= 0] for run in runs]


def _paths(rows: list[list[int]], columns: PublishedColumns) -> TreePaths:
    path, last_guess = columns.path, columns.last_guess
    paths = [[column for column in row[path] if column >= 0] for row in rows]
    return TreePaths(paths, [row[last_guess] for row in rows])


def _guess_report(rows: list[list[int]], columns: PublishedColumns) -> GuessReport | None:
    """None where no slot had a guess."""
    of_guesses = columns.guess_report
    report = GuessReport(*map(list, zip(*(row[of_guesses] for row in rows), strict=True)))
    return report if any(report.levels) else None


def captured_rows(most_rows: int, batch_rows: int) -> tuple[int, ...]:
    """The sizes for few requests, ascending. `most_rows`: positions of a request; `batch_rows`: see `captured_shapes`.

    While requests decode, time cuts their steps to sizes between 256 and about 1,024 rows, and padding is lost.
    """
    finer = FINER_ROWS if batch_rows < FINER_BELOW else ()
    sizes = {*ROWS, *(rows for rows in finer if rows <= batch_rows)}
    return tuple(sorted(rows for rows in sizes if rows <= most_rows))


def captured_shapes(most_rows: int, batch_rows: int, num_slots: int, reads_last: bool = False) -> list[PromptShape]:
    """The sizes of captured steps, those for few requests first, each of these ascending.

    `batch_rows`: the most prompt tokens of a step with many requests: with more, the layers of the target take longer
    than their launches. `reads_last`: see `captured_shape`; of a large model.
    """
    reads_last &= batch_rows < FINER_BELOW
    few = [captured_shape(rows, CHUNKS, rows, reads_last) for rows in captured_rows(most_rows, batch_rows)]
    chunks = min(BATCH_CHUNKS, num_slots) + 1
    many = [captured_shape(rows, chunks - 1, LONGEST, reads_last) for rows in BATCH_ROWS if rows <= batch_rows]
    return few + many if chunks > CHUNKS + 1 and most_rows >= LONGEST else few


def captured_shape(num_rows: int, chunks: int, max_rows: int, reads_last: bool) -> PromptShape:
    """A size for so many rows and chunks, and a chunk for the rows that are left over.

    `reads_last`: of the last layer, no more than K and V of most rows is needed. Steps of many rows are captured so;
    those of which prompt log-probs are asked for are then launched operation by operation.
    """
    return PromptShape(num_rows, chunks + 1, max_rows, reads_last=reads_last and num_rows > READS_ALL)


def holds(shape: PromptShape, exact: PromptShape) -> bool:
    """Whether so many rows and chunks, one more for the rows that are left over, and what is read of them fit."""
    fits = exact.rows <= shape.rows and exact.chunks < shape.chunks and exact.max_rows <= shape.max_rows
    return fits and (exact.reads_last or not shape.reads_last) and exact.are_drawn == shape.are_drawn


class StepShape(NamedTuple):
    """What a step is laid out for: exactly for what it has, or for more, as what holds it was captured."""

    slots: int  # with a window; 0: it has prompts alone
    width: int  # of the windows, or of those that prompts propose; 0: the draft catches up, and no layers run
    columns: int  # of the windows' page tables
    prompts: PromptShape | None = None
    placed: bool = False  # windows are put at given places first, and nothing is proposed

    @property
    def has_both(self) -> bool:
        """Whether there are windows and prompts."""
        return self.slots > 0 and self.prompts is not None

    @property
    def prompt_rows(self) -> int:
        return 0 if self.prompts is None else self.prompts.rows


class Launch:
    """A step that is being launched; `handles` are of its parts, in order. Call `advance` until it returns True."""

    def __init__(self, mode: torch.inference_mode, waits: Iterator[Callable[[], bool]], *handles: StepHandle) -> None:
        self._mode = mode
        self.handle = handles[0]
        self.handles = handles
        self._waits = waits
        self._wait: Callable[[], bool] | None = None
        self._since = 0.0

    def advance(self) -> bool:
        """Enqueue as much as can be. Returns whether all of it is. Sync: never. Raises: what the step raises."""
        if self._wait is not None and not self._wait():
            return False
        if self._wait is not None:
            self.handle.host.waited += time.monotonic() - self._since
        with self._mode:
            for wait in self._waits:
                if not wait():
                    self._wait, self._since = wait, time.monotonic()
                    return False
        return True
