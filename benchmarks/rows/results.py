"""The result file of real traffic: cells, written one by one, so that a run that is cut off keeps what it has.

A cell belongs to a row and to a part of it (`quantities.py`). Cells of an earlier run stay in the file if it ran the
same code, until they are measured again. A run of other code begins a file of its own, with its commit in its name.
"""

import json
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap_spec.bench.report import describe_run, write_report

FOLDER = "benchmarks/rows"  # measures, beside the script that runs
Json = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One measured figure. `facts`: the measurements that it was computed from."""

    row: int
    part: str
    value: float
    facts: Json


class Results:
    """What was measured so far. `path`: None writes nothing."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._report: Json = {}
        self._kept: list[Json] = []  # of earlier runs
        self._cells: list[Json] = []

    def describe(self, device: str, num_threads: int) -> None:
        """Facts of the run, before its first cell. The first call counts."""
        if self._report:
            return
        run = describe_run(device, num_threads, (FOLDER,))
        self._report = {"benchmark": "real_traffic", "run": run, "settings": {}, "failed": {}}
        if self._path is not None and self._path.is_file() and not self._continue(self._path):
            self._path = self._path.with_stem(f"{self._path.stem}-{run['commit']}")
            if self._path.is_file():
                self._continue(self._path)

    def set_up(self, name: str, settings: Json) -> None:
        """Describe an engine or a server that cells are from."""
        self._report["settings"][name] = settings

    def add(self, cell: Cell) -> None:
        """Add a cell and write the file."""
        self._cells.append({"row": cell.row, "part": cell.part, "value": round(cell.value, 4), **cell.facts})
        print(f"row {cell.row}, {cell.part}: {cell.value:.4g}   {_short(cell.facts)}", flush=True)
        self._write()

    def fail(self, what: str, error: Exception) -> None:
        """Record that a part could not be measured, and go on."""
        traceback.print_exception(error)
        if self._report:
            self._report["failed"][what] = f"{type(error).__name__}: {error}"
            self._write()

    def _continue(self, path: Path) -> bool:
        """Keep an earlier run's cells. False if it measured other code."""
        earlier = json.loads(path.read_text())
        now, then = self._report["run"], earlier["run"]
        if (then["commit"], then["source"], then["device"]) != (now["commit"], now["source"], now["device"]):
            return False
        self._kept = earlier["cells"]
        self._report["settings"] = earlier["settings"]
        commands = dict.fromkeys([*then["command"].split("; "), now["command"]])
        now["command"] = "; ".join(commands)
        return True

    def _write(self) -> None:
        again = {(cell["row"], cell["part"]) for cell in self._cells}
        kept = [cell for cell in self._kept if (cell["row"], cell["part"]) not in again]
        self._report["cells"] = sorted(kept + self._cells, key=lambda cell: int(cell["row"]))
        if self._path is not None:
            write_report(str(self._path), self._report)


def _short(facts: Json) -> str:
    """The facts that fit into a line."""
    return ", ".join(f"{name} {value}" for name, value in facts.items() if not isinstance(value, list | dict))
