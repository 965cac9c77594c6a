"""The table of real traffic: what a goal takes from the result files, what is written beside it, and how files grow."""

import json
from pathlib import Path
from typing import Any

import pytest
from documents.real_traffic import committed, real_traffic_table
from rows import results as rows_results
from rows.goals import GOALS
from rows.parts import PARTS, ROWS, EnginePart, ServerPart, chosen
from rows.results import Cell, Results
from rows.setups import ENGINES, SERVERS

from overlap_spec.runtime.source import PARTS as CODE
from overlap_spec.runtime.source import Source

NOW = Source("abc", {}, {part: "new" for part in CODE})


def run(commit: str, when: str = "2026-01-01", command: str = "python benchmarks/real_traffic.py") -> dict[str, Any]:
    source = {"trees": {}, "code": {part: "new" for part in CODE}}
    about = {"when": when, "device": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "command": command}
    return {**about, "commit": commit, "source": source}


def write(directory: Path, name: str, commit: str, when: str, cells: list[tuple[int, str, float]]) -> None:
    found = [{"row": row, "part": part, "value": value} for row, part, value in cells]
    report = {"benchmark": "real_traffic", "run": run(commit, when), "cells": found}
    (directory / name).write_text(json.dumps(report))


def lines(directory: Path) -> dict[str, list[str]]:
    """The rows of the table by what they measure: before, measured, must, aim, verdict, file."""
    table = real_traffic_table(directory, NOW).splitlines()
    cells = [line.strip("| ").split("|") for line in table[2:] if line.startswith("|")]
    return {row[1].strip(): [cell.strip() for cell in (*row[2:], "", "")[:6]] for row in cells}


def test_the_worst_cell_decides_and_all_cells_must_be_there(tmp_path: Path) -> None:
    plain = [(1, "plain", 1.01)] * 11 + [(1, "plain", 1.05)]
    chain = [(1, "chain", 1.02)] * 3
    write(tmp_path, "real_traffic_h200.json", "aaaaaaaaaaaa", "2026-01-01", [*plain, *chain, (12, "1B plain", 0.69)])
    found = lines(tmp_path)
    assert found["plain, sampled step / greedy step"][1:] == ["1.05 (worst of 12)", "1.06", "1.03", "met", "a"]
    measured, verdict = found["chain, sampled step / greedy step"][1], found["chain, sampled step / greedy step"][4]
    assert measured == "1.02 (worst of 3; 12 are wanted)" and verdict == "met, and the aim, as far as measured"
    assert found["Llama-3.2-1B shape, plain: step efficiency"][1:5] == ["69.0%", "70.0%", "80.0%", "**missed**"]
    assert found["Llama-3.2-1B shape, chain: step efficiency"][1] == "not measured"


def test_a_goal_takes_the_newest_file_that_has_it_and_files_are_named_with_their_commits(tmp_path: Path) -> None:
    write(tmp_path, "real_traffic_h200.json", "aaaaaaaaaaaa", "2026-01-01", [(7, "turn", 13.0), (2, "8k", 190.0)])
    write(tmp_path, "real_traffic_h200-bbb.json", "bbbbbbbbbbbb", "2026-01-02", [(7, "turn", 11.0)])
    found = lines(tmp_path)
    assert found["first token of 8k random tokens, ms"][1:] == ["190", "215", "200", "met, and the aim", "a"]
    turn = next(row for work, row in found.items() if work.startswith("turn"))
    assert turn[1:] == ["11", "12", "8", "met", "b"]
    origins = [line for line in real_traffic_table(tmp_path, NOW).splitlines() if line.startswith("- ")]
    assert [line.partition(";")[2].partition(";")[0].strip() for line in origins] == [
        "commit aaaaaaaaaaaa",
        "commit bbbbbbbbbbbb",
    ]


def test_rows_of_the_other_benchmarks_are_read_from_their_files(tmp_path: Path) -> None:
    interruption = {"longest_gap_ms": 21.0, "first_token_ratio": 1.3}
    rows = [
        {"engine": "plain", "part": "interruption", "long_prompt": 16000, "interruption": {"longest_gap_ms": 99.0}},
        {"engine": "chain", "part": "interruption", "long_prompt": 16000, "interruption": interruption},
    ]
    traffic = {"benchmark": "traffic", "run": run("cccccccccccc"), "rows": rows, "rate_over_plain": 1.6}
    (tmp_path / "traffic_h200.json").write_text(json.dumps(traffic))
    speeds = {"fixed": 90.0, "adaptive": 100.0, "plain": 110.0}
    widths = [
        {"case": "8b", "prompts": "random", "batch": batch, "policy": policy, "tokens_per_second": speed * faster}
        for batch, faster in ((1, 1.0), (8, 2.0))
        for policy, speed in (speeds if batch == 1 else speeds | {"adaptive": 120.0}).items()
    ]
    report = {"benchmark": "width_policy", "run": run("dddddddddddd"), "rows": widths}
    (tmp_path / "width_policy_h200.json").write_text(json.dumps(report))
    found = lines(tmp_path)
    assert found["longest gap of 8 streams, a 16k prompt arrives, ms"][1:5] == ["21", "40", "20", "met"]
    assert found["first token of that 16k prompt / alone"][4] == "**missed**"
    assert found["longest gap of 8 streams, a 40k prompt arrives, ms"][1] == "not measured"
    assert found["requests a second within limits / plain decoding"][1] == "1.6"
    assert found["adaptive tok/s / plain"][1].startswith("0.9091 (worst of 2; 60")
    assert found["adaptive tok/s below the better of fixed width and plain"][1].startswith("9.1%")


