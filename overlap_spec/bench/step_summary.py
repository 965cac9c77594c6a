"""Summarises where the time of a decode step goes, from the records of a run.

A step begins when its first device work begins, and its period ends when the next step begins. The gap is the part of
a period without device work: the device waits for the host. Host work outside the gap is hidden.

A few steps are also drawn as text, with the last digit of each step's number:

    queued   |   77777777   8888888      plan sent, work not begun
    device   |66666666dd7777777dd8888    the step's digit until its tokens are out, then d while the draft runs
    settled  |        6         7
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from overlap_spec.messages import Record
from overlap_spec.runtime.tracing import SCHEDULER, TOKENIZER, WORKER

DECODE = "decode"  # `phase` of a device record
LAUNCH, PLAN, SETTLE = "launch", "plan", "settle"


@dataclass
class StepTimes:
    """One step's device work. Seconds; `parts` in the order of time. `phase`: of its last part."""

    phase: str
    begin: float
    end: float
    width: int = 0
    parts: dict[str, float] = field(default_factory=dict)


def device_steps(records: Iterable[Record]) -> dict[int, StepTimes]:
    """Every step's device work: the records that name a phase."""
    steps: dict[int, StepTimes] = {}
    for record in sorted(records, key=lambda record: record.begin):
        if record.step and "phase" in record.args:
            step = steps.get(record.step)
            if step is None:
                phase, width = str(record.args["phase"]), int(record.args["width"])
                step = steps[record.step] = StepTimes(phase, record.begin, record.end, width)
            step.phase = str(record.args["phase"])
            step.end = max(step.end, record.end)
            step.parts[record.name] = step.parts.get(record.name, 0.0) + record.end - record.begin
    return steps


def summarise(records: Sequence[Record], floor_s: float) -> dict[str, Any]:
    """Means over the decode steps that are followed by another one.

    `floor_s`: lower bound of a step's time, 0 if the machine's ceilings are unknown. Times are in milliseconds.
    `parts_ms` and `gap_ms` add up to `step_ms`; the host's times are concurrent with them.
    """
    steps = device_steps(records)
    pairs = [(step, steps[i + 1]) for i, step in steps.items() if step.phase == DECODE and _decodes(steps, i + 1)]
    if not pairs:
        return {"num_steps": 0}
    period = statistics.fmean(after.begin - step.begin for step, after in pairs)
    gap = statistics.fmean(after.begin - step.end for step, after in pairs)
    parts: dict[str, float] = defaultdict(float)
    for step, _ in pairs:
        for name, seconds in step.parts.items():
            parts[name] += seconds / len(pairs)
    host = _host(records, steps)
    return {
        "num_steps": len(pairs),
        "steps_by_width": {str(width): count for width, count in sorted(Counter(s.width for s, _ in pairs).items())},
        "step_ms": _ms(period),
        "parts_ms": {name: _ms(seconds) for name, seconds in parts.items()},
        "gap_ms": _ms(gap),
        "gap_share": round(gap / period, 4),
        "host_ms": {name: _ms(seconds) for name, seconds in host.items()},
        "host_hidden_ms": _ms(max(host["scheduler"] + host[LAUNCH] - gap, 0.0)),
        "queued_ahead": round(queued_ahead(records), 4),
        "floor_ms": _ms(floor_s) if floor_s else None,
        "efficiency": round(floor_s / period, 4) if floor_s else None,
    }


def queued_ahead(records: Sequence[Record]) -> float:
    """The share of decode steps whose plan was sent before the previous step's tokens were read."""
    steps = device_steps(records)
    spans = {(record.name, record.step): record for record in records if record.track == SCHEDULER}
    ahead = [
        plan.end <= spans[SETTLE, step - 1].begin
        for (name, step), plan in spans.items()
        if name == PLAN and (SETTLE, step - 1) in spans and _decodes(steps, step)
    ]
    return statistics.fmean(ahead) if ahead else 0.0


def _host(records: Sequence[Record], steps: dict[int, StepTimes]) -> dict[str, float]:
    """Mean seconds of each actor for a step. Device work inside a launch (on a CPU) does not count as host time."""
    spent: dict[str, float] = defaultdict(float)
    for record in records:
        if record.track == SCHEDULER:
            spent["scheduler"] += record.end - record.begin
        elif record.track == TOKENIZER:
            spent["tokenizer"] += record.end - record.begin
        elif record.track == WORKER and record.name == LAUNCH:
            spent[LAUNCH] += record.end - record.begin
        elif record.track == WORKER and "phase" in record.args:
            spent[LAUNCH] -= record.end - record.begin
    return {name: max(spent[name], 0.0) / len(steps) for name in ("scheduler", LAUNCH, "tokenizer")}


def _decodes(steps: dict[int, StepTimes], step: int) -> bool:
    return step in steps and steps[step].phase == DECODE


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 4)


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
