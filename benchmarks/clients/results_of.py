"""What clients report, in a few words."""

import json
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

Counts = dict[str, Any]
OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED) ?(?:\[\d+\] )?(\S+)(?: - (.*))?$", re.M)


def requests_of(name: str, out: Path) -> Counts:
    """How many requests of a benchmark succeeded and failed, by its own report."""
    reader = next(reader for prefix, reader in READERS.items() if name.startswith(prefix))
    succeeded, failed = reader(out)
    return {"succeeded": succeeded, "failed": failed}


def pytest_summary(text: str, known: Mapping[str, str]) -> Counts:
    """How many tests passed, and why the others did not. `text`: of `pytest -rA`; `known`: name pattern -> reason.

    A test whose reason is known is `not_applicable`; the reason of a failed one is the first line of its error.
    """
    counts = {"passed": 0, "not_applicable": 0, "failed": 0}
    reasons: dict[str, list[str]] = {}
    for outcome, test, error in OUTCOME.findall(text):
        name = test.rsplit("/", 1)[-1]
        if outcome == "PASSED":
            counts["passed"] += 1
            continue
        pattern = next((each for each in known if fnmatch(name, each)), None)
        counts["failed" if pattern is None else "not_applicable"] += 1
        reasons.setdefault(f"failed: {error[:160]}" if pattern is None else known[pattern], []).append(name)
    return {"tests": sum(counts.values()), "counts": counts, "not_passed": reasons}


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
    return report["completed"], report["num_prompts"] - report["completed"]


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
