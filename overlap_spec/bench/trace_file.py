"""Records as a Chrome trace, which chrome://tracing and ui.perfetto.dev open.

There is one track per actor and one for the GPU, in microseconds since the first record. An arrow follows a step from
its plan through its launch and its device work to its tokens. At depth 2 the arrow begins while the previous step runs.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from overlap_spec.messages import Record
from overlap_spec.runtime.tracing import TRACKS

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
