"""Sums, trace file and text of a run that is made up: 1 ms steps, 0.1 ms gaps, two in flight."""

import json
from pathlib import Path
from typing import Any

import pytest

from overlap_spec.bench.step import WIDTH, decode_steps, events, queued_ahead, summarise, timeline, write_trace
from overlap_spec.runtime.tracing import CLIENT, FRONTEND, GPU, SCHEDULER, WORKER, Record

MS = 1e-3
PERIOD, VERIFY, DRAFT = 1.0 * MS, 0.7 * MS, 0.2 * MS
NUM_STEPS = 8  # the first is the prefill


def made_up(depth: int) -> list[Record]:
    """Step n begins at n ms. At depth 2 its plan is sent before the result of step n - 1, at depth 1 after it."""
    records = [Record(CLIENT, "send request", 0.0, 0.01 * MS)]
    for step in range(1, NUM_STEPS + 1):
        begin, phase = 100.0 + step * PERIOD, "prefill" if step == 1 else "decode"
        decided, args = begin + VERIFY, {"phase": "prefill" if step == 1 else "decode", "batch": 1, "width": 4}
        planned = begin - (0.25 if depth == 1 else 0.9) * MS
        records += [
            Record(SCHEDULER, "plan", planned, planned + 0.02 * MS, step),
            Record(WORKER, "launch", begin - 0.05 * MS, begin - 0.01 * MS, step),
            Record(GPU, "verify+accept" if phase == "decode" else "prefill", begin, decided, step, args),
            Record(GPU, "extend+draft", decided, decided + DRAFT, step, args | {"part": "after tokens"}),
            Record(SCHEDULER, "settle", decided + 0.02 * MS, decided + 0.03 * MS, step),
            Record(FRONTEND, "detokenize", decided + 0.04 * MS, decided + 0.06 * MS, step),
        ]
    return records


def test_a_step_is_its_parts_and_the_gap() -> None:
    figures = summarise(made_up(2), floor_s=0.5 * MS)
    assert figures["num_steps"] == NUM_STEPS - 2 and figures["steps_by_width"] == {"4": NUM_STEPS - 2}
    assert figures["step_ms"] == pytest.approx(1.0)
    assert figures["parts_ms"] == {"verify+accept": pytest.approx(0.7), "extend+draft": pytest.approx(0.2)}
    assert figures["gap_ms"] == pytest.approx(0.1) and figures["gap_share"] == pytest.approx(0.1)
    assert figures["host_ms"] == pytest.approx({"scheduler": 0.03, "launch": 0.04, "frontend": 0.02})
    assert figures["host_hidden_ms"] == 0.0  # less than the gap
    assert (figures["floor_ms"], figures["efficiency"]) == (pytest.approx(0.5), pytest.approx(0.5))


def test_what_is_not_known_is_not_made_up() -> None:
    figures = summarise(made_up(2), floor_s=0.0)
    assert figures["floor_ms"] is None and figures["efficiency"] is None
    assert summarise([], 0.0) == {"num_steps": 0}


def test_device_work_within_a_launch_is_not_the_hosts() -> None:
    """On a CPU the launch is the device."""
    records = [
        Record(WORKER, record.name, record.begin, record.end, record.step, record.args)
        if record.track == GPU
        else Record(WORKER, "launch", record.begin, record.begin + 0.95 * MS, record.step)
        if record.name == "launch"
        else record
        for record in made_up(2)
    ]
    assert summarise(records, 0.0)["host_ms"]["launch"] == pytest.approx(0.05)


def test_at_depth_two_a_step_is_queued_before_the_one_before_is_read() -> None:
    assert queued_ahead(made_up(2)) == 1.0
    assert queued_ahead(made_up(1)) == 0.0


def spans(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in trace if event["ph"] == "X"]


def test_the_trace_names_its_tracks_and_is_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    write_trace(str(path), made_up(2), {"commit": "abc"})
    read = json.loads(path.read_text())
    assert read["otherData"] == {"commit": "abc"}
    names = {e["tid"]: e["args"]["name"] for e in read["traceEvents"] if e["name"] == "thread_name"}
    assert names == {1: "client", 2: "frontend", 3: "scheduler", 4: "worker host", 5: "GPU"}
    times = [event["ts"] for event in read["traceEvents"] if event["ph"] != "M"]
    assert times == sorted(times) and times[0] == 0.0
    assert all(event["tid"] in names and event["dur"] > 0 for event in spans(read["traceEvents"]))


def test_an_arrow_goes_from_plan_to_tokens() -> None:
    arrow = [event for event in events(made_up(2)) if event.get("id") == 5]
    assert [event["ph"] for event in arrow] == ["s", "t", "t", "t", "f"]
    assert [event["tid"] for event in arrow] == [3, 4, 5, 3, 2]


def test_the_next_plan_begins_before_the_result_only_at_depth_two() -> None:
    for depth in (1, 2):
        begun = {event["name"]: event["ts"] for event in spans(events(made_up(depth)))}
        for step in range(3, NUM_STEPS):
            assert (begun[f"plan {step + 1}"] < begun[f"settle {step}"]) == (depth == 2)


def test_the_text_shows_who_waits() -> None:
    records = made_up(2)
    assert decode_steps(records) == list(range(2, NUM_STEPS + 1))
    queued, device, settled, scale = timeline(records, 3, 2).splitlines()
    assert {len(line) <= WIDTH + 10 for line in (queued, device, settled, scale)} == {True}
    assert device.count("3") == pytest.approx(WIDTH * 0.7 / 1.9, abs=2)
    assert device.count("d") == pytest.approx(2 * WIDTH * 0.2 / 1.9, abs=3)
    assert "4" in queued
    assert (settled.index("3"), settled.index("4")) == (10 + int(72 / 1.9), 10 + int(172 / 1.9))
    assert scale.endswith("1.9 ms")
