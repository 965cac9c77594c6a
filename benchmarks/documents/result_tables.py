"""Generates the tables of Markdown files from result files: no figure in a document is typed by hand.

A table is placed between `<!-- table: PATH -->` and `<!-- end -->`, where PATH is a JSON file relative to the root of
the repository; the text between them is replaced. `<!-- table: PATH as VIEW -->` selects another table of the report:
`sampled` and `chats` show those parts of a throughput report, `step_ops` shows that part of the kernels' report, and
`methods_summary` has a row for each method and set of prompts.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from documents import features_table as features
from documents.age import age_note
from documents.throughput_table import (
    BATCHES,
    CHATS,
    NAMES,
    batch_rows,
    chat_rows,
    label_of,
    sampled_head,
    sampled_rows,
)
from overlap_spec.bench.methods_table import FULL, Report, full_rows, notes, summary_head, summary_rows
from overlap_spec.bench.workload import sampling_of
from overlap_spec.runtime.source import UNKNOWN, Source, describe_source

MARKED = re.compile(r"(<!-- table: (\S+)(?: as (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)
UNTOLD = re.compile(r" --(?:commit|output) \S+")  # flags of a command that its table leaves out
MATRIX_CELLS = {"equal": "=", "differs": "**differs**", "400": "400"}


def fill(text: str, root: Path, source: Source | None = None) -> str:
    """The text with every marked table regenerated. `source`: the code that runs now, if already described."""
    if not MARKED.search(text):
        return text
    now = source or describe_source()

    def replace(match: re.Match[str]) -> str:
        report = json.loads((root / match[2]).read_text())
        age = age_note(report, root / match[2], now)
        return f"{match[1]}{render(report, match[3], age)}\n{match[4]}"

    return MARKED.sub(replace, text)


def render(report: Report, view: str | None = None, age: str = "") -> str:
    """One report as a Markdown table with its origin below.

    `view`: selects another table than the benchmark's default. `age`: the note on a result that is older than the code.
    """
    lines = RENDERERS[view or report.get("benchmark", "kernels")](report)
    return "\n".join((*lines, "", origin(report) + (f"; {age}" if age else "")))


def origin(report: Report) -> str:
    """Hardware, commit, versions and command: without them a figure means nothing."""
    run = report.get("run", report)
    device = run.get("gpu") or run["device"]
    if device in ("cpu", "none"):
        device = f"{run['cpu']}, {run['num_threads']} threads"
    versions = ", ".join(
        f"{name} {version}" for name, version in run["versions"].items() if name in ("torch", "triton")
    )
    synthetic = "" if report.get("acceptance", "real") in ("real", "") else f"{report['acceptance']}; "
    command = UNTOLD.sub("", run["command"])
    return f"{synthetic}{device}; {_commit(run['commit'])}; {versions}; `{command}`"


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
    return _table(BATCHES, batch_rows(report))


def _sampled(report: Report) -> list[str]:
    return _table(sampled_head(report), sampled_rows(report))


def _chats(report: Report) -> list[str]:
    return _table(CHATS, chat_rows(report))


def _step(report: Report) -> list[str]:
    """The device's parts and the gap add up to the step; host time is concurrent with them."""
    step = report["step"]
    device = {**step["parts_ms"], "gap": step["gap_ms"], "step": step["step_ms"]}
    host = {f"host: {name}": ms for name, ms in step["host_ms"].items()} | {"host, hidden": step["host_hidden_ms"]}
    rows: list[list[Any]] = [[name, ms, f"{ms / step['step_ms']:.1%}"] for name, ms in (device | host).items()]
    if step["efficiency"] is not None:
        rows.append(["step efficiency: floor", step["floor_ms"], f"{step['efficiency']:.1%}"])
    return _table([f"batch {report['workload']['batch']}", "ms", "share of step"], rows)


def _scheduler(report: Report) -> list[str]:
    rows = [[row["batch"], row["mean_ms"], row["median_ms"], row["p99_ms"]] for row in report["batches"]]
    return _table(["batch", "mean, ms", "median, ms", "p99, ms"], rows)


def _draft_noise(report: Report) -> list[str]:
    rows = [
        [row["temperature"], row["draws"], f"{row['accept_length']:.3f} ± {row['standard_error']:.3f}"]
        for row in report["figures"]
    ]
    return _table(["temperature", "guesses drawn with", "accept length"], rows)


