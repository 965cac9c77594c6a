"""Generates the tables of Markdown files from result files: no figure in a document is typed by hand.

A table is placed between `<!-- table: PATH -->` and `<!-- end -->`, where PATH is a JSON file relative to the root of
the repository; the text between them is replaced. `<!-- table: PATH as VIEW -->` selects another table of the report:
`sampled` shows that part of a throughput report, `step_ops` that of the kernels' report, and `methods_summary` has a
row for each method.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from records.reader import reports_of

from documents.age import run_of
from documents.left_out import is_left_out
from documents.throughput_table import (
    NAMES,
    batch_head,
    batch_rows,
    label_of,
    sampled_head,
    sampled_rows,
)
from overlap_spec.bench.methods_records import FULL, Report, against_plain, full_rows, memory_of, name_of, notes
from overlap_spec.bench.workload import sampling_of
from overlap_spec.runtime.source import UNKNOWN

MARKED = re.compile(r"(<!-- table: (\S+)(?: as (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)
UNTOLD = re.compile(r" --(?:commit|output) \S+")  # flags of a command that its table leaves out
CARD = "h200"
DEFAULT_NUMBERS = "tables, throughput_default_8b"
NOT_MEASURED = "*Not measured yet.*"
MATRIX_CELLS = {"equal": "=", "differs": "**differs**", "400": "400"}


def fill(text: str, root: Path) -> str:
    """The text with every marked table regenerated."""

    def replace(match: re.Match[str]) -> str:
        report = json.loads((root / match[2]).read_text())
        return f"{match[1]}{render(report, match[3])}\n{match[4]}"

    return MARKED.sub(replace, text)


def render(report: Report, view: str | None = None) -> str:
    """One report as a Markdown table with its origin below. `view`: another table than the benchmark's default."""
    return "\n".join((*RENDERERS[view or report.get("benchmark", "kernels")](report), "", origin(report)))


def record_table(results: Path, name: str) -> str:
    """The table of a report of the card's record, by `PART, COMMAND`; that it is not measured, if it is not."""
    report = recorded(results, name).get(name)
    return render(report) if report else NOT_MEASURED


def recorded(results: Path, name: str) -> dict[str, Report]:
    """Reports of the card's record, and that of this name from a file of its command until its part is whole."""
    file = results / f"{name.rpartition(' ')[2]}_{CARD}.json"
    return ({name: json.loads(file.read_text())} if file.is_file() else {}) | reports_of(results, CARD)


def origin(report: Report) -> str:
    """Hardware, commit, versions and command: without them a figure means nothing. A report may add a `note`."""
    run = run_of(report) or report
    device = run.get("gpu") or run["device"]
    if device in ("cpu", "none"):
        device = f"{run['cpu']}, {run['num_threads']} threads"
    versions = ", ".join(
        f"{name} {version}" for name, version in run["versions"].items() if name in ("torch", "triton")
    )
    synthetic = "" if report.get("acceptance", "real") in ("real", "") else f"{report['acceptance']}; "
    command = UNTOLD.sub("", run["command"])
    note = f"; {report['note']}" if "note" in report else ""
    return f"{synthetic}{device}; {_commit(run['commit'])}; {versions}; `{command}`{note}"


def _commit(commit: str) -> str:
    """The code that ran: a commit, a commit with changes, or files without a known commit."""
    if commit in ("", UNKNOWN):
        return "commit unknown"
    changed = commit.endswith("+")
    return f"commit {commit.rstrip('+')}" + (" with uncommitted changes" if changed else "")


def _latency(report: Report) -> list[str]:
    baseline = report.get("transformers", {}).get("tokens_per_second")
    rows = []
    for name in ("engine", "plain", "transformers"):
        if name not in report:
            continue
        part = report[name]
        label = label_of(name, part) if name in NAMES else part["engine"]
        ways = [(label, part), *((f"{label}, {sampling_of(row).label}", row) for row in part.get("sampled", []))]
        for line, row in ways:
            ratio = f"{row['tokens_per_second'] / baseline:.2f}" if baseline and row is part else ""
            figures = ("accept_length", "step_ms", "first_token_ms_median")
            rows.append([line, row["tokens_per_second"], ratio, *(row.get(figure, "") for figure in figures)])
    head = ["", "tok/s", "against transformers", "accept length", "step, ms", "first token, ms (median)"]
    return _table(head, rows)


