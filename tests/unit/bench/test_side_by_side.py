"""Tables that show several result files side by side: what each cell is, and what is marked."""

import json
from pathlib import Path
from typing import Any

import pytest
from documents.side_by_side import DEFAULTS, TABLES, cells_of, default_lines, feature_lines, side_by_side, step_lines

from overlap_spec.runtime.source import PARTS, Source

NOW = Source("abc", {}, {part: "new" for part in PARTS})
SOURCE = {"trees": {}, "code": {part: "new" for part in PARTS}}
RUN = {"device": "NVIDIA H200", "versions": {"torch": "2"}, "commit": "c" * 12, "command": "x", "source": SOURCE}


def cell(batch: int, num_tokens: int, call: float, kind: str = "cell") -> dict[str, Any]:
    return {"kind": kind, "batch": batch, "num_tokens": num_tokens, "over_plain": {"call": {"default": call}}}


def test_calls_that_are_slower_than_plain_decoding_are_marked() -> None:
    cells = {"kind": "cell", "batch": [8, 8, 1], "num_tokens": [256, 64, 64], "call": [1.5, 0.97, 2.0]}
    rows = [cells | {"case": "8b-2.5"}, cells | {"case": "8b-2.5", "kind": "fixed 4", "call": [9, 9, 9]}]
    others = [
        cell(8, 256, 1.25) | {"case": "dspark"},
        cell(1, 256, 0.9) | {"case": "peagle"},
        cell(1, 256, 9) | {"case": "eagle3"},
    ]
    assert default_lines([{"rows": rows}, {"rows": others}]) == [
        ["8B, EAGLE-3, 2.5", "2.00, -", "**0.97**, 1.50", *[""] * 6],
        ["8B, DSpark, 2.5", "", "-, 1.25", *[""] * 6],
        ["8B, P-EAGLE, 2.5", "-, **0.90**", *[""] * 7],
    ]


def test_calls_have_the_speed_that_is_asked_for() -> None:
    row = {
        "case": "a",
        "kind": "turns",
        "batch": [1, 8],
        "num_tokens": [64, 256],
        "call": [1.0, 2.0],
        "engine": [3.0, 4.0],
    }
    assert [*cells_of({"rows": [row]}, "turns", "engine")] == [("a", 1, 64, 3.0), ("a", 8, 256, 4.0)]


def test_a_table_whose_files_share_columns_names_them_once(tmp_path: Path) -> None:
    rows = [
        cell(8, length, call) | {"case": case} for case, length, call in (("8b-2.5", 64, 1.5), ("8b-1.3", 256, 1.0))
    ]
    for file in DEFAULTS.values():
        (tmp_path / file).write_text(json.dumps({"rows": rows, "run": RUN}))
    lines = side_by_side("default-numbers", tmp_path).splitlines()
    assert lines[0] == "| requests | 1 | 8 | 24 | 32 | 100 | 128 | 200 | 256 |"
    assert lines[2:4] == [
        "| 8B, EAGLE-3, 2.5 |  | 1.50, - |  |  |  |  |  |  |",
        "| 8B, EAGLE-3, 1.3 |  | -, 1.00 |  |  |  |  |  |  |",
    ]


def test_features_are_of_single_requests() -> None:
    rows = [{"kind": "greedy", "batch": batch, "step_ms": 0.5 * batch, "ratio": 1.0} for batch in (1, 32)]
    rows.append({"kind": "greedy, all", "batch": 1, "step_ms": 0.6, "ratio": 1.2})
    expected = [["greedy", "0.5", "1.00"], ["greedy, all", "0.6", "1.20"]]
    assert feature_lines([{"rows": rows}]) == expected


def test_parts_of_a_step_have_their_share() -> None:
    step = {"parts_ms": {"verify": 0.9}, "gap_ms": 0.1, "step_ms": 1.0, "host_hidden_ms": 0.5, "floor_ms": 0.25}
    assert step_lines([{"step": step}])[0] == ["verify", "0.9 (90.0%)"]
    assert step_lines([{"step": step}])[-1] == ["floor", "0.25 (25.0%)"]


@pytest.mark.parametrize("name", TABLES)
def test_every_file_is_named_below_its_table(name: str, tmp_path: Path) -> None:
    committed = Path(__file__).parents[3] / "benchmarks/results"
    for file in TABLES[name].files.values():
        (tmp_path / file).write_text(json.dumps(json.loads((committed / file).read_text()) | {"run": RUN}))
    lines = side_by_side(name, tmp_path).splitlines()
    named = ", ".join(line.split(":")[0].removeprefix("- ") for line in lines if line.startswith("- "))
    assert named == ", ".join(TABLES[name].files)
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
