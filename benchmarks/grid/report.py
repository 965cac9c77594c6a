"""The report of the grid: its rows in rounds, what it lacks, and the rows of several reports in columns."""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grid.calls import Row
from grid.cases import FALLS, Case
from overlap_spec.bench.report import write_report

DEFAULT, PLAIN, AGAIN = "default", "plain", "again"
SPEEDS, OF_ROW = ("call", "answers", "engine"), ("case", "kind", "batch", "num_tokens")


@dataclass
class Run:
    """The report so far, and until when there is time. `rounds`: of a cell."""

    report: Row
    output: str | None
    ends_at: float
    rounds: int
    longest_s: float = 0.0  # of a call so far

    def has_time(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self.ends_at

    def add(self, row: Row) -> None:
        """In the place of one that is there, with fewer rounds."""
        rows = self.report["rows"]
        if (before := self.row(*(row[key] for key in OF_ROW))) is not None:
            rows.remove(before)
        rows.append(row)
        over = row["over_plain"]
        figures = {name: "/".join(f"{over[of][name]:.3f}" for of in SPEEDS) for name in over["call"]}
        ratios = " ".join(map(" ".join, figures.items()))
        print(f"{row['case']:16} {row['kind']:8} {row['batch']:4d} x {row['num_tokens']:3d}  {ratios}", flush=True)
        if self.output is not None:
            write_report(self.output, self.report)

    def row(self, *wanted: str | int) -> Row | None:
        """The one of that case, kind, batch and length."""
        found = (row for row in self.report["rows"] if tuple(row[key] for key in OF_ROW) == wanted)
        return next(found, None)

    def rounds_of(self, *wanted: str | int) -> int:
        """How often it was measured."""
        row = self.row(*wanted)
        return 0 if row is None else max(map(len, row["runs"].values()))


def row_of(case: str, kind: str, batch: int, num_tokens: int, runs: Mapping[str, list[Row]]) -> Row:
    """`over_plain`: medians over plain decoding's; of `again`, its own slowest round: the noise."""
    plain, over = {}, {}
    for of in SPEEDS:
        speeds = {name: [run[of] for run in found] for name, found in runs.items()}
        plain[of] = statistics.median(speeds[PLAIN])
        found = {name: statistics.median(each) for name, each in speeds.items() if name != PLAIN}
        if len(speeds[PLAIN]) > 1:
            found[AGAIN] = min(speeds[PLAIN])
        over[of] = {name: round(speed / plain[of], 4) for name, speed in found.items()}
    about = {"case": case, "kind": kind, "batch": batch, "num_tokens": num_tokens}
    return {**about, "plain": plain, "over_plain": over, "runs": dict(runs)}


def defaults_are_whole(name: str, case: Case, run: Run) -> bool:
    """Whether the report has every row of default numbers, as often as it is measured."""
    if any(run.rounds_of(name, "cell", *cell) < run.rounds for cell in case.cells()):
        return False
    long, short = max(case.lengths), min(case.lengths)
    others = [(f"turn {index}", batch, long) for index, batch in enumerate(case.turns)]
    others += [(kind, batch, long) for kind in FALLS for batch in case.falling]
    others += [("arrivals", batch, short) for batch in case.batches[1::2]]
    return bool(case.only) or all(run.row(name, *row) is not None for row in others)


def is_whole(name: str, case: Case, run: Run) -> bool:
    """Whether the report has these, and all of fixed numbers."""
    kinds = [*case.fixed, *(key.replace("fixed", "low") for key in case.fixed if case.of_low)]
    batches = [batch for batch in case.fixed_batches if batch in case.batches and not case.only]
    fixed = [(kind, batch, max(case.lengths)) for kind in kinds for batch in batches]
    return defaults_are_whole(name, case, run) and all(run.row(name, *row) is not None for row in fixed)


def joined(files: Sequence[str]) -> Row:
    """The rows of several reports, by case and kind: what each call has, in columns, and no single runs."""
    reports = [json.loads(Path(file).read_text()) for file in files]
    if len({(each["run"]["device"], json.dumps(each["run"].get("source"))) for each in reports}) > 1:
        raise SystemExit("these reports are of different devices or files")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in (row for each in reports for row in each["rows"]):
        kind = "turns" if row["kind"].startswith("turn ") else row["kind"]
        groups.setdefault((row["case"], kind), []).append(row)
    rows = [{"case": case, "kind": kind} | columns_of(found) for (case, kind), found in groups.items()]
    engines = {case: found for each in reports for case, found in each["engines"].items()}
    starts = {case: {key: of["start_s"] for key, of in found.items()} for case, found in engines.items()}
    return {"benchmark": "never_slower", "run": reports[0]["run"], "starts_s": starts, "rows": rows}


def columns_of(rows: Sequence[Row]) -> Row:
    """`again`: plain decoding's slowest round; `plain`: its tokens per second, by the engine's counts."""
    found: Row = {name: [row[name] for row in rows] for name in ("batch", "num_tokens")}
    found |= {
        "rounds": min(len(row["runs"][PLAIN]) for row in rows),
        "plain": [round(row["plain"]["engine"]) for row in rows],
    }
    for of in ("call", "engine"):
        ratios = [row["over_plain"][of] for row in rows]
        found[of] = [next(ratio for name, ratio in each.items() if name != AGAIN) for each in ratios]
        if all(AGAIN in each for each in ratios):
            found[f"{of}_again"] = [each[AGAIN] for each in ratios]
    return found