def _throughput(report: Report) -> list[str]:
    return _table(batch_head(report), batch_rows(report))


def _sampled(report: Report) -> list[str]:
    return _table(sampled_head(report), sampled_rows(report))


def _kernels(report: Report) -> list[str]:
    rows = [
        [f"`{row['op']}`", row["model"], row["workload"], row["time_us"], row["gb_per_s"], f"{row['share']:.0%}"]
        for row in report["measurements"]
    ]
    return _table(["op", "model", "workload", "time, us", "GB/s", "share of copy"], rows)


def _step_ops(report: Report) -> list[str]:
    """One row per op and shape, one column per number of rows: time, speed and share in a cell."""
    every = sorted({row["num_rows"] for row in report["step_measurements"]})
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in report["step_measurements"]:
        cell = f"{row['time_us']:.3g} / {row['gb_per_s']:.0f} / {row['share']:.0%}"
        lines.setdefault((row["op"], row["model"], row["workload"]), {})[row["num_rows"]] = cell
    rows = [
        [f"`{op}`", model, workload, *(cells.get(num_rows, "") for num_rows in every)]
        for (op, model, workload), cells in lines.items()
    ]
    return _table(["op", "model", "shape", *map(str, every)], rows)


def _memory_guide(report: Report) -> list[str]:
    rows = [[f"`{row['flag']}`", row["mib"], row["tokens"]] for row in report["figures"]]
    return _table(["turned down", "frees, MiB", "tokens in the KV pool"], rows)


def _methods(report: Report) -> list[str]:
    return [*_table(FULL, full_rows(report)), *_listed(notes(report))]


def _methods_summary(report: Report) -> list[str]:
    return [*_table(_summary_head(report), _summary_rows(report)), *_listed(notes(report))]


def _summary_head(report: Report) -> list[str]:
    """The columns of `_summary_rows`: of each set of prompts the accept length, and a ratio for every batch size."""
    of_prompts = ["accept length", *(f"batch {size}" for size in report["workload"]["batch_sizes"])]
    names = report["workload"]["prompts"].split(",")
    return ["method", *(f"{name}: {column}" for name in names for column in of_prompts), "same answers", *FULL[-2:]]


def _summary_rows(report: Report) -> list[list[Any]]:
    """One row for each method; a batch size's column has the ratio of tok/s to plain's."""
    return [_summary(entry, report) for entry in report["methods"] if entry.get("figures")]


def _summary(entry: Report, report: Report) -> list[Any]:
    """One row. Accept length is that of the smallest batch; answers that differ are those of any batch.

    A speed that the report leaves out is a `-`, which its note explains.
    """

    def speed(row: Report | None) -> str:
        if row is None:
            return ""
        return "-" if is_left_out(report, entry, row) else against_plain(row["ratio"])

    found = {(row["prompts"], row["batch"]): row for row in entry["figures"]}
    cells: list[Any] = []
    for name in report["workload"]["prompts"].split(","):
        rows = [found.get((name, size)) for size in report["workload"]["batch_sizes"]]
        cells.append(next((row["accept_length"] for row in rows if row), ""))
        cells += map(speed, rows)
    same = min(row["identical"] for row in found.values())
    return [name_of(entry), *cells, f"{same:.0%}", *memory_of(entry)]


def _parameter_matrix(report: Report) -> list[str]:
    """A cell for each method and depth; what is refused is so whatever the method, and has a row of its own."""
    columns, depths = report["columns"], [str(depth) for depth in report["depths"]]
    cells = {name: matrix_row(row, columns, depths) for name, row in report["cells"].items()}
    refused = [name for name, row in cells.items() if {cell for of in row.values() for cell in of.values()} == {"400"}]
    rows = [
        [f"`{name}`", *(" ".join(MATRIX_CELLS[cells[name][column][depth]] for depth in depths) for column in columns)]
        for name in cells
        if name not in refused
    ]
    names = ", ".join(f"`{name}`" for name in sorted(refused))
    rows += [[names, *[" ".join("400" for _ in depths)] * len(columns)]] if refused else []
    return _table(["", *columns], rows)


