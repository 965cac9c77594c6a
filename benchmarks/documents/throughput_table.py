"""The tables of a throughput report: batches and ways of sampling."""

from typing import Any

from overlap_spec.bench.methods_records import Report, against_plain
from overlap_spec.bench.workload import GREEDY, SAMPLED, SamplingMode, sampling_of

Rows = list[list[Any]]

METHOD = "overlap-spec, {method} ({num_steps}, {topk}, {num_draft_tokens})"
NAMES = {"engine": METHOD, "depth1": f"{METHOD}, one step in flight", "plain": "overlap-spec, plain"}
OTHERS = {"depth1": "one step in flight", "plain": "plain"}  # beside the first one


def label_of(name: str, part: Report) -> str:
    """The label of one engine of a report, which tells whether its steps may be narrower than the window."""
    settings = part["settings"]
    return NAMES[name].format(**settings) + (", adaptive" if settings.get("narrower") else "")


def batch_head(report: Report) -> list[str]:
    """The columns of `batch_rows`: tok/s of each engine, and the first one's over each other's."""
    others = [label for name, label in OTHERS.items() if name in report]
    labels = [label_of("engine", report["engine"]), *others]
    return ["batch", *(f"{label}, tok/s" for label in labels), *(f"the first / {label}" for label in others)]


def batch_rows(report: Report) -> Rows:
    """One row for each batch size, greedy."""
    names = ("engine", *(name for name in OTHERS if name in report))
    parts = [{row["batch"]: row["tokens_per_second"] for row in report[name]["batches"]} for name in names]
    first, *others = parts
    return [
        [batch, *(f"{part[batch]:,.0f}" for part in parts), *(against_plain(speed / part[batch]) for part in others)]
        for batch, speed in first.items()
    ]


def sampled_head(report: Report) -> list[str]:
    """The columns of `sampled_rows`: speculation, plain decoding and their ratio for each way of sampling."""
    method = report["engine"]["settings"]["method"]
    columns = ("{way}: {method}, tok/s (accept length)", "plain, tok/s", "ratio")
    return ["", *(column.format(way=way.label, method=method) for way in (GREEDY, *SAMPLED) for column in columns)]


def sampled_rows(report: Report) -> Rows:
    """One row for each batch size, and one for chats; empty if the report has none."""
    engine, plain = (_loads(report[name]) for name in ("engine", "plain"))
    return [
        [load, *(cell for s in (GREEDY, *SAMPLED) for cell in _pair(_with(row, s), _with(plain.get(load), s)))]
        for load, row in engine.items()
    ]


def _loads(part: Report) -> dict[str, Report]:
    loads = {f"batch {row['batch']}": row for row in part["batches"]}
    return loads | ({f"{part['chats']['prompts']}, one by one": part["chats"]} if "chats" in part else {})


def _pair(ours: Report | None, plain: Report | None) -> list[str]:
    if ours is None or plain is None:
        return ["", "", ""]
    speeds = [float(figures["tokens_per_second"]) for figures in (ours, plain)]
    shown = [f"{speeds[0]:.0f} ({ours['accept_length']:.2f})", f"{speeds[1]:.0f}"]
    return [*shown, against_plain(speeds[0] / speeds[1])]


def _with(figures: Report | None, sampling: SamplingMode) -> Report | None:
    """The figures of one way of sampling; the measurement's top-level figures are greedy."""
    if figures is None or sampling == GREEDY:
        return figures
    found = (row for row in figures.get("sampled", []) if sampling_of(row) == sampling)
    return next(found, None)
