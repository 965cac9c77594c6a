"""Draws a few steps as text: when each was queued, ran and was settled.

queued   |   77777777   8888888      plan sent, work not begun
device   |66666666dd7777777dd8888    the step's digit until its tokens are out, then d while the draft runs
settled  |        6         7
"""

from collections.abc import Sequence

from overlap_spec.bench.step_summary import DECODE, PLAN, SETTLE, device_steps
from overlap_spec.messages import Record
from overlap_spec.runtime.tracing import SCHEDULER

WIDTH = 100  # columns
AFTER_TOKENS = "d"


class Row:
    """One line of characters over a span of time."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin = begin
        self._per_s = WIDTH / (end - begin)
        self._cells = [" "] * WIDTH

    def fill(self, begin: float, end: float, mark: str) -> None:
        """Write `mark` over a span, in at least one cell; parts outside the row are cut off."""
        first, last = (int((at - self._begin) * self._per_s) for at in (begin, end))
        for cell in range(max(first, 0), min(max(last, first + 1), WIDTH)):
            self._cells[cell] = mark

    def __str__(self) -> str:
        return "".join(self._cells).rstrip()


def decode_steps(records: Sequence[Record]) -> list[int]:
    """The ids of the decode steps, in order."""
    return [step for step, times in device_steps(records).items() if times.phase == DECODE]


def timeline(records: Sequence[Record], first_step: int, num_steps: int) -> str:
    """Draw `num_steps` steps from `first_step` on, which all must have run."""
    steps = device_steps(records)
    begin, end = steps[first_step].begin, steps[first_step + num_steps - 1].end
    queued, device, settled = (Row(begin, end) for _ in range(3))
    for step, times in steps.items():
        device.fill(times.begin, times.end, str(step % 10))
    for record in records:
        mark = str(record.step % 10)
        if record.track == SCHEDULER and record.name == PLAN and record.step in steps:
            queued.fill(record.end, max(steps[record.step].begin, record.end), mark)
        elif record.track == SCHEDULER and record.name == SETTLE:
            settled.fill(record.begin, record.begin, mark)
        elif record.args.get("part") == "after tokens":
            device.fill(record.begin, record.end, AFTER_TOKENS)
    lines = (("queued", queued), ("device", device), ("settled", settled))
    return "\n".join([f"{name:8} |{row}" for name, row in lines] + [f"{'':8} |{_scale(end - begin)}"])


def _scale(seconds: float) -> str:
    return f"0{f'{1000 * seconds:.1f} ms':>{WIDTH - 1}}"
