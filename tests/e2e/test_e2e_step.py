"""`bench step --trace` with real processes: the file is well-formed, and shows who waits for whom."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import run_command

from overlap_spec.runtime.source import describe_source

TRACKS = ["client", "frontend", "scheduler", "worker host"]  # a CPU has no track of its own

Event = dict[str, Any]


def trace_of(tmp_path: Path, flags: tuple[str, ...], *more: str) -> tuple[list[Event], dict[str, Any], str]:
    """Run a small workload. Returns the trace's events, the report, and what was printed."""
    trace, output = tmp_path / "trace.json", tmp_path / "report.json"
    command = ("bench", "step", "--num-tokens", "40", "--trace", str(trace), "--output", str(output))
    done = run_command(tmp_path, *command, *flags, *more)
    assert done.returncode == 0, done.stderr
    return json.loads(trace.read_text())["traceEvents"], json.loads(output.read_text()), done.stdout


def check_well_formed(events: list[Event]) -> None:
    """Every event has what its phase needs; on a track spans nest or follow each other, in the order of time."""
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == TRACKS
    last: dict[int, float] = {}
    ends: dict[int, list[float]] = {}
    for event in events:
        assert event["ph"] in "MXistf" and event["pid"] == 1 and isinstance(event["name"], str)
        if event["ph"] == "M":
            continue
        assert event["ts"] >= last.get(event["tid"], 0.0)
        last[event["tid"]] = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] > 0
            open_ends, end = ends.setdefault(event["tid"], []), event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"] + 0.002:  # microseconds were rounded to a thousandth
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.002, f"{event} runs out of the span around it"
            open_ends.append(end)


@pytest.mark.full
@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_step_is_queued_before_the_result_only_at_depth_two(
    depth: int, tiny_flags: tuple[str, ...], tmp_path: Path
) -> None:
    more = ("--disable-overlap-schedule",) if depth == 1 else ()
    more += ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
    events, report, printed = trace_of(tmp_path, tiny_flags, *more)
    check_well_formed(events)
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    steps = sorted(int(name.split()[1]) for name in spans if name.startswith("verify "))
    # a step whose requests have ended before its result, as the last ones do, has nothing to detokenize
    pairs = [(step, step + 1) for step in steps if step + 1 in steps and f"detokenize {step}" in spans]
    assert len(pairs) >= 8
    for step, after in pairs:
        assert (spans[f"plan {after}"]["ts"] < spans[f"settle {step}"]["ts"]) == (depth == 2)
        assert spans[f"plan {after}"]["ts"] < spans[f"launch {after}"]["ts"] <= spans[f"verify {after}"]["ts"]
        assert spans[f"verify {step}"]["ts"] < spans[f"settle {step}"]["ts"] < spans[f"detokenize {step}"]["ts"]
    check_report(report["step"], depth)
    assert (report["run"]["commit"], report["settings"]["depth"]) == (describe_source().commit, depth)
    for word in ("verify", "accept", "extend", "draft", "gap", "host: scheduler", "step efficiency: "):
        assert word in printed


def check_report(step: dict[str, Any], depth: int) -> None:
    """The parts and the gap are the step."""
    assert list(step["parts_ms"]) == ["verify", "accept", "extend", "draft"]
    assert sum(step["parts_ms"].values()) + step["gap_ms"] == pytest.approx(step["step_ms"], abs=0.002)
    assert step["queued_ahead"] == depth - 1
    assert step["steps_by_width"] == {"4": step["num_steps"]}
    assert 0 < step["efficiency"] < 1 and step["floor_ms"] < step["step_ms"]


@pytest.mark.full
def test_a_batch_without_speculation(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--model", str(tiny_model), "--speculative-algorithm", "NONE", "--max-total-tokens", "20000")
    events, report, _ = trace_of(tmp_path, flags, "--batch-size", "3")
    check_well_formed(events)
    assert list(report["step"]["parts_ms"]) == ["verify", "accept"]
    batches = {event["args"]["batch"] for event in events if event["name"].startswith("verify ")}
    assert 3 in batches and report["workload"]["batch"] == 3
