"""The order and the places of GPU tests that run beside each other, and what is kept of how long they took."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.gpu_order import LONG_S, expected_seconds, in_order, seconds_of_tests, visible_to
from support.summaries import FileResults


def test_long_ones_begin_first_and_none_at_the_end() -> None:
    shorts = [(0.5, f"short {i}") for i in range(90)]
    ordered = in_order([*shorts[:40], (LONG_S, "long"), *shorts[40:], (60.0, "longest"), (30.0, "longer")])
    assert ordered[0] == "longest" and sorted(ordered) == sorted(
        ["long", "longer", "longest", *(work for _, work in shorts)]
    )
    assert [ordered.index(name) for name in ("longer", "long")] == [21, 42]
    assert [work for work in ordered if work.startswith("short")] == [work for _, work in shorts]


@pytest.mark.parametrize("units", [[], [(1.0, "a"), (2.0, "b")], [(LONG_S, "a"), (LONG_S, "b")]])
def test_any_mixture_is_kept_whole(units: list[tuple[float, str]]) -> None:
    assert in_order(units) == [work for _, work in units]


def test_workers_take_turns_at_the_gpus() -> None:
    assert [visible_to(f"gw{i}", 2, None) for i in range(4)] == ["0", "1", "0", "1"]
    assert [visible_to(f"gw{i}", 2, "3,GPU-b") for i in (0, 11)] == ["3", "GPU-b"]
    assert visible_to("gw5", 1, "2") == "2" and visible_to("gw5", 0, None) is None


@pytest.mark.slow
def test_what_a_run_took_is_known_in_the_next(tmp_path: Path) -> None:
    results = FileResults(tmp_path / "run.json", "GPU", 1)
    for nodeid, duration in (("a.py::test_x[p@q]@an engine", 60.0), ("a.py::test_x[r]", 20.0), ("a.py::test_y", 1.0)):
        report = SimpleNamespace(nodeid=nodeid, duration=duration, when="call", outcome="passed")
        results.pytest_runtest_logreport(report)  # type: ignore[arg-type]  # has what is read of a report
    cut_off = SimpleNamespace(nodeid="b.py::test_z", duration=0.1, when="setup", outcome="passed")
    results.pytest_runtest_logreport(cut_off)  # type: ignore[arg-type]  # the same
    results.pytest_sessionfinish()
    (row,) = json.loads((tmp_path / "run.json").read_text())["files"].values()
    assert row["longest"] == {"test_x": 40.0} and row["passed"] == 3
    seconds = seconds_of_tests(tmp_path / "run.json")
    assert expected_seconds("a.py::test_x[another]", seconds) == 40.0
    assert expected_seconds("a.py::test_y", seconds) == pytest.approx(27.0)
    assert expected_seconds("new.py::test_z", seconds) == LONG_S
    assert seconds_of_tests(tmp_path / "none.json") == {}
