"""Engines of two ranks beside those of one, and sums between two GPUs: the tables of both."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from records.reader import reports_of

from documents.lists import table
from documents.real_traffic import described

NAME, NAME_OF_SUMS = "two-h200", "two-h200-sums"  # one page tells of engines, another of kernels
ENGINES, SUMS = "tensor_parallel", "reductions"
FILES = {ENGINES: f"{ENGINES}_h200.json", SUMS: f"{SUMS}_h200.json"}  # where no record has them
CARD, PART = "h200", "tp2"
NOT_MEASURED = "*Not measured yet.*"
SUMS_HEAD = ("a sum of", "bytes", "one-shot, us", "two-shot, us", "NCCL, us", "taken")
KINDS = {"batch": "batch {:,}", "prompt": "first token of {:,}"}

Report = Mapping[str, Any]


def reports(results: Path) -> dict[str, tuple[str, Report]]:
    """By benchmark the newest report and its name: of the record's part, or else a file of its own."""
    there = {name: results / file for name, file in FILES.items() if (results / file).is_file()}
    files = {name: (path.name, json.loads(path.read_text())) for name, path in there.items()}
    measured = ((name, f"{PART}, {name}") for name in FILES)
    record = reports_of(results, CARD)
    return files | {name: (known, record[known]) for name, known in measured if known in record}


def two_gpus_tables(results: Path, asked: Collection[str] = (ENGINES, SUMS)) -> str:
    """Those that are asked for, each with its origin; of what is not there, that it is not measured."""
    found = reports(results)
    parts = []
    for name, head, lines in ((ENGINES, engine_head, engine_lines), (SUMS, lambda _: SUMS_HEAD, sum_lines)):
        if name not in asked:
            continue
        if name not in found:
            parts.append(f"{'Engines' if name == ENGINES else 'Sums'}: {NOT_MEASURED}")
            continue
        file, report = found[name]
        parts += [table(head(report), list(lines(report))), f"- {described(results / file, dict(report))}"]
    return "\n\n".join(parts)


def engine_head(report: Report) -> tuple[str, ...]:
    return "shape and method", *(KINDS[kind].format(size) for kind, size in sizes_in(report))


def sizes_in(report: Report) -> list[tuple[str, int]]:
    """Batches, then lengths of prompts."""
    return sorted({(kind, row[kind]) for row in report["rows"] for kind in KINDS if kind in row})


def engine_lines(report: Report) -> Iterator[tuple[str, ...]]:
    """A line for each setup, and for each engine that did not start."""
    sizes = sizes_in(report)
    rows = report["rows"]
    found = {(row["setup"], kind, row[kind], row["ranks"]): row for row in rows for kind in KINDS if kind in row}
    for setup in dict.fromkeys(row["setup"] for row in rows):
        cells = [cell(found.get((setup, *size, 1)), found.get((setup, *size, 2))) for size in sizes]
        if any(cells):
            yield setup, *cells
    for row in rows:
        if "refused" in row:
            said = f"{row['ranks']} ranks: {row['refused']}".replace("|", "/")
            yield row["setup"], said, *("" for _ in sizes[1:])


def cell(one: Report | None, two: Report | None) -> str:
    """What one GPU takes and what two take, each with its floor, and the second over the first."""
    said = " / ".join("-" if row is None else timed(row) for row in (one, two))
    if one is None or two is None:
        return "" if one is two else said
    return f"{said}: {two['ms'] / one['ms']:.2f}"


def timed(row: Report) -> str:
    """A time and its floor, which is marked where sums over ranks are left out of it."""
    left_out = " without sums" if row["sums_ms"] is None else ""
    return f"{row['ms']:,.4g} ({row['floor_ms']:,.4g}{left_out})"


def sum_lines(report: Report) -> Iterator[tuple[str, ...]]:
    """By size, ours beside NCCL."""
    for row in report["rows"]:
        times = (f"{row[name]:.1f}" if name in row else "" for name in ("one_shot_us", "two_shot_us", "nccl_us"))
        yield f"{row['rows']:,} x {row['columns']:,}", f"{row['bytes']:,}", *times, row["taken"]