def matrix_row(row: Any, columns: Sequence[str], depths: Iterable[int | str]) -> dict[str, dict[str, str]]:
    """Outcomes of a parameter by column and depth. A file has one word for a row whose outcomes are all the same."""
    known: dict[str, dict[str, str]] = row
    return {column: {str(depth): row for depth in depths} for column in columns} if isinstance(row, str) else known


def _constrained_steps(report: Report) -> list[str]:
    rows = [
        [name, row["batch"], 1000 * row["unconstrained_s"], 1000 * row["constrained_s"], row["ratio"]]
        for name, rows in report["step_times"].items()
        for row in rows
    ]
    return _table(["", "batch", "unconstrained step, ms", "constrained step, ms", "ratio"], rows)


def _trained_drafters(report: Report) -> list[str]:
    """A row for each window of each kind. A position's share: of steps that accepted the guess there.

    Runs of several commits are joined: then each row names its own.
    """
    several = len({row["commit"] for row in report["rows"]}) > 1
    lines: dict[tuple[Any, ...], dict[str, Report]] = {}
    for row in report["rows"]:
        if row["drafter"] != "plain":
            copied = f" and {row['copied']} of n-grams" if "copied" in row else ""
            steps = "" if row["drafter"] == "NGRAM" else row["training_steps"]
            line = (row["drafter"], f"{tuple(row['numbers'])}{copied}", steps, row["commit"] if several else "")
            lines.setdefault(line, {})[row.get("prompts", "chat20")] = row
    sets = list(dict.fromkeys(name for found in lines.values() for name in found))
    about = 4 if several else 3
    rows = [
        [*line[:about], *(cell for name in sets for cell in _of_set(found.get(name)))] for line, found in lines.items()
    ]
    columns = "accept length", "accepted by position", "step, ms", "tok/s", "over plain"
    head = ["", "window", "training steps", "commit"][:about]
    return _table([*head, *(f"{name}: {of}" for name in sets for of in columns)], rows)


def _of_set(row: Report | None) -> list[Any]:
    if row is None:
        return [""] * 5
    shares = " ".join(f"{share:.2f}" for share in row.get("accepted_by_position", []))
    speed = against_plain(row["over_plain"])
    return [row["accept_length"], shares, row["step_ms"], round(row["tokens_per_second"]), speed]


def _listed(sentences: list[str]) -> list[str]:
    """Sentences as a list below a table; nothing if there are none."""
    return ["", *(f"- {sentence}" for sentence in sentences)] if sentences else []


def _table(head: list[str], rows: list[list[Any]]) -> list[str]:
    cells = [head, ["---", *["---:"] * (len(head) - 1)], *([_cell(value) for value in row] for row in rows)]
    return ["| " + " | ".join(row) + " |" for row in cells]


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}".removesuffix(".0")


def _isolation_cost(report: Report) -> list[str]:
    rows = [[row["clients"], f"{row['cached']:.0%}", f"{row['tokens_per_second']:.0f}"] for row in report["figures"]]
    return _table(["keys", "prompt tokens that were cached", "tokens/s"], rows)


_USUAL_CONTEXT = 256  # tokens before a step, which the text above the table names


def _mixtures(report: Report) -> list[str]:
    """Steps, by format and by rows of a forward, whose experts are drawn; then prompts."""
    steps = [
        [name, f"{row['batch']} x {row['width']}", row["routers"], f"{row['distinct']:.1f}", *_over_floor(row)]
        for row in report["rows"]
        if "batch" in row
        for context in [row.get("context", _USUAL_CONTEXT)]
        for name in [row["setup"] + ("" if context == _USUAL_CONTEXT else f", {context:,} before")]
    ]
    prompts = [
        [row["setup"], f"prompt of {row['prompt']:,}", "", "", *_over_floor(row)]
        for row in report["rows"]
        if "prompt" in row
    ]
    return _table(["", "rows", "routers", "experts of a layer", "ms", "floor, ms", "over it"], steps + prompts)


