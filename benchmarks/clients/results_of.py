"""What clients report, in a few words."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Counts = dict[str, Any]


def requests_of(name: str, out: Path) -> Counts:
    """How many requests of a benchmark succeeded and failed, by its own report."""
    succeeded, failed = READERS[name](out)
    return {"succeeded": succeeded, "failed": failed}


def pytest_summary(text: str) -> Counts:
    """Counts of outcomes, and the first line of each failure's reason. `text`: of `pytest -rA`."""
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) ?(?:\[\d+\] )?(\S+)(?: - (.*))?$", text, re.M)
    counts: dict[str, int] = {}
    reasons: dict[str, list[str]] = {}
    for outcome, test, reason in outcomes:
        counts[outcome.lower()] = counts.get(outcome.lower(), 0) + 1
        if outcome != "PASSED":
            reasons.setdefault(reason[:160], []).append(test.rsplit("/", 1)[-1])
    return {"counts": counts, "reasons": reasons}


def _guidellm(out: Path) -> tuple[int, int]:
    (run,) = json.loads((out / "report.json").read_text())["benchmarks"]
    totals = run["metrics"]["request_totals"]
    return totals["successful"], totals["errored"] + totals["incomplete"]


def _evalscope(out: Path) -> tuple[int, int]:
    (path,) = out.rglob("benchmark_summary.json")
    summary = json.loads(path.read_text())
    return summary["Success Requests"], summary["Failed Requests"]


def _aiperf(out: Path) -> tuple[int, int]:
    report = json.loads((out / "profile_export_aiperf.json").read_text())
    succeeded = int(report["request_count"]["avg"])
    return succeeded, int(report["completed_request_count"]["avg"]) - succeeded


READERS: dict[str, Callable[[Path], tuple[int, int]]] = {
    "guidellm": _guidellm,
    "evalscope": _evalscope,
    "aiperf": _aiperf,
}
