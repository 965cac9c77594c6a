"""Runs a decode workload with all processes traced: where a step's time goes, and a trace file to view.

Tracing is always on; the records kept are those of one batch of requests, after a warm-up of the same batch.

**The summary.** A step begins when its first device work begins, and its period ends when the next step begins. The gap
is the part of a period without device work: the device waits for the host. Host work outside the gap is hidden. A few
steps are also drawn as text, with the last digit of each step's number:

    queued   |   77777777   8888888      plan sent, work not begun
    device   |66666666dd7777777dd8888    the step's digit until its tokens are out, then d while the draft runs
    settled  |        6         7

**The trace** is Chrome's, which chrome://tracing and ui.perfetto.dev open. There is one track per actor and one
for the GPU, in microseconds since the first record. An arrow follows a step from its plan through its launch and its
device work to its tokens. At depth 2 the arrow begins while the previous step runs.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from overlap_spec.bench.latency import accept_length, settled_stats
from overlap_spec.bench.report import acceptance_of, describe_engine, describe_settings
from overlap_spec.bench.workload import Workload, batch_prompts
from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.messages import Record, SamplingParams, Stats
from overlap_spec.runtime.tracing import CLOCK_ERROR, FRONTEND, LAST_STEP_SPLIT, SCHEDULER, TRACKS, WORKER, read_records

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
        elif record.track == FRONTEND:
            spent["frontend"] += record.end - record.begin
        elif record.track == WORKER and record.name == LAUNCH:
            spent[LAUNCH] += record.end - record.begin
        elif record.track == WORKER and "phase" in record.args:
            spent[LAUNCH] -= record.end - record.begin
    return {name: max(spent[name], 0.0) / len(steps) for name in ("scheduler", LAUNCH, "frontend")}


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


PROCESS = 1
Event = dict[str, Any]


def write_trace(path: str, records: Sequence[Record], about: dict[str, Any]) -> None:
    """Write the file, with `about` as metadata."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    trace = {"traceEvents": events(records), "displayTimeUnit": "ms", "otherData": about}
    Path(path).write_text(json.dumps(trace, separators=(",", ":")) + "\n")


def events(records: Sequence[Record]) -> list[Event]:
    """Names of the tracks, then all spans by start time; of two with the same start, the longer first."""
    ordered = sorted(records, key=lambda record: (record.begin, -record.end))
    start = ordered[0].begin if ordered else 0.0
    happened = [*(_event(record, start) for record in ordered), *_arrows(ordered, start)]
    return [*_names(ordered), *sorted(happened, key=lambda event: (event["ts"], event["ph"] in "stf"))]


def _names(records: Sequence[Record]) -> Iterator[Event]:
    used = {record.track for record in records}
    yield _metadata(0, "process_name", {"name": "overlap-spec"})
    for number, track in enumerate(TRACKS, 1):
        if track in used:
            yield _metadata(number, "thread_name", {"name": track})
            yield _metadata(number, "thread_sort_index", {"sort_index": number})


def _metadata(thread: int, name: str, args: dict[str, str | int]) -> Event:
    return {"ph": "M", "pid": PROCESS, "tid": thread, "name": name, "args": args}


def _event(record: Record, start: float) -> Event:
    step = {"step": record.step} if record.step else {}
    event = _place(record, start) | {"name": f"{record.name} {record.step}" if record.step else record.name}
    event["args"] = step | record.args
    if record.begin == record.end:
        return event | {"ph": "i", "s": "t"}
    return event | {"ph": "X", "dur": _micros(record.end - record.begin)}


def _arrows(records: Sequence[Record], start: float) -> Iterator[Event]:
    """Arrows through the spans of each step in order of time; of its device work only through the first span."""
    steps: dict[int, dict[tuple[str, str], Record]] = {}
    for record in records:
        if record.step and record.end > record.begin:
            kind = "device" if "phase" in record.args else record.name
            steps.setdefault(record.step, {}).setdefault((record.track, kind), record)
    for step, spans in steps.items():
        way = list(spans.values())
        for i, record in enumerate(way if len(way) > 1 else []):
            phase = {"ph": "s"} if i == 0 else {"ph": "f", "bp": "e"} if i == len(way) - 1 else {"ph": "t"}
            yield _place(record, start) | phase | {"name": "step", "cat": "step", "id": step}


def _place(record: Record, start: float) -> Event:
    return {"pid": PROCESS, "tid": TRACKS.index(record.track) + 1, "ts": _micros(record.begin - start)}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class TracedRun:
    """One run's report and its records, by time."""

    report: dict[str, Any]
    records: list[Record]


async def run_step(config: EngineConfig, workload: Workload, trace: str | None) -> dict[str, Any]:
    """Run the first batch size of the workload; write its trace to the file `trace`. Returns the report."""
    run = await traced_run(config, workload)
    if trace is not None:
        about = {"run": run.report["run"], "settings": run.report["settings"], "step": run.report["step"]}
        await asyncio.to_thread(write_trace, trace, run.records, about)
    return run.report


async def traced_run(config: EngineConfig, workload: Workload) -> TracedRun:
    """Start the engine, run the workload, stop the engine, and read the records of its processes."""
    batch = workload.batch_sizes[0]
    config = replace(config, max_running_requests=config.max_running_requests or batch)
    with tempfile.TemporaryDirectory(prefix="overlap-spec-trace-") as directory:
        async with Engine(config, trace_dir=Path(directory)) as engine:
            prompts = batch_prompts(config, workload, engine.settings.model.files.vocab_size)
            await _generate(engine, prompts, WARM_UP_TOKENS, workload.temperature)
            await engine.client.flush_cache()  # otherwise the trace has no prefill
            before = await settled_stats(engine.client)
            begin = time.monotonic()
            num_tokens = await _generate(engine, prompts, workload.num_tokens, workload.temperature)
            wall_s = time.monotonic() - begin
            after = await settled_stats(engine.client)
            report: dict[str, Any] = {"benchmark": "step", "run": describe_engine(engine)}
            report |= {"acceptance": acceptance_of(engine), "workload": workload.describe() | {"batch": batch}}
            report["settings"] = describe_settings(engine)
            report["ceilings"] = engine.facts.worker.ceilings
        everything = read_records(Path(directory))
    records = [record for record in everything if begin <= record.begin <= begin + wall_s]
    figures = {
        "tokens_per_second": round(num_tokens / wall_s, 1),
        "accept_length": round(accept_length(before, after), 3),
        **summarise(records, _floor(before, after)),
    }
    if errors := [record.args["ms"] for record in everything if record.name == CLOCK_ERROR]:
        figures["clock_error_ms"] = errors[-1]
    if splits := [record.args for record in everything if record.name == LAST_STEP_SPLIT]:
        figures["last_step_split_ms"] = splits[-1]
    return TracedRun(report | {"step": figures}, records)


async def _generate(engine: Engine, prompts: Sequence[list[int]], num_tokens: int, temperature: float) -> int:
    """Run all prompts at once. Returns the number of tokens."""
    sampling = SamplingParams(max_new_tokens=num_tokens, temperature=temperature, ignore_eos=True, seed=0)
    answers = await asyncio.gather(*(engine.client.complete(prompt, sampling) for prompt in prompts))
    return sum(len(answer.token_ids) for answer in answers)


def _floor(before: Stats, after: Stats) -> float:
    """The mean lower bound of a decode step's time, in seconds."""
    steps = after.decode_steps_total - before.decode_steps_total
    return (after.decode_floor_total - before.decode_floor_total) / steps if steps else 0.0
