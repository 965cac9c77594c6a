"""The table of real traffic: every goal with the newest figure, and where that is from."""

import json
from pathlib import Path

from rows.goals import GOALS, Goal, Measured, Report

from documents.age import age_note
from documents.lists import table
from documents.result_tables import origin
from overlap_spec.runtime.source import Source

NAME = "real-traffic"
FILES = ("real_traffic_h200*.json", "traffic*_h200.json", "width_policy*_h200.json", "scheduler_cpu.json")
HEAD = ["row", "work", "before", "measured", "must", "aim", "verdict", "from"]
NOT_MEASURED = "not measured"


def committed(results: Path) -> dict[str, Report]:
    """The result files that goals are read from, by name."""
    return {path.name: json.loads(path.read_text()) for pattern in FILES for path in sorted(results.glob(pattern))}


def real_traffic_table(results: Path, now: Source) -> str:
    """A row for each goal. Files that a figure is from are described below it, by letter."""
    reports = committed(results)
    found = [goal.measured(reports) for goal in GOALS]
    used = list(dict.fromkeys(name for each in found if each is not None for name in each.files))
    letters = {name: chr(ord("a") + index) for index, name in enumerate(used)}
    rows = [_row(goal, each, letters) for goal, each in zip(GOALS, found, strict=True)]
    origins = [f"- {letters[name]}: {described(results / name, reports[name], now)}" for name in used]
    return "\n".join([table(HEAD, rows), "", *origins])


def _row(goal: Goal, found: Measured | None, letters: dict[str, str]) -> list[str]:
    limits = ["" if limit is None else goal.style.format(limit) for limit in (goal.must, goal.aim)]
    if found is None:
        return [str(goal.row), goal.work, goal.before or NOT_MEASURED, NOT_MEASURED, *limits, "", ""]
    figure = goal.style.format(goal.worst(found.values))
    if goal.cells > 1:
        wanted = f"; {goal.cells} are wanted" if len(found.values) < goal.cells else ""
        figure += f" (worst of {len(found.values)}{wanted})"
    verdict = goal.verdict(found.values)
    origins = ", ".join(letters[name] for name in found.files)
    return [str(goal.row), goal.work, goal.before or NOT_MEASURED, figure, *limits, verdict, origins]


def described(path: Path, report: Report, now: Source) -> str:
    """As below any other table, with a link to the file. A record's report is no file, and its page names its age."""
    if not path.is_file():
        return f"{path.name}: {origin(dict(report))}"
    age = age_note(report, path, now)
    return f"[{path.name}](../benchmarks/results/{path.name}): {origin(dict(report))}" + (f"; {age}" if age else "")
