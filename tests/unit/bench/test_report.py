"""Result files: what fits into a line is on one line, and what is read is what was written."""

import json
import math
from typing import Any

import pytest
from documents.result_tables import matrix_row
from hypothesis import HealthCheck, given, settings, strategies as st
from support.matrix_columns import COLUMNS, DEPTHS, Row, with_outcome
from support.summaries import shared, whole

from overlap_spec.bench import report
from overlap_spec.bench.report import as_text

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=80)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=20), inner))


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])  # on busy cores
@given(VALUES)
def test_what_is_read_is_what_was_written(value: Any) -> None:
    assert json.loads(as_text(value)) == value


def test_short_values_are_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LINE", 30)
    text = as_text({"runs": [{"step_ms": 1.5}, {"step_ms": 2.5}], "note": "x" * 40, "empty": {}})
    assert text.splitlines() == [
        "{",
        ' "runs": [',
        '  {"step_ms": 1.5},',
        '  {"step_ms": 2.5}',
        " ],",
        f' "note": "{"x" * 40}",',
        ' "empty": {}',
        "}",
    ]


def test_a_figure_that_is_no_number_is_written_as_json_does() -> None:
    assert math.isnan(json.loads(as_text({"ratio": math.nan}))["ratio"])


def entry(when: str, commit: str) -> dict[str, Any]:
    return {"test": "t", "figures": {"a": 1}, "run": {"when": when, "commit": commit, "versions": {"torch": "2"}}}


def test_summaries_have_each_run_once() -> None:
    file = {"passed": 3, "run": entry("5", "x")["run"]}
    given = {"one": entry("1", "x"), "two": entry("2", "x"), "three": entry("3", "y"), "files": {"a.py": file}}
    written = shared(given)
    assert {run["commit"] for run in written["runs"].values()} == {"x", "y"}
    assert written["two"]["run"] == {"number": written["one"]["run"]["number"], "when": "2"}
    assert written["files"]["a.py"]["run"]["number"] == written["one"]["run"]["number"]
    assert whole(written) == given and whole(given) == given, "files from before it are read, too"


def test_a_summary_that_has_one_run_of_its_own_keeps_it() -> None:
    given = {"attacks": {"cases": {}, "run": {"when": "1"}}, "run": {"when": "2"}, "cells": {"a": {"b": "equal"}}}
    assert shared(given) == given == whole(given)


def test_a_row_of_a_matrix_is_one_word_while_all_its_cells_are() -> None:
    row: Row = {}
    cells = [(column, depth) for column in COLUMNS for depth in DEPTHS]
    for column, depth in cells:
        assert isinstance(row, dict), "not before all cells are there"
        row = with_outcome(row, column, depth, "equal")
    assert row == "equal"
    row = with_outcome(row, "NGRAM", 2, "differs")
    assert isinstance(row, dict) and row["NGRAM"] == {"1": "equal", "2": "differs"} and row == matrix_row(row, (), ())
    assert len(row) == len(COLUMNS) and row["NONE"] == {"1": "equal", "2": "equal"}
    assert with_outcome(row, "NGRAM", 2, "equal") == "equal"
