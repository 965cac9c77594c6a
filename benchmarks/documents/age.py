"""How old the results are that documents show. They say so once, at the top of `docs/benchmarks.md`.

A result records a hash of every part of the code that ran (`source.py`). It is *current* while the parts that its
benchmark depends on have the same hashes: a change of comments or docstrings leaves it current, a change of code does
not. `python benchmarks/write_docs.py --ages` lists those that are not. An old result fails nothing: the line below its
table names its commit.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from records.reader import commits_since

from overlap_spec.runtime.source import COMMIT_DIGITS, PARTS, Source

STEP_PATH = tuple(part for part in PARTS if part not in ("overlap_spec/entrypoints", "overlap_spec/frontend"))
DEPENDS_ON = {  # by benchmark; the others depend on the step path
    "throughput": PARTS,
    "memory_guide": ("overlap_spec/models", "overlap_spec/worker"),
    "parameter_matrix": tuple(part for part in PARTS if part.startswith("overlap_spec")),
    "kernels": ("kernels/overlap_spec_kernels",),
    "reductions": ("kernels/overlap_spec_kernels",),
    "isolation_cost": (),  # servers beside each other: what they find cached is counted, and held by tests of its own
}

Report = Mapping[str, Any]


def documents(root: Path) -> list[Path]:
    """Every document with generated places."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md")), root / "kernels/overlap_spec_kernels/README.md"]


def changed_parts(report: Report, now: Source) -> list[str]:
    """Parts of the code that a report depends on and that have changed since; all of them if none was recorded."""
    then = run_of(report).get("source", {}).get("code", {})
    parts = DEPENDS_ON.get(report.get("benchmark", "kernels"), STEP_PATH)
    return [part for part in parts if then.get(part) != now.code.get(part)]


def run_of(report: Report) -> Report:
    """Where and with which code a report was made; of one that several runs went on with, the last."""
    runs = report.get("runs")
    found: Report = runs[-1] if isinstance(runs, list) and runs else report.get("run") or report
    return found


def commits_of(reports: Mapping[str, Report]) -> list[str]:
    """The commits at which they were measured, the first one first."""
    runs = sorted(map(run_of, reports.values()), key=lambda run: str(run.get("when", "")))
    return list(dict.fromkeys(str(run["commit"])[:COMMIT_DIGITS] for run in runs if run.get("commit")))


def ages(reports: Mapping[str, Report], now: Source, root: Path) -> Iterator[str]:
    """A line for each result that is older than the code, the first one first."""
    old = {name: changed for name, report in reports.items() if (changed := changed_parts(report, now))}
    for name in sorted(old, key=lambda name: str(run_of(reports[name]).get("when", ""))):
        commit = str(run_of(reports[name]).get("commit", "?"))
        since = commits_since(root, commit.rstrip("+")) or "?"
        parts = ", ".join(part.rpartition("/")[2] for part in old[name])
        yield f"{name}: measured at {commit}, {since} commits ago; changed since: {parts}"
