"""Summaries of long runs and GPU runs: a JSON file, with the outcome of every test file.

Processes of one run (pytest-xdist) and runs beside each other add to the same file, one at a time.
"""

import fcntl
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from overlap_spec.bench.report import as_text, describe_run

Summaries = dict[str, Any]
LONG_S = 3.0  # of a test


def update(path: Path, change: Callable[[Summaries], None]) -> None:
    """Change the summaries in `path`, alone."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        summaries = whole(json.loads(path.read_text())) if path.is_file() else {}
        change(summaries)
        path.write_text(as_text(shared(summaries)))


def shared(summaries: Summaries) -> Summaries:
    """Summaries whose runs are written once, under `runs`: most tests of a file differ in when they ran alone.

    What was seen in a test, and each of `files`, has the number of its run in place of the run.
    """
    numbers: dict[str, str] = {}

    def numbered(entry: Summaries) -> Summaries:
        run = {name: value for name, value in entry["run"].items() if name != "when"}
        number = numbers.setdefault(json.dumps(run, sort_keys=True), str(len(numbers) + 1))
        return entry | {"run": {"number": number, "when": entry["run"]["when"]}}

    found = _with_runs(summaries, numbered)
    runs = {number: json.loads(text) for text, number in numbers.items()}
    return json.loads(json.dumps(found | ({"runs": runs} if runs else {}), sort_keys=True))


def whole(summaries: Summaries) -> Summaries:
    """Summaries as `shared` was given them; also those that were written before it."""
    runs = summaries.get("runs", {})

    def with_run(entry: Summaries) -> Summaries:
        run = entry["run"]
        return entry | {"run": runs[run["number"]] | {"when": run["when"]} if "number" in run else run}

    return _with_runs({name: value for name, value in summaries.items() if name != "runs"}, with_run)


def _with_runs(summaries: Summaries, change: Callable[[Summaries], Summaries]) -> Summaries:
    """Summaries with each entry of a test and of a file changed."""
    found = {
        name: change(entry) if isinstance(entry, dict) and {"test", "run"} <= entry.keys() else entry
        for name, entry in summaries.items()
    }
    files = {file: change(row) for file, row in summaries.get("files", {}).items()}
    return found | ({"files": files} if files else {})


def describe(device: str, num_threads: int) -> dict[str, Any]:
    """Where a summary comes from; the tests are a part of it."""
    return describe_run(device, num_threads, ("tests",)) | {"command": "pytest -m MARKER --summaries FILE"}


def without_group(nodeid: str) -> str:
    """`--dist loadgroup` adds `@GROUP` to the tests of an `xdist_group`."""
    test, _, group = nodeid.rpartition("@")
    return test if test and "]" not in group else nodeid


class FileResults:
    """Counts how the tests of every file ended, and writes that at the end of the run under `files`."""

    def __init__(self, path: Path, device: str, num_threads: int) -> None:
        self._path = path
        self._run = describe(device, num_threads)  # of the source as the run begins
        self._begun = time.perf_counter()
        self._outcomes: dict[str, dict[str, str]] = {}
        self._seconds: Counter[str] = Counter()
        self._seconds_of: Counter[str] = Counter()  # by test

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test failed if any of its three phases did; it passed or was skipped otherwise."""
        nodeid = without_group(report.nodeid)
        file = nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        self._seconds_of[nodeid] += report.duration
        ended = self._outcomes.setdefault(file, {})
        if report.when == "call" or report.outcome != "passed":
            before = ended.get(nodeid)
            ended[nodeid] = "failed" if before == "failed" else report.outcome

    def pytest_sessionfinish(self) -> None:
        """Write one row a file."""
        rows = {file: self._row(file, ended) for file, ended in self._outcomes.items() if ended}

        def add(summaries: Summaries) -> None:
            summaries.setdefault("files", {}).update(rows)

        if rows:
            update(self._path, add)

    def _row(self, file: str, ended: dict[str, str]) -> dict[str, Any]:
        counts = Counter(ended.values())
        failed = [nodeid.partition("::")[2] for nodeid, outcome in ended.items() if outcome == "failed"]
        return {
            **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
            "failures": failed,
            "seconds": round(self._seconds[file], 1),
            "longest": self._longest(ended),
            "run": self._run,
        }

    def _longest(self, tests: Iterable[str]) -> dict[str, float]:
        """Mean seconds of the functions whose tests take long."""
        seconds: dict[str, list[float]] = {}
        for nodeid in tests:
            seconds.setdefault(nodeid.partition("::")[2].partition("[")[0], []).append(self._seconds_of[nodeid])
        means = {function: round(fmean(of_each), 1) for function, of_each in seconds.items()}
        return {function: mean for function, mean in means.items() if mean >= LONG_S}
