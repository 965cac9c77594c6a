"""The tables of docs/models.md: every architecture in every format with every drafting method.

Cells are outcomes of tests/integration/test_model_matrix.py, and of tests/gpu/test_model_matrix_cuda.py on the H200.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from documents.lists import table
from overlap_spec.bench.age import age_note
from overlap_spec.bench.source import Source
from overlap_spec.bench.tables import origin

NAME = "models"
ON_CPU, ON_GPU = "model_matrix.json", "model_matrix_h200.json"
EQUAL, NEAR, NOT_RUN = "equal", "near-ties", "not run"
# By architecture and format: the result with a step of such a model on the H200, and what was timed.
TIMED = {("LlamaForCausalLM", "float"): ("step_8b_h200.json", "8B, bfloat16, EAGLE-3 (3, 1, 4), batch 1")}

Row = Mapping[str, str]
Report = dict[str, Any]


def models_tables(results: Path, now: Source) -> str:
    """A table for each format, with a sentence for each refusal."""
    on_cpu, on_gpu = _read(results / ON_CPU), _read(results / ON_GPU)
    lines: list[str] = []
    for format_ in on_cpu["formats"]:
        of_format = {name: formats.get(format_, {}) for name, formats in on_cpu["cells"].items()}
        refusals = list(dict.fromkeys(cell for row in of_format.values() for cell in row.values() if cell != EQUAL))
        head = ("", *on_cpu["methods"], "exact on the H200", "timed on the H200")
        rows = [
            (
                f"`{name}`",
                *(_cell(row.get(method), refusals) for method in on_cpu["methods"]),
                _exact_there(row, on_gpu.get("cells", {}).get(name, {}).get(format_, {})),
                _timed(results, name, format_, row),
            )
            for name, row in of_format.items()
        ]
        lines += [f"### {format_}", "", table(head, rows), ""]
        lines += [f"{number}. {sentence}" for number, sentence in enumerate(refusals, 1)]
        lines += [""] if refusals else []
    return "\n".join([*lines, *_origins(results, now, {ON_CPU: on_cpu, ON_GPU: on_gpu})])


def _read(path: Path) -> Report:
    found: Report = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _cell(outcome: str | None, refusals: Sequence[str]) -> str:
    if outcome is None:
        return NOT_RUN
    return "=" if outcome == EQUAL else f"refused ({refusals.index(outcome) + 1})"


def _is_refused(row: Row) -> bool:
    return bool(row) and EQUAL not in row.values()


def _exact_there(row: Row, there: Row) -> str:
    """Methods by outcome."""
    if _is_refused(row):
        return "refused"
    counts = Counter(there.values())
    equal, near = counts.pop(EQUAL, 0), counts.pop(NEAR, 0)
    said = [f"= {equal}"] * bool(equal) + [f"up to near-ties {near}"] * bool(near)
    return ", ".join([*said, *(f"{outcome} {count}" for outcome, count in counts.items())]) or NOT_RUN


def _timed(results: Path, name: str, format_: str, row: Row) -> str:
    if _is_refused(row):
        return "refused"
    file, what = TIMED.get((name, format_), ("", ""))
    report = _read(results / file) if file else {}
    if "step" not in report:
        return "not timed"
    return f"{report['step']['step_ms']:.2f} ms a step ({what}; {report['run']['commit']})"


def _origins(results: Path, now: Source, reports: Mapping[str, Report]) -> list[str]:
    return [
        f"{origin(report)}{'; ' + note if (note := age_note(report, results / name, now)) else ''}\n"
        for name, report in reports.items()
        if report
    ]
