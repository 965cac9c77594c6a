"""Tables that show several result files side by side: parts of a step, features of requests, default numbers."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from documents.lists import table
from documents.real_traffic import described
from overlap_spec.bench.methods_records import against_plain

Report = dict[str, Any]
Lines = list[list[str]]

STEPS = {"SmolLM2": "step_h200.json", "8B": "step_8b_h200.json"}
FEATURES = {"SmolLM2": "feature_costs_h200.json", "8B": "feature_costs_8b_h200.json"}
GRIDS = GRID, GRID_FEW, GRID_MORE = tuple(f"never_slower{kind}_h200.json" for kind in ("", "_few", "_more"))
GRID_SMOLLM2 = "never_slower_smollm2_h200.json"
DEFAULTS = {  # of equal cells those of the later file are shown
    **{"2.5 and 1.3": GRID, "1 and 8 requests of these": GRID_FEW, "3.5 and STANDALONE": GRID_MORE},
    **{"SmolLM2": GRID_SMOLLM2, "the last three": "default_drafters_h200.json"},
}
DRAFTS = {
    **{f"8b-{mean}": f"8B, EAGLE-3, {mean}" for mean in ("3.5", "2.5", "1.3")},
    **{"8b-standalone": "8B, STANDALONE of 1B, 2.5", "eagle3-chat": "SmolLM2, EAGLE-3, chats"},
    **{"ngram-chat": "SmolLM2, n-grams, chats", "ngram-copy": "SmolLM2, n-grams, copies"},
    **{"dflash": "8B, DFlash, 2.5", "dspark": "8B, DSpark, 2.5"},
    **{"peagle": "8B, P-EAGLE, 2.5"},
}
ANSWERS = (64, 256)
DRAFT_BATCHES = (1, 8, 24, 32, 100, 128, 200, 256)
FILES = (*STEPS.values(), *FEATURES.values(), *DEFAULTS.values())


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
    """tok/s of whole calls over plain decoding's: a line for each draft; cells have those of short answers first."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for case, batch, num_tokens, ratio in itertools.chain(*map(cells_of, reports)):
        found.setdefault(case, {}).setdefault(batch, {})[num_tokens] = ratio
    return [
        [DRAFTS[case], *(_pair(found[case].get(batch, {})) for batch in DRAFT_BATCHES)]
        for case in DRAFTS
        if case in found
    ]


def _pair(ratios: Mapping[int, float]) -> str:
    shown = [against_plain(ratios[each]).removesuffix(" slower") if each in ratios else "-" for each in ANSWERS]
    return ", ".join(shown) if ratios else ""


def cells_of(report: Report, kind: str = "cell", of: str = "call") -> Iterator[tuple[str, int, int, float]]:
    """Case, requests, tokens of an answer and tok/s over plain decoding's of every call of a kind."""
    for row in report["rows"]:
        if row["kind"] != kind:
            continue
        if isinstance(row["batch"], list):
            yield from ((row["case"], *call) for call in zip(row["batch"], row["num_tokens"], row[of], strict=True))
        else:
            yield row["case"], row["batch"], row["num_tokens"], row["over_plain"][of]["default"]


@dataclass(frozen=True)
class SideBySide:
    """A table with a group of columns for each file. `files`: by the group's name. `first`: heads the first column.

    `grouped`: whether each group has these columns; else all have them in common.
    """

    files: Mapping[str, str]
    first: str
    columns: tuple[str, ...]
    lines: Callable[[Sequence[Report]], Lines]
    grouped: bool = True


TABLES = {
    "step-parts": SideBySide(STEPS, "batch 1", ("ms (share of step)",), step_lines),
    "feature-costs": SideBySide(FEATURES, "requests", ("step, ms", "over the first"), feature_lines),
    "default-numbers": SideBySide(
        *(DEFAULTS, "requests", tuple(map(str, DRAFT_BATCHES)), default_lines), grouped=False
    ),
}


def side_by_side(name: str, results: Path) -> str:
    """The table of that name, with its files below it. Raises: KeyError for a name that is not known."""
    shown = TABLES[name]
    reports = {file: json.loads((results / file).read_text()) for file in shown.files.values()}
    columns = [f"{group}, {column}" for group in shown.files for column in shown.columns]
    head = [shown.first, *(columns if shown.grouped else shown.columns)]
    origins = [f"- {group}: {described(results / file, reports[file])}" for group, file in shown.files.items()]
    return "\n".join([table(head, shown.lines(list(reports.values()))), "", *origins])
