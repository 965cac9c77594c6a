"""The tables of a throughput report: batches, sampling, chats."""

from collections.abc import Iterator
from typing import Any

from overlap_spec.bench.methods_table import Report, against_plain
from overlap_spec.bench.workload import GREEDY, SAMPLED, SamplingMode, sampling_of

Rows = list[list[Any]]

METHOD = "overlap-spec, {method} ({num_steps}, {topk}, {num_draft_tokens})"
NAMES = {"engine": METHOD, "depth1": f"{METHOD}, one step in flight", "plain": "overlap-spec, plain"}

BATCHES = ["", "batch", "tok/s", "streamed tok/s", "accept length", "step, ms"]
CHATS = [
    *("", "sampling", "tok/s", "answers that ended", "tok/s of those", "tokens", "accept length", "step, ms"),
    "first token, ms (median)",
]


def label_of(name: str, part: Report) -> str:
    """The label of one engine of a report, which tells whether its steps may be narrower than the window."""
    settings = part["settings"]
    return NAMES[name].format(**settings) + (", adaptive" if settings.get("narrower") else "")


def batch_rows(report: Report) -> Rows:
    """One row for each engine and batch size, greedy."""
    figures = ("batch", "tokens_per_second", "streamed_tokens_per_second", "accept_length", "step_ms")
    return [  # plain decoding has no accept length
        [label, *(batch[figure] or "" for figure in figures)]
        for label, part in _parts(report)
        for batch in part["batches"]
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


def chat_rows(report: Report) -> Rows:
    """One row for each engine and way of sampling."""
    figures = ("tokens_per_second", "num_ended", "ended_tokens_per_second", "num_tokens", "accept_length", "step_ms")
    return [
        [label, sampling.label, *(_chat_cell(row, figure) for figure in (*figures, "first_token_ms_median"))]
        for label, part in _parts(report)
        for sampling in (GREEDY, *SAMPLED)
        if (row := _with(part.get("chats"), sampling)) is not None
    ]


def _chat_cell(row: Report, figure: str) -> Any:
    value = row.get(figure)
    if value is None:
        return ""
    return f"{value} of {row['num_prompts']}" if figure == "num_ended" else value


def _with(figures: Report | None, sampling: SamplingMode) -> Report | None:
    """The figures of one way of sampling; the measurement's top-level figures are greedy."""
    if figures is None or sampling == GREEDY:
        return figures
    found = (row for row in figures.get("sampled", []) if sampling_of(row) == sampling)
    return next(found, None)


def _parts(report: Report) -> Iterator[tuple[str, Report]]:
    return ((label_of(name, report[name]), report[name]) for name in ("engine", "depth1", "plain") if name in report)
