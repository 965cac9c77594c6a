"""The table of docs/models.md: every architecture by group of formats, over all drafting methods.

Cells count outcomes of tests/integration/test_model_matrix.py, and of tests/gpu/test_model_matrix_cuda.py on the H200.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from documents.lists import table
from documents.result_tables import origin

NAME = "models"
ON_CPU, ON_GPU = "model_matrix.json", "model_matrix_h200.json"
EQUAL, NOT_RUN = "equal", "not run"
DETAILS = {  # of a refusal, and what stands for them: families share the sentence then
    r"^(tmp\S*|tiny\.gguf): ": "",
    r"^tensor model\.": "tensor ",
    r"found '[^']*'": "found another",
    r"(, expected)? shape \[[^]]*\]": "",
    r"\.(qweight|weight_packed|weight)\b.*": ": not in this format",
    r" as [^;]*;": " in this format;",
}
SIGNS = {EQUAL: "=", "near-ties": "≈"}
GROUPS = {  # name of a column: how the names of its formats begin
    "16 or 32 bits": ("float",),
    "fp8": ("fp8",),
    "awq, gptq": ("awq", "gptq"),
    "int4 (compressed-tensors)": ("int4",),
    "nvfp4, mxfp4": ("nvfp4", "mxfp4"),
    "GGUF": ("GGUF",),
    "a format of one's own": ("int8 toy",),
}

Formats = Mapping[str, str | Mapping[str, str]]  # by format and method: the outcome; of all methods where it is one
Counts = Mapping[str, Counter[str]]  # by format
Report = dict[str, Any]


def models_tables(results: Path) -> str:
    """One table, a sentence for each refusal, and what a column holds. Raises: ValueError for a format without one."""
    on_cpu, on_gpu = _read(results / ON_CPU), _read(results / ON_GPU)
    groups = _groups(on_cpu["formats"])
    refusals: list[str] = []
    rows = []
    for name, formats in on_cpu["cells"].items():
        here, there = (
            _counted(each, len(on_cpu["methods"])) for each in (formats, on_gpu.get("cells", {}).get(name, {}))
        )
        rows.append((f"`{name}`", *(_cell(here, there, names, refusals) for names in groups.values())))
    return "\n".join(
        [
            *(table(("", *groups), rows), ""),
            *(f"{number}. {sentence}" for number, sentence in enumerate(refusals, 1)),
            *([""] if refusals else []),
            *(f"- {group}: {'; '.join(names)}" for group, names in groups.items() if len(names) > 1),
            f"- methods: {'; '.join(on_cpu['methods'])}",
            "",
            *(f"{origin(report)}\n" for report in (on_cpu, on_gpu) if report),
        ]
    )


def _read(path: Path) -> Report:
    found: Report = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _groups(formats: Sequence[str]) -> dict[str, list[str]]:
    """The formats of each column."""
    groups = {group: [each for each in formats if each.startswith(begin)] for group, begin in GROUPS.items()}
    if missing := set(formats) - {each for names in groups.values() for each in names}:
        raise ValueError(f"documents/models.py: GROUPS has no column for {', '.join(sorted(missing))}")
    return groups


def _counted(formats: Formats, num_methods: int) -> Counts:
    """Outcomes of each format; a refusal does not say what it has found."""
    return {
        name: Counter({_short(row): num_methods} if isinstance(row, str) else Counter(map(_short, row.values())))
        for name, row in formats.items()
    }


def _short(outcome: str) -> str:
    for found, instead in DETAILS.items():
        outcome = re.sub(found, instead, outcome)
    return outcome


def _cell(here: Counts, there: Counts, names: Iterable[str], refusals: list[str]) -> str:
    """How many combinations of format and method are exact on the CPU, and what the H200 found of them."""
    counts, on_gpu = (sum((each.get(name, Counter()) for name in names), Counter[str]()) for each in (here, there))
    total, equal = counts.total(), counts.pop(EQUAL, 0)
    for sentence in counts:
        if sentence not in refusals:
            refusals.append(sentence)
    if not total:
        return NOT_RUN
    refused = "refused " + ", ".join(f"({refusals.index(sentence) + 1})" for sentence in counts)
    if not equal:
        return refused
    said = f"{equal} =" if equal == total else f"{equal} of {total} =, {refused}"
    there_said = [f"{on_gpu[outcome]} {sign}" for outcome, sign in SIGNS.items() if on_gpu[outcome]]
    return f"{said}; H200: {', '.join(there_said)}" if there_said else said
