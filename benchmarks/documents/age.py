"""Decides whether a result is older than the code that it measures.

A result records a hash of every part of the code that ran (`source.py`). It is *current* while the parts that its
benchmark depends on have the same hashes: a change of comments or docstrings leaves it current, a change of code does
not. The documents show current results. `benchmarks/results/older.json` must name every other result with the reason
why it is kept; its table shows both. `tests/unit/bench/test_age.py` checks this.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_spec.runtime.source import PARTS, Source

OLDER = "older.json"
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


def changed_parts(report: Report, now: Source) -> list[str]:
    """Parts of the code that a report depends on and that have changed since; all of them if none was recorded."""
    then = run_of(report).get("source", {}).get("code", {})
    parts = DEPENDS_ON.get(report.get("benchmark", "kernels"), STEP_PATH)
    return [part for part in parts if then.get(part) != now.code.get(part)]


def reasons(results: Path) -> dict[str, str]:
    """Why results that are not current are kept, by file name."""
    path = results / OLDER
    known: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    return known


def run_of(report: Report) -> Report:
    """Where and with which code a report was made; of one that several runs went on with, the last."""
    runs = report.get("runs")
    found: Report = runs[-1] if isinstance(runs, list) and runs else report.get("run", {})
    return found


def age_note(report: Report, path: Path, now: Source) -> str:
    """A table's note on a result that is not current; empty if it is."""
    changed = changed_parts(report, now)
    if not changed:
        return ""
    parts = ", ".join(part.rpartition("/")[2] for part in changed)
    reason = reasons(path.parent).get(path.name, "not measured again")
    return f"older than the code ({parts}): {reason}"
