"""Rows of the tables on what requests' features cost: step times, replies to JSON schemas, mixtures, live audits."""

from typing import Any

from overlap_spec.bench.methods_table import Report

FEATURES = ["model", "requests", "batch", "step, ms", "over the first of its kind"]
REPLIES = ["", "temperature", "valid", "as plain decoding's", "near-ties", "faults", "unexplained", "accept length"]
CONSTRAINED = ["", "batch", "unconstrained step, ms", "constrained step, ms", "ratio"]
MIXTURES = ["batch", "all drafted for, ms", "half of them, ms", "none, ms", "half over the slower"]
SOAK = ["tokens served", "tokens audited", "faults", "near-ties per 10,000", "plain against plain, per 10,000"]
Row = list[Any]


def feature_rows(report: Report) -> list[Row]:
    """One for each kind of request."""
    return [[row["shape"], row["kind"], row["batch"], row["step_ms"], row["ratio"]] for row in report["rows"]]


def reply_rows(report: Report) -> list[Row]:
    """One for each method and temperature: how many of the replies are what they should be."""
    return [_reply_row(row) for row in report["figures"]]


def _reply_row(row: Report) -> Row:
    forced = "" if row.get("proposes_forced", True) else ", forced tokens not proposed"
    different = (row["different"][name] for name in ("near_tie", "fault", "unexplained"))
    equal = f"{row['equal_to_plain']} of {row['requests']}"
    return [row["method"] + forced, row["temperature"], row["valid"], equal, *different, row["accept_length"]]


def constrained_rows(report: Report) -> list[Row]:
    """One for each method and batch size."""
    return [
        [name, row["batch"], 1000 * row["unconstrained_s"], 1000 * row["constrained_s"], row["ratio"]]
        for name, rows in report["step_times"].items()
        for row in rows
    ]


def mixture_rows(report: Report) -> list[Row]:
    """One for each batch size."""
    names = ("on", "half", "off")
    return [[row["batch"], *(row["step_ms"][name] for name in names), row["over_slower"]] for row in report["rows"]]


def soak_rows(report: Report) -> list[Row]:
    """One for the whole run."""
    audit = report["audit"]
    figures, rates = audit["figures"], (audit["near_ties_per_10k"], audit["control_per_10k"])
    return [[f"{report['served_tokens']:,}", f"{figures['tokens']:,}", figures["faults"], *rates]]
