"""The table of real traffic: every quantity with the newest figure, and where that is from."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from records.reader import reports_of
from rows.quantities import QUANTITIES, Measured, Quantity, Report

from documents.lists import table
from documents.result_tables import origin

NAME = "real-traffic"
CARD = "h200"
FILES = ("real_traffic_h200*.json", "traffic*_h200.json")
HEAD = ["work", "measured", "from"]
NOT_MEASURED = "not measured"

Found = Mapping[Quantity, Measured | None]


def committed(results: Path) -> dict[str, Report]:
    """The reports that quantities are read from, by name: files, and parts of the card's record."""
    files = {path.name: json.loads(path.read_text()) for pattern in FILES for path in sorted(results.glob(pattern))}
    return files | {name: each for name, each in reports_of(results, CARD).items() if "benchmark" in each}


def real_traffic_table(results: Path) -> str:
    """A row for each kind of work. Files that a figure is from are described below it, by letter."""
    reports = committed(results)
    found = {quantity: quantity.measured(reports) for quantity in QUANTITIES}
    used = list(dict.fromkeys(name for each in found.values() if each is not None for name in each.files))
    letters = {name: chr(ord("a") + index) for index, name in enumerate(used)}
    rows = [_row(work, list(own), found, letters) for work, own in groupby(QUANTITIES, key=lambda each: each.work)]
    origins = [f"- {letters[name]}: {described(results / name, reports[name])}" for name in used]
    return "\n".join([table(HEAD, rows), "", *origins])


def _row(work: str, own: Sequence[Quantity], found: Found, letters: dict[str, str]) -> list[str]:
    measured = [each for quantity in own if (each := found[quantity]) is not None]
    names = dict.fromkeys(letters[name] for each in measured for name in each.files)
    return [work, "; ".join(_figure(quantity, found[quantity]) for quantity in own), ", ".join(names)]


def _figure(quantity: Quantity, found: Measured | None) -> str:
    name = f"{quantity.of}: " if quantity.of else ""
    if found is None:
        return name + NOT_MEASURED
    worst = quantity.worst(found.values)
    figure = quantity.style.format(worst)
    if quantity.is_slower(worst):
        figure = f"**{figure}** slower"
    if quantity.cells > 1:
        wanted = f"; {quantity.cells} are wanted" if len(found.values) < quantity.cells else ""
        figure += f" (worst of {len(found.values)}{wanted})"
    return name + figure


def described(path: Path, report: Report) -> str:
    """As below any other table, with a link to the file. A record's report is no file."""
    name = f"[{path.name}](../benchmarks/results/{path.name})" if path.is_file() else path.name
    return f"{name}: {origin(dict(report))}"