def test_loads_of_several_files_make_one_goal_and_of_each_load_the_newest_counts(tmp_path: Path) -> None:
    def write_widths(name: str, commit: str, when: str, adaptive: dict[tuple[str, int], float]) -> None:
        rows = [
            {"case": case, "prompts": "chat20", "batch": batch, "policy": policy, "tokens_per_second": speed}
            for (case, batch), faster in adaptive.items()
            for policy, speed in {"fixed": 90.0, "adaptive": 100.0 * faster, "plain": 100.0}.items()
        ]
        report = {"benchmark": "width_policy", "run": run(commit, when), "rows": rows}
        (tmp_path / name).write_text(json.dumps(report))

    every = [(f"case {case}", batch) for case in range(10) for batch in range(6)]
    write_widths("width_policy_h200.json", "aaaaaaaaaaaa", "2026-01-01", dict.fromkeys(every[:40], 0.5))
    write_widths("width_policy_more_h200.json", "bbbbbbbbbbbb", "2026-01-02", dict.fromkeys(every[:39], 1.02))
    write_widths("width_policy_8b_h200.json", "cccccccccccc", "2026-01-02", dict.fromkeys(every[40:], 0.99))
    found = lines(tmp_path)["adaptive tok/s / plain"]
    assert found[1:] == ["0.5 (worst of 60)", "0.98", "1", "**missed**", "a, b, c"]
    write_widths("width_policy_h200.json", "dddddddddddd", "2026-01-03", dict.fromkeys(every[:40], 1.01))
    found = lines(tmp_path)["adaptive tok/s / plain"]
    assert found[1:] == ["0.99 (worst of 60)", "0.98", "1", "met", "a, b"]
    assert lines(tmp_path)["adaptive tok/s below the better of fixed width and plain"][1] == "1.0% (worst of 60)"


def test_every_row_has_a_goal_and_a_measurement() -> None:
    own = {goal.row for goal in GOALS if goal.benchmark == "real_traffic"}
    assert own == set(ROWS) and {goal.row for goal in GOALS} == set(range(1, 18))
    assert all(part.setup in ENGINES for part in PARTS if isinstance(part, EnginePart))
    assert all(part.setup in SERVERS for part in PARTS if isinstance(part, ServerPart))


def test_an_engine_starts_once_for_all_of_its_rows() -> None:
    groups = chosen([2, 15, 6, 1])
    assert {name: [part.rows for part in parts] for name, parts in groups.items()} == {
        "8B engine": [(2, 6), (15,), (1,)],
        "SmolLM2 engine": [(15,)],
        "8B plain engine": [(1,)],
    }


def test_cells_of_the_same_code_stay_until_they_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "real_traffic_h200.json"

    def measure(commit: str, *cells: Cell) -> None:
        monkeypatch.setattr(rows_results, "describe_run", lambda *_: run(commit, command=f"run of {len(cells)}"))
        results = Results(str(path))
        results.describe("NVIDIA H200", 1)
        for cell in cells:
            results.add(cell)

    measure("aaaaaaaaaaaa", Cell(2, "8k", 1.0, {}), Cell(1, "plain", 3.0, {}), Cell(1, "plain", 4.0, {}))
    measure("aaaaaaaaaaaa", Cell(1, "plain", 5.0, {}))
    report = json.loads(path.read_text())
    assert [(cell["row"], cell["value"]) for cell in report["cells"]] == [(1, 5.0), (2, 1.0)]
    assert report["run"]["command"] == "run of 3; run of 1"
    measure("bbbbbbbbbbbb", Cell(7, "turn", 6.0, {}))
    assert json.loads(path.read_text()) == report
    assert sorted(committed(tmp_path)) == ["real_traffic_h200-bbbbbbbbbbbb.json", "real_traffic_h200.json"]
    measure("bbbbbbbbbbbb", Cell(2, "8k", 7.0, {}))
    other = json.loads((tmp_path / "real_traffic_h200-bbbbbbbbbbbb.json").read_text())
    assert [(cell["row"], cell["value"]) for cell in other["cells"]] == [(2, 7.0), (7, 6.0)]
