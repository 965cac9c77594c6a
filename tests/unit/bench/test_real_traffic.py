"""The table of real traffic: what a quantity takes from the result files, what is marked, and how files grow."""

import json
from pathlib import Path
from typing import Any

import pytest
from documents.real_traffic import committed, real_traffic_table
from rows import results as rows_results
from rows.parts import PARTS, ROWS, EnginePart, ServerPart, chosen
from rows.quantities import QUANTITIES
from rows.results import Cell, Results
from rows.setups import ENGINES, SERVERS

from overlap_spec.runtime.source import PARTS as CODE, Source

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
    """The rows of the table by the kind of work: measured, file."""
    table = real_traffic_table(directory).splitlines()
    cells = [line.strip("|").split("|") for line in table[2:] if line.startswith("|")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in cells}


def test_the_worst_cell_decides_and_all_cells_must_be_there(tmp_path: Path) -> None:
    plain = [(1, "plain", 0.98)] * 11 + [(1, "plain", 1.0)]
    chain = [(1, "chain", 1.02)] * 3
    write(tmp_path, "real_traffic_h200.json", "aaaaaaaaaaaa", "2026-01-01", [*plain, *chain, (12, "1B plain", 0.69)])
    found = lines(tmp_path)
    measured = "plain: 1 (worst of 12); chain: **1.02** slower (worst of 3; 12 are wanted)"
    assert found["sampled step / greedy step"] == [measured, "a"]
    assert found["Llama-3.2-1B shape, step efficiency"] == ["plain: 69.0%; chain: not measured", "a"]
    assert found["first token of a turn with 8k cached and 200 new tokens, ms"] == ["not measured", ""]


def test_ratios_are_marked_on_the_slower_side_of_1(tmp_path: Path) -> None:
    cells = [(11, "64 tok/s", 1.26), (11, "256 tok/s", 0.98), (11, "64 gap", 3.0)]
    write(tmp_path, "real_traffic_h200.json", "aaaaaaaaaaaa", "2026-01-01", cells)
    found = lines(tmp_path)
    assert found["SmolLM2, tok/s of SSE connections / one batched request"][0] == "64: 1.26; 256: **0.98** slower"
    assert found["SmolLM2, gap p99 of SSE connections, ms"][0] == "64: 3; 256: not measured"


def test_a_quantity_takes_the_newest_file_that_has_it_and_files_are_named_with_their_commits(tmp_path: Path) -> None:
    write(tmp_path, "real_traffic_h200.json", "aaaaaaaaaaaa", "2026-01-01", [(7, "turn", 13.0), (2, "8k", 190.0)])
    write(tmp_path, "real_traffic_h200-bbb.json", "bbbbbbbbbbbb", "2026-01-02", [(7, "turn", 11.0)])
    found = lines(tmp_path)
    assert found["first token of a prompt of random tokens, ms"][0].startswith("8k: 190; 32k: not measured")
    assert found["first token of a prompt of random tokens, ms"][1] == "a"
    turn = next(row for work, row in found.items() if "turn" in work)
    assert turn == ["11", "b"]
    origins = [line for line in real_traffic_table(tmp_path).splitlines() if line.startswith("- ")]
    assert [line.partition(";")[2].partition(";")[0].strip() for line in origins] == [
        "commit aaaaaaaaaaaa",
        "commit bbbbbbbbbbbb",
    ]


def test_rows_of_the_other_benchmark_are_read_from_its_file(tmp_path: Path) -> None:
    interruption = {"longest_gap_ms": 21.0, "first_token_ratio": 1.3}
    rows = [
        {"engine": "plain", "part": "interruption", "long_prompt": 16000, "interruption": {"longest_gap_ms": 99.0}},
        {"engine": "chain", "part": "interruption", "long_prompt": 16000, "interruption": interruption},
    ]
    traffic = {"benchmark": "traffic", "run": run("cccccccccccc"), "rows": rows, "rate_over_plain": 1.6}
    (tmp_path / "traffic_h200.json").write_text(json.dumps(traffic))
    found = lines(tmp_path)
    assert found["longest gap of 8 streams while a prompt arrives, ms"] == ["16k: 21; 40k: not measured", "a"]
    assert found["first token of that prompt / alone"] == ["16k: **1.3** slower; 40k: not measured", "a"]
    assert found["requests a second / plain decoding's"] == ["1.6", "a"]


def test_every_row_has_a_quantity_and_a_measurement() -> None:
    assert {each.row for each in QUANTITIES if each.benchmark == "real_traffic"} == set(ROWS)
    assert {each.row for each in QUANTITIES if each.benchmark == "traffic"} == {3, 4, 5}
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