def _hybrids(report: Report) -> list[str]:
    """Steps and prompts of models that bring their own draft."""
    rows = []
    for row in report["rows"]:
        what = f"{row['batch']} x {row['width']}" if "batch" in row else f"prompt of {row['prompt']:,}"
        behind = row["context"] if "batch" in row else row.get("cached", 0)
        rows.append([row["setup"], what, f"{behind:,}", *_over_floor(row)])
    return _table(["", "rows", "tokens before them", "ms", "floor, ms", "over it"], rows)


def _over_floor(row: Report) -> list[str]:
    return [f"{row['ms']:.2f}", f"{row['floor_ms']:.2f}", f"{row['over_floor']:.2f}x"]


def _drafters(report: Report) -> list[str]:
    """A row for each drafter: a step's time by batch size, and how many times the first row's it is."""
    steps: dict[str, dict[int, float]] = {}
    for row in report["rows"]:
        name = f"{row['drafter']} ({', '.join(map(str, row['numbers']))})"
        steps.setdefault(name, {})[row["batch"]] = row["step_ms"]
    first = next(iter(steps.values()))
    cells = [
        [name, *(f"{ms:.3f} ({ms / first[batch]:.2f}x)" for batch, ms in by_batch.items())]
        for name, by_batch in steps.items()
    ]
    return _table(["step, ms", *(f"batch {batch}" for batch in first)], cells)


PRICED = {
    "step": "batch {}",
    "prompt": "a prompt of {:,}",
    "turn": "a turn, {} tokens",
    "preempted": "after a preemption, {} tokens",
}


def _deterministic_price(report: Report) -> list[str]:
    """A row for each cell; how many times as long a step or a prompt takes with the flag, and beside another tree's."""
    found = {(row["kind"], row["size"]) for row in report["rows"]}
    columns = [(kind, size) for kind in PRICED for size in sorted(size for each, size in found if each == kind)]
    cells: dict[str, dict[tuple[str, int], str]] = {}
    for row in report["rows"]:
        widths = "" if "widths" not in row else f" (widths {row['widths']['off']}, {row['widths']['on']})"
        times = f"{row['off_ms']:.4g} to {row['on_ms']:.4g}, **{row['price']:.2f}**"
        if "before_ms" in row:
            times += f"; {row['before_ms']:.4g} before: {row['to_before']['off']:.2f}, **{row['to_before']['on']:.2f}**"
        cells.setdefault(row["cell"] + widths, {})[row["kind"], row["size"]] = times
    head = [PRICED[kind].format(size) for kind, size in columns]
    return _table(["ms", *head], [[cell, *(of_cell.get(at, "") for at in columns)] for cell, of_cell in cells.items()])


BITS = {"smollm2": "SmolLM2", "bf16": "8B", "fp8": "8B, weights in fp8", "int4": "8B, in int4", "kv8": "8B, 8-bit KV"}


def _bits_of_alone(report: Report) -> list[str]:
    """A row for each way of each part: what was compared with the request alone, and what happened meanwhile."""
    names = "requests", "tokens", "clients_that_left", "preempted_total", "cached_tokens_total", "accepted_total"
    rows = [
        [BITS.get(part, part), way, *(figures.get(name, 0) for name in (*names, "kills", "open_at_a_kill", "differ"))]
        for part, of_part in report["parts"].items()
        for way, figures in of_part["ways"].items()
    ]
    head = ["answers", "tokens", "clients left", "preempted", "cached tokens", "guesses accepted", "workers killed"]
    return _table(["model", "method", *head, "requests open then", "differ"], rows)


RENDERERS: dict[str, Callable[[Report], list[str]]] = {
    "latency": _latency,
    "throughput": _throughput,
    "sampled": _sampled,
    "kernels": _kernels,
    "step_ops": _step_ops,
    "memory_guide": _memory_guide,
    "isolation_cost": _isolation_cost,
    "mixtures": _mixtures,
    "hybrids": _hybrids,
    "parameter_matrix": _parameter_matrix,
    "constrained_steps": _constrained_steps,
    "trained_drafters": _trained_drafters,
    "deterministic_price": _deterministic_price,
    "drafters": _drafters,
    "bits_of_alone": _bits_of_alone,
    "methods": _methods,
    "methods_summary": _methods_summary,
}
