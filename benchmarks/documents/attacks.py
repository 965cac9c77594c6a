"""The table of attacks: what a victim waits at worst beside each, from the summary of `tests/attacks`."""

import json
from pathlib import Path
from typing import Any

from documents.lists import table

TABLES = {"attacks": "attacks_cpu", "attacks-h200": "attacks_h200"}  # by name, the summary
HEAD = ("attack", "rule", "what the attacker gets", "servers", "worst wait, ms", "beside an honest request, ms", "MiB")
Row = dict[str, Any]


def attacks_table(summary: Path) -> str:
    """One row a case; figures of several servers in the order of their names."""
    found = json.loads(summary.read_text())["attacks"]
    rows = [_row(name, of_servers) for name, of_servers in sorted(found["cases"].items(), key=_order)]
    return table(HEAD, rows) + f"\n\n{_origin(found['run'], found['cases'])}"


def _order(case: tuple[str, dict[str, Row]]) -> tuple[int, int, str]:
    name, of_servers = case
    row = next(iter(of_servers.values()))
    return row["rule"], row["finding"] or 1000, name


def _row(name: str, of_servers: dict[str, Row]) -> tuple[str, ...]:
    servers = sorted(of_servers, key=("plain", "eagle3", "ngram", "small", "open").index)
    rows = [of_servers[server] for server in servers]
    failed = [server for server in servers if of_servers[server]["failures"]]
    outcomes = list(dict.fromkeys(row["outcome"] for row in rows if row["outcome"]))
    return (
        name.replace("-", " "),
        str(rows[0]["rule"]),
        "; ".join(outcomes) + (f" **fails on {', '.join(failed)}**" if failed else ""),
        ", ".join(servers),
        " / ".join(f"{_worst(row)}" for row in rows),
        " / ".join(f"{_worst(row, 'honest_')}" for row in rows),
        str(max(row["peak_mib"] for row in rows)),
    )


def _worst(row: Row, of: str = "") -> int:
    """Of the stream and of small requests."""
    return int(max(row[f"{of}gap_ms"], row[f"{of}small_ms"]))


def _origin(run: Row, cases: dict[str, dict[str, Row]]) -> str:
    versions = f"Python {run['python']}, torch {run['versions']['torch']}"
    commits = ", ".join(sorted({row["commit"] for of_servers in cases.values() for row in of_servers.values()}))
    machine = f"{run['cpu']}, two busy cores" if run["device"] == "cpu" else run["device"]
    return f"{len(cases)} attacks; {machine}; commit {commits}; {versions}; `{run['command']}`"
