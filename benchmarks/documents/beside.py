"""This engine beside others on one H200: the table, and what README states of it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from documents.lists import table
from documents.own import own_cells, own_reports
from documents.peers import CHAIN, FIRST, LLAMA, PEERS, PLAIN, SHORT, SMOLLM2, Cell, Figure, Peer
from documents.real_traffic import described
from overlap_spec.bench.methods_records import against_plain

NAME = "peers"
HEAD = (
    *("", "batch", *(f"{peer.name}, ms (tok/s)" for peer in PEERS), "ours, ms (tok/s)"),
    *(*(f"{peer.name} / ours" for peer in PEERS), "from"),
)
MODELS, WORKS = (LLAMA, SMOLLM2), (PLAIN, CHAIN)  # first in the table; other works follow by name, `FIRST` at the end


@dataclass(frozen=True)
class Row:
    """A cell that we and at least one peer have measured. `theirs` is None where a peer has not."""

    cell: Cell
    ours: Figure
    theirs: tuple[Figure | None, ...]  # in the order of PEERS

    def ratio(self, peer: Peer) -> float | None:
        """How many times as long as ours its time is."""
        figure = self.theirs[PEERS.index(peer)]
        return None if figure is None else figure.ms / self.ours.ms

    @property
    def is_behind(self) -> bool:
        """A peer takes less time."""
        return any(figure is not None and figure.ms < self.ours.ms for figure in self.theirs)


def compared(root: Path) -> list[Row]:
    """All rows of a checkout, by model, work, context and batch size."""
    ours, theirs = own_cells(own_reports(root / "benchmarks/results")), [peer.cells(root) for peer in PEERS]
    cells = sorted(ours.keys() & set().union(*theirs), key=_place)
    return [Row(cell, ours[cell], tuple(each.get(cell) for each in theirs)) for cell in cells]


def _place(cell: Cell) -> tuple[int, int, str, int, int]:
    work = len(WORKS) + (cell.work == FIRST) if cell.work not in WORKS else WORKS.index(cell.work)
    return MODELS.index(cell.model), work, cell.work, cell.context, cell.batch


def times(rows: Iterable[Row], peer: Peer, models: Sequence[str], first: bool) -> list[float]:
    """How many times as long as ours a peer takes for steps, or for first tokens, of short prompts."""
    wanted = [row for row in rows if row.cell.model in models and (row.cell.work == FIRST) == first]
    ratios = [row.ratio(peer) for row in wanted if row.cell.context == SHORT]
    return [ratio for ratio in ratios if ratio is not None]


def behind(rows: Iterable[Row], first: bool) -> str:
    """The steps, or first tokens, for which a peer takes less time, in words."""
    lost = [row.cell for row in rows if row.is_behind and (row.cell.work == FIRST) == first]
    return "; ".join(_at(label, list(cells)) for label, cells in groupby(lost, key=label_of)) or "none"


def _at(label: str, cells: Sequence[Cell]) -> str:
    batches = [str(cell.batch) for cell in cells]
    return label if batches == ["1"] else f"{label} at batch {', '.join(batches)}"


def speeds(rows: Iterable[Row], cell: Cell) -> Iterator[str]:
    """tok/s of every peer and, at the end, ours. Raises: StopIteration if nothing has this cell."""
    row = next(row for row in rows if row.cell == cell)
    return (f"{figure.speed:,.0f}" if figure is not None else "" for figure in (*row.theirs, row.ours))


def label_of(cell: Cell) -> str:
    """All but the batch size."""
    context = "" if cell.context == SHORT else f", {cell.context:,} tokens"
    return f"{cell.model}, {cell.work}{context}"


def peers_table(root: Path) -> str:
    """A row for each cell, and below the table where our figures are from."""
    rows, results = compared(root), root / "benchmarks/results"
    used = list(dict.fromkeys(row.ours.origin for row in rows))
    letters = {name: chr(ord("a") + index) for index, name in enumerate(used)}
    reports = own_reports(results)
    origins = [f"- {letters[name]}: {described(results / name, reports[name])}" for name in used]
    return "\n".join([table(HEAD, list(_lines(rows, letters))), "", *origins])


def _lines(rows: Sequence[Row], letters: dict[str, str]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        ratios = (row.ratio(peer) for peer in PEERS)
        yield (
            *(label_of(row.cell), str(row.cell.batch), *map(_shown, (*row.theirs, row.ours))),
            *(*("" if ratio is None else against_plain(ratio) for ratio in ratios), letters[row.ours.origin]),
        )


def _shown(figure: Figure | None) -> str:
    if figure is None:
        return ""
    return f"{figure.ms:,.4g}" + (f" ({figure.speed:,.0f})" if figure.speed else "")