def _accept_lengths(report: Report) -> list[str]:
    rows = [[row["method"], row["numbers"], row["prompts"], row["accept_length"]] for row in report["figures"]]
    return _table(["method", "numbers", "prompts", "accept length"], rows)


def _prompt_lookup(report: Report) -> list[str]:
    rows = [[row["method"], row["guesses"], row["tokens_per_forward"]] for row in report["figures"]]
    return _table(["", "guesses of a forward", "tokens a forward"], rows)


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


def _round_trip(report: Report) -> list[str]:
    rows = [
        [
            "polls" if row["polls"] else "sleeps",
            *(row[name] for name in ("batch", "depth", "device_us", "answer_us", "answer_p90_us", "beyond_us")),
        ]
        for row in report["figures"]
    ]
    head = ["", "batch", "steps in flight", "device, us a step", "answer, us (median)", "p90", "step less device, us"]
    return _table(head, rows)


def _memory_guide(report: Report) -> list[str]:
    rows = [[f"`{row['flag']}`", row["mib"], row["tokens"]] for row in report["figures"]]
    return _table(["turned down", "gives back, MiB", "tokens in the KV pool"], rows)


def _step_profile(report: Report) -> list[str]:
    rows = [
        [row["method"], *(row[name] for name in ("batch", "step_ms", "one_at_a_time_ms", "nodes"))]
        for row in report["figures"]
    ]
    return _table(["", "batch", "step, ms", "the same one at a time, ms", "graph nodes"], rows)


def _prefill_profile(report: Report) -> list[str]:
    columns = ("ms", "launch_ms", "products_ms", "attention_ms", "rest_ms", "idle_ms")
    rows = [[row["case"], row["row"], *(row[name] for name in columns)] for row in report["figures"]]
    head = ["step", "row", "ms", "of these launching", "products", "attention", "rest", "idle"]
    return _table(head, rows)


def _methods(report: Report) -> list[str]:
    return [*_table(FULL, full_rows(report)), *_listed(notes(report))]


def _methods_summary(report: Report) -> list[str]:
    return [*_table(summary_head(report), summary_rows(report)), *_listed(notes(report))]


def _parameter_matrix(report: Report) -> list[str]:
    """A cell for each method and depth; what is refused is so whatever the method, and has a row of its own."""
    columns, depths, cells = report["columns"], [str(depth) for depth in report["depths"]], report["cells"]
    refused = [name for name, row in cells.items() if {cell for of in row.values() for cell in of.values()} == {"400"}]
    rows = [
        [f"`{name}`", *(" ".join(MATRIX_CELLS[cells[name][column][depth]] for depth in depths) for column in columns)]
        for name in cells
        if name not in refused
    ]
    names = ", ".join(f"`{name}`" for name in sorted(refused))
    rows += [[names, *[" ".join("400" for _ in depths)] * len(columns)]] if refused else []
    return _table(["", *columns], rows)


def _feature_costs(report: Report) -> list[str]:
    return _table(features.FEATURES, features.feature_rows(report))


def _structured_output(report: Report) -> list[str]:
    return _table(features.REPLIES, features.reply_rows(report))


def _constrained_steps(report: Report) -> list[str]:
    return _table(features.CONSTRAINED, features.constrained_rows(report))


def _mixed_speculation(report: Report) -> list[str]:
    return _table(features.MIXTURES, features.mixture_rows(report))


def _audit_soak(report: Report) -> list[str]:
    return _table(features.SOAK, features.soak_rows(report))


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


RENDERERS: dict[str, Callable[[Report], list[str]]] = {
    "latency": _latency,
    "throughput": _throughput,
    "sampled": _sampled,
    "chats": _chats,
    "scheduler": _scheduler,
    "step": _step,
    "draft_noise": _draft_noise,
    "accept_lengths": _accept_lengths,
    "prompt_lookup": _prompt_lookup,
    "kernels": _kernels,
    "step_ops": _step_ops,
    "round_trip": _round_trip,
    "step_profile": _step_profile,
    "prefill_profile": _prefill_profile,
    "memory_guide": _memory_guide,
    "parameter_matrix": _parameter_matrix,
    "feature_costs": _feature_costs,
    "structured_output": _structured_output,
    "constrained_steps": _constrained_steps,
    "mixed_speculation": _mixed_speculation,
    "audit_soak": _audit_soak,
    "methods": _methods,
    "methods_summary": _methods_summary,
}
