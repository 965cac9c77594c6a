"""Tables that show several result files side by side: what each cell is, and what is marked."""

import json
from pathlib import Path
from typing import Any

import pytest
from documents.side_by_side import TABLES, SideBySide, default_lines, feature_lines, of_group, side_by_side, step_lines

from overlap_spec.runtime.source import PARTS, Source

NOW = Source("abc", {}, {part: "new" for part in PARTS})
SOURCE = {"trees": {}, "code": {part: "new" for part in PARTS}}
RUN = {"device": "NVIDIA H200", "versions": {"torch": "2"}, "commit": "c" * 12, "command": "x", "source": SOURCE}


def cell(batch: int, num_tokens: int, call: float, kind: str = "cell") -> dict[str, Any]:
    return {"kind": kind, "batch": batch, "num_tokens": num_tokens, "over_plain": {"call": {"default": call}}}


def test_calls_that_are_slower_than_plain_decoding_are_marked() -> None:
    turns = [cell(8, 64, 9, "turn 0"), cell(24, 64, 9, "turn 1")]
    good = {"rows": [cell(8, 256, 1.5), cell(8, 64, 1.2), cell(1, 64, 2.0), cell(1, 256, 2.1), *turns]}
    bad = {"rows": [cell(1, 64, 1.0), cell(1, 256, 1.1), cell(8, 64, 0.97), cell(8, 256, 0.99)]}
    assert default_lines([good, bad]) == [
        ["1", "2.00", "2.10", "1.00", "1.10"],
        ["8", "1.20", "1.50", "**0.97** slower", "**0.99** slower"],
    ]
    others = [cell(8, 256, 1.25) | {"case": "dspark"}, cell(1, 256, 0.9) | {"case": "eagle3"}]
    assert default_lines([good, {"benchmark": "default_drafters", "rows": others}]) == [
        ["1", "2.00", "2.10", "", "", "", "**0.90** slower"],
        ["8", "1.20", "1.50", "", "1.25", "", ""],
    ]


def test_a_group_of_default_numbers_has_the_rows_of_its_acceptance() -> None:
    rows = [cell(8, 64, 1.5) | {"case": "8b-2.5"}, cell(8, 64, 1.0) | {"case": "8b-1.3"}]
    assert of_group("1.3", {"rows": rows})["rows"] == rows[1:]
    assert of_group("answers of 256 at 2.5", {"rows": rows})["rows"] == rows


def test_a_file_of_several_groups_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = SideBySide({"2.5": "a.json", "1.3": "a.json"}, "batch", ("64", "256"), default_lines)
    monkeypatch.setitem(TABLES, "grid", shown)
    rows = [
        cell(8, length, call) | {"case": case}
        for case, call in (("8b-2.5", 1.5), ("8b-1.3", 1.0))
        for length in (64, 256)
    ]
    (tmp_path / "a.json").write_text(json.dumps({"rows": rows, "run": RUN}))
    lines = side_by_side("grid", tmp_path).splitlines()
    assert lines[2] == "| 8 | 1.50 | 1.50 | 1.00 | 1.00 |"
    assert [line.partition(": ")[0] for line in lines if line.startswith("- ")] == ["- 2.5, 1.3"]


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
