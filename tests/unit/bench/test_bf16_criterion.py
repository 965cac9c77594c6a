"""The two conditions on bfloat16 divergences: committed ones meet them, worse ones do not."""

import copy
import importlib.util
import json
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
REPORT = json.loads((ROOT / "benchmarks/results/bf16_divergences_h200.json").read_text())


@pytest.fixture
def criterion() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bf16_criterion", ROOT / "benchmarks/bf16_criterion.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def report() -> dict[str, Any]:
    return copy.deepcopy(REPORT)


def test_the_committed_verdict_follows_from_the_committed_divergences(criterion: ModuleType) -> None:
    verdict = criterion.judge({name: value for name, value in REPORT.items() if name != "verdict"})
    assert verdict == REPORT["verdict"], "run: python benchmarks/bf16_divergences.py --judge FILE"
    assert verdict["passed"]
    assert verdict["margin_bound"] < 0.5
    assert verdict["greedy_positions_above_bound"] > 0.75


def test_counts_are_those_of_the_divergences_on_record() -> None:
    """At most one a prompt."""
    for row in REPORT["answers"]:
        found = [
            d["prompt"] for d in REPORT["divergences"] if (d["method"], d["batch"]) == (row["method"], row["batch"])
        ]
        assert len(found) == len(set(found)) == row["divergences"]


def test_one_margin_above_the_bound_fails(criterion: ModuleType, report: dict[str, Any]) -> None:
    bound = criterion.margin_bound(report["noise"]["shapes"])
    report["divergences"][70]["margin"] = bound * 0.999
    assert criterion.judge(report)["passed"]
    report["divergences"][70]["margin"] = bound * 1.001
    verdict = criterion.judge(report)
    assert not verdict["passed"] and verdict["divergences_above_bound"] == 1


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_divergences_at_near_ties_fail_where_there_are_too_many(
    criterion: ModuleType, report: dict[str, Any], batch: int
) -> None:
    (row,) = (row for row in report["answers"] if (row["method"], row["batch"]) == ("eagle3", batch))
    (most,) = (rate["fails_from"] for rate in criterion.judge(report)["rates"] if rate["batch"] == batch)
    row["divergences"] = most - 1
    assert criterion.judge(report)["passed"]
    row["divergences"] = most
    assert not criterion.judge(report)["passed"]
    assert row["divergences"] < 36, "of 40"


def test_fishers_tail_is_what_counting_gives(criterion: ModuleType) -> None:
    """Every way to mark 5 of 4 + 4, one by one."""
    ways = list(combinations(range(8), 5))
    for first in range(1, 5):
        as_many = sum(sum(place < 4 for place in way) >= first for way in ways)
        assert criterion.fisher(first, 5 - first, 4) == pytest.approx(as_many / len(ways))
