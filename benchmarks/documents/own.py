"""Our own figures in the cells of other engines (`peers.py`). `own_reports` chooses where they are from."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from records.reader import newest_complete, reports_of

from documents.peers import CHAIN, FIRST, LLAMA, PLAIN, SMOLLM2, Cell, Cells, Figure

CARD = "h200"
WITHOUT_A_RECORD = (  # files of `benchmarks/results`
    *("throughput_h200.json", "throughput_tree_h200.json", "throughput_chain_h200.json", "real_traffic_h200*.json"),
)
MODELS = {"llama-3.1-8b": LLAMA, "smollm2": SMOLLM2}  # by the last part of a model's path

Report = Mapping[str, Any]
Found = Iterator[tuple[Cell, Figure]]


def own_reports(results: Path) -> dict[str, Report]:
    """Reports by name: those of the card's record, and before it is complete also files of earlier code.

    Raises: MixedCards for a record with files of another card.
    """
    measured = reports_of(results, CARD)
    if newest_complete(results, CARD) is not None:
        return dict(measured)
    paths = [path for pattern in WITHOUT_A_RECORD for path in sorted(results.glob(pattern))]
    return {path.name: json.loads(path.read_text()) for path in paths} | measured


def own_cells(reports: Mapping[str, Report]) -> Cells:
    """Of each cell the newest figure of the first kind of report that has it, in the order of `READERS`."""
    found: Cells = {}
    for benchmark, read in READERS.items():
        own = [(name, report) for name, report in reports.items() if report.get("benchmark") == benchmark]
        for name, report in sorted(own, key=lambda named: str(named[1]["run"]["when"]), reverse=True):
            for cell, figure in read(report):
                found.setdefault(cell, replace(figure, origin=name))
    return found


def _traffic(report: Report) -> Found:
    """Rows 2 and 6: first tokens of long prompts, and steps behind them. Row 15: one token of new prompts."""
    for each in report["cells"]:
        if each["row"] == 2:
            yield Cell(LLAMA, FIRST, 1, each["prompt_tokens"]), Figure(each["value"])
        elif each["row"] == 6:
            yield Cell(LLAMA, CHAIN, 1, each["context"]), Figure(each["value"])
        elif each["row"] == 15:
            yield Cell(each["part"].split()[0], FIRST, each["prompts"]), Figure(each["value"])


def _throughput(report: Report) -> Found:
    """First tokens are the shorter ones of the chain's engine and of plain decoding, as a peer's are of its modes."""
    first: dict[Cell, float] = {}
    for part in ("engine", "plain"):
        settings = report.get(part, {}).get("settings", {})
        work, model = _work(settings), MODELS.get(settings.get("model", "").rstrip("/").rpartition("/")[2])
        if work is not None and model is not None:
            for row in report[part]["batches"]:
                yield Cell(model, work, row["batch"]), Figure(row["step_ms"], _speed(row))
                cell, seconds = Cell(model, FIRST, row["batch"]), float(row["one_token_wall_s"])
                if work == CHAIN or cell in first:
                    first[cell] = min(first.get(cell, seconds), seconds)
    yield from ((cell, Figure(round(1000 * seconds, 3))) for cell, seconds in first.items())


def _speed(row: Report) -> float:
    """tok/s after the first token of each request."""
    return float((row["num_tokens"] - row["batch"]) / (row["wall_s"] - row["one_token_wall_s"]))


def _work(settings: Report) -> str | None:
    """None for steps of changing widths, and for what no peer ran."""
    if settings.get("method") == "NONE":
        return PLAIN
    if settings.get("method") != "EAGLE3" or settings["narrower"]:
        return None
    numbers = ", ".join(str(settings[name]) for name in ("num_steps", "topk", "num_draft_tokens"))
    return f"EAGLE-3{' tree' if settings['topk'] > 1 else ''} ({numbers})"


READERS: dict[str, Callable[[Report], Found]] = {
    "real_traffic": _traffic,
    "throughput": _throughput,
}
