"""Tables that show several result files side by side: parts of a step, features of requests, default numbers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from documents.lists import table
from documents.real_traffic import described
from overlap_spec.bench.methods_records import against_plain

Report = dict[str, Any]
Lines = list[list[str]]

STEPS = {"SmolLM2": "step_h200.json", "8B": "step_8b_h200.json"}
FEATURES = {"SmolLM2": "feature_costs_h200.json", "8B": "feature_costs_8b_h200.json"}
DEFAULTS = {"2.5": "never_slower_8b_2.5_h200.json", "1.3": "never_slower_8b_1.3_h200.json"}
OTHER_DRAFTS = {"answers of 256 at 2.5": "default_drafters_h200.json"}
DRAFTS = {"dflash": "DFlash", "dspark": "DSpark", "peagle": "P-EAGLE", "eagle3": "EAGLE-3"}
FILES = (*STEPS.values(), *FEATURES.values(), *DEFAULTS.values(), *OTHER_DRAFTS.values())


def step_lines(reports: Sequence[Report]) -> Lines:
    """The device's parts and the gap add up to the step; what the host does is beside them."""
    steps = [report["step"] for report in reports]
    parts = [
        {**step["parts_ms"], "gap": step["gap_ms"], "step": step["step_ms"], "host, hidden": step["host_hidden_ms"]}
        | {"floor": step["floor_ms"]}
        for step in steps
    ]
    return [
        [name, *(f"{part[name]:.4g} ({part[name] / part['step']:.1%})" for part in parts)]
        for name in dict.fromkeys(name for part in parts for name in part)
    ]


def feature_lines(reports: Sequence[Report]) -> Lines:
    """Batches of one request, over the first of their kind. Larger ones were disturbed in too many of their rounds."""
    found = [{row["kind"]: row for row in report["rows"] if row["batch"] == 1} for report in reports]
    return [
        [kind, *(cell for rows in found for cell in (f"{rows[kind]['step_ms']:.4g}", f"{rows[kind]['ratio']:.2f}"))]
        for kind in found[0]
    ]


def default_lines(reports: Sequence[Report]) -> Lines:
    """tok/s of whole calls over plain decoding's, by batch and by the length of answers; then those of other drafts."""
    first = [row for row in reports[0]["rows"] if row["kind"] == "cell"]
    batches, lengths = (sorted({row[key] for row in first}) for key in ("batch", "num_tokens"))
    columns = [
        {row["batch"]: row["over_plain"]["call"]["default"] for row in report["rows"]
         if (row["kind"], row[key]) == ("cell", wanted)}
        for report in reports
        for key, wanted in (
            [("case", draft) for draft in DRAFTS] if report.get("benchmark") == "default_drafters"
            else [("num_tokens", length) for length in lengths]
        )
    ]  # fmt: skip
    return [
        [str(batch), *(against_plain(ratios[batch]) if batch in ratios else "" for ratios in columns)]
        for batch in batches
    ]


@dataclass(frozen=True)
class SideBySide:
    """A table with a group of columns for each file. `files`: by the group's name. `first`: heads the first column.

    `own`: the columns of a group that has others.
    """

    files: Mapping[str, str]
    first: str
    columns: tuple[str, ...]
    lines: Callable[[Sequence[Report]], Lines]
    own: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


TABLES = {
    "step-parts": SideBySide(STEPS, "batch 1", ("ms (share of step)",), step_lines),
    "feature-costs": SideBySide(FEATURES, "requests", ("step, ms", "over the first"), feature_lines),
    "default-numbers": SideBySide(
        DEFAULTS | OTHER_DRAFTS,
        *("batch", ("answers of 64", "answers of 256"), default_lines),
        dict.fromkeys(OTHER_DRAFTS, tuple(DRAFTS.values())),
    ),
}


def side_by_side(name: str, results: Path) -> str:
    """The table of that name, with its files below it. Raises: KeyError for a name that is not known."""
    shown = TABLES[name]
    reports = {file: json.loads((results / file).read_text()) for file in shown.files.values()}
    columns = [(group, column) for group in shown.files for column in shown.own.get(group, shown.columns)]
    head = [shown.first, *(f"{group}, {column}" for group, column in columns)]
    names = {file: [group for group, own in shown.files.items() if own == file] for file in reports}
    origins = [f"- {', '.join(names[file])}: {described(results / file, reports[file])}" for file in reports]
    groups = [of_group(group, reports[file]) for group, file in shown.files.items()]
    return "\n".join([table(head, shown.lines(groups)), "", *origins])


def of_group(group: str, report: Report) -> Report:
    """The report without the rows of other acceptances, if it has some."""
    own = [row for row in report.get("rows", ()) if row.get("case") == f"8b-{group}"]
    return report | {"rows": own} if own else report
