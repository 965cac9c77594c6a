"""What clients report, in a few words."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUM_REQUESTS = 6  # of the benchmarks
Counts = dict[str, Any]
OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED) ?(?:\[\d+\] )?(\S+?)(?:(?: -|:) (.*))?$", re.M)


def requests_of(name: str, out: Path) -> Counts:
    """How many requests of a benchmark succeeded and failed, by its own report."""
    reader = next(reader for prefix, reader in READERS.items() if name.startswith(prefix))
    succeeded, failed = reader(out)
    return {"succeeded": succeeded, "failed": failed}


def pytest_summary(text: str) -> Counts:
    """How many tests passed, and the first line of the error of each of the others. `text`: of `pytest -rA`."""
    outcomes = [(outcome, "/".join(test.split("/")[-2:]), error) for outcome, test, error in OUTCOME.findall(text)]
    others = {test: error[:160] for outcome, test, error in outcomes if outcome != "PASSED"}
    return {"tests": len(outcomes), "passed": len(outcomes) - len(others), "not_passed": others}


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


def _sglang(out: Path) -> tuple[int, int]:
    report = json.loads((out / "report.jsonl").read_text().splitlines()[-1])
    return report["completed"], NUM_REQUESTS - report["completed"]


def _vllm(out: Path) -> tuple[int, int]:
    report = json.loads((out / "report.json").read_text())
    return report["completed"], report["failed"]


READERS: dict[str, Callable[[Path], tuple[int, int]]] = {  # by how the client's name begins
    "guidellm": _guidellm,
    "evalscope": _evalscope,
    "aiperf": _aiperf,
    "sglang_bench": _sglang,
    "vllm_bench": _vllm,
}
