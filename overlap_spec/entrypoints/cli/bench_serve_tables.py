"""The tables of `overlap-spec bench serve`: the hardest figure first, in 80 columns."""

import math
from typing import Any

from rich.console import Console
from rich.table import Table

from overlap_spec.bench.traffic.rate_search import Limits

COLUMNS = 80
VERDICTS = {True: "met", False: "missed", None: "cut off"}
WORST_FIRST = ("max", "p99", "p90", "p50")
FIGURES = {
    "first_token_ms": "first token",
    "time_per_token_ms": "time per token",
    "longest_gap_ms": "longest gap of an answer",
    "gap_ms": "gap between arrivals of tokens",
}


def print_serve(console: Console, report: dict[str, Any]) -> None:
    """For each engine the hardest figure in a sentence, then all of them, the worst first."""
    console.width = min(console.width, COLUMNS)
    limits = Limits(**report["workload"]["limits"])
    for name in ("engine", "plain", "server"):
        if name not in report:
            continue
        part = report[name]
        if "search" in part:
            _print_search(console, name, part["search"])
        else:
            _print_figures(console, name, part, limits)
    for name, ratio in report.get("ratios", {}).items():
        console.print(f"{name}: {ratio}", highlight=False)


def _print_figures(console: Console, name: str, part: dict[str, Any], limits: Limits) -> None:
    _say(console, f"{name}: {hardest(part, limits)}")
    table = Table("ms", *WORST_FIRST)
    for key, label in FIGURES.items():
        table.add_row(label, *(f"{part[key][each]:.1f}" if part[key] else "" for each in WORST_FIRST))
    console.print(table)
    _say(
        console,
        f"{part['answered']} of {part['planned']} answered, {part['cut_off']} cut off, in {part['seconds']} s:"
        f" {part['requests_per_second']} requests/s, {part['goodput']} within limits,"
        f" {part['tokens_per_second']} tok/s",
    )
    if counted := {how for how in part["counted_by"] if how != "usage"}:
        _say(console, f"tokens were counted by {' and '.join(sorted(counted))}: the server sends no running usage")
    for kind, error in part["errors"].items():
        _say(console, f"{error['count']} x {kind}: {error['first']}")
    if part["stopped_because"]:
        _say(console, f"stopped: {part['stopped_because']}")
    for figure, value in part.get("interruption", {}).items():
        _say(console, f"{figure.replace('_', ' ')}: {value}")
    client = part["client"]
    shares = ", ".join(f"{share:.0%}" for share in client["cpu_shares"])
    _say(console, f"client processes used {shares} of a processor")
    if client["may_be_the_bottleneck"]:
        _say(console, "warning: the client may be the bottleneck; give more --client-processes")


def hardest(part: dict[str, Any], limits: Limits) -> str:
    """The figure that is farthest beyond its limit, or nearest to it."""
    shares = {
        f"{label} p99 {part[key]['p99']:.1f} ms, limit {limit:g}": part[key]["p99"] / limit
        for label, key, limit in (
            ("first token", "first_token_ms", limits.first_token_ms),
            ("time per token", "time_per_token_ms", limits.tpot_ms),
        )
        if part[key]
    }
    if not shares:
        return "no answer"
    words, share = max(shares.items(), key=lambda item: item[1])
    return f"{words}: {share:.2f} of it" + (", MISSED" if share > 1 else "")


def _print_search(console: Console, name: str, search: dict[str, Any]) -> None:
    missed = f"missed at {search['missed_at']:g}" if search["missed_at"] else "never missed"
    unfinished = "" if search["complete"] else "; the search was not finished"
    _say(console, f"{name}: {search['requests_per_second']:g} requests/s within limits, {missed}{unfinished}")
    table = Table("requests/s", "", "first token p99", "per token p99", "tok/s", "client")
    for trial in search["trials"]:
        table.add_row(
            f"{trial['rate']:g}",
            VERDICTS[trial["met"]],
            *(f"{trial[key].get('p99', math.nan):.1f}" for key in ("first_token_ms", "time_per_token_ms")),
            f"{trial['tokens_per_second']:g}",
            f"{max(trial['client']['cpu_shares']):.0%}",
        )
    console.print(table)
    for kind, error in {kind: error for trial in search["trials"] for kind, error in trial["errors"].items()}.items():
        _say(console, f"{kind}: {error['first']}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)
