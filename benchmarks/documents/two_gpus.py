"""Engines of two ranks beside those of one, and sums between two GPUs: the tables of both."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from documents.lists import table
from documents.real_traffic import described
from overlap_spec.runtime.source import Source

NAME, NAME_OF_SUMS = "two-h200", "two-h200-sums"  # one page tells of engines, another of kernels
ENGINES, SUMS = "tensor_parallel", "reductions"
FILES = {ENGINES: f"{ENGINES}_h200.json", SUMS: f"{SUMS}_h200.json"}  # where no record has them
RECORD = "h200/tp2-*.json"
NOT_MEASURED = "*Not measured yet.*"
HEAD = ("shape and method", "", "one, ms", "its floor", "two, ms", "their floor", "two / one")
SUMS_HEAD = ("a sum of", "bytes", "one-shot, us", "two-shot, us", "NCCL, us", "taken")
KINDS = {"batch": "batch {:,}", "prompt": "first token of {:,}"}

Report = Mapping[str, Any]


def reports(results: Path) -> dict[str, tuple[str, Report]]:
    """By benchmark the newest report and its file's name: of a record's part, or else a file of its own."""
    parts = [(path, json.loads(path.read_text())) for path in results.glob(RECORD)]
    if parts:
        path, newest = max(parts, key=lambda part: str(part[1]["run"]["when"]))
        return {name: (f"{path.stem}, {name}", report) for name, report in newest["reports"].items()}
    there = {name: results / file for name, file in FILES.items() if (results / file).is_file()}
    return {name: (path.name, json.loads(path.read_text())) for name, path in there.items()}


def two_gpus_tables(results: Path, now: Callable[[], Source], asked: Collection[str] = (ENGINES, SUMS)) -> str:
    """Those that are asked for, each with its origin; of what is not there, that it is not measured."""
    found = reports(results)
    parts = []
    for name, head, lines in ((ENGINES, HEAD, engine_lines), (SUMS, SUMS_HEAD, sum_lines)):
        if name not in asked:
            continue
        if name not in found:
            parts.append(f"{'Engines' if name == ENGINES else 'Sums'}: {NOT_MEASURED}")
            continue
        file, report = found[name]
        parts += [table(head, list(lines(report))), f"- {described(results / file, dict(report), now())}"]
    return "\n\n".join(parts)


def engine_lines(report: Report) -> Iterator[tuple[str, ...]]:
    """A line for each setup and size, and for each engine that did not start."""
    by_ranks: dict[tuple[str, str], dict[int, Report]] = {}
    for row in report["rows"]:
        for kind, said in KINDS.items():
            if kind in row:
                by_ranks.setdefault((row["setup"], said.format(row[kind])), {})[row["ranks"]] = row
    for (setup, size), rows in by_ranks.items():
        one, two = rows.get(1), rows.get(2)
        ratio = f"{two['ms'] / one['ms']:.2f}" if one is not None and two is not None else ""
        yield setup, size, *_cells(one), *_cells(two), ratio
    for row in report["rows"]:
        if "refused" in row:
            yield row["setup"], f"{row['ranks']} ranks", row["refused"].replace("|", "/"), "", "", "", ""


def _cells(row: Report | None) -> tuple[str, str]:
    """Its time and its floor, which is marked where sums over ranks are left out of it."""
    if row is None:
        return "", ""
    left_out = " without sums" if row["sums_ms"] is None else ""
    return f"{row['ms']:,.4g}", f"{row['floor_ms']:,.4g}{left_out}"


def sum_lines(report: Report) -> Iterator[tuple[str, ...]]:
    """By size, ours beside NCCL."""
    for row in report["rows"]:
        times = (f"{row[name]:.1f}" if name in row else "" for name in ("one_shot_us", "two_shot_us", "nccl_us"))
        yield f"{row['rows']:,} x {row['columns']:,}", f"{row['bytes']:,}", *times, row["taken"]
