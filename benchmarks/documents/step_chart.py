"""The chart of the README: the time of a decode step beside other engines', as SVG, from what is committed."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from documents.beside import Row, compared
from documents.own import own_reports
from documents.peers import FIRST, LLAMA, PEERS, SHORT, SMOLLM2

CHART = "docs/step_time.svg"
PANELS = {  # by model: its title, and batch sizes
    LLAMA: ("Llama-3.1-8B (shape)", (1, 32, 128, 256)),
    SMOLLM2: ("SmolLM2-135M", (1, 8, 32, 64)),
}
OURS, THEIRS, LOST = "#2f6f9f", ("#c4c9ce", "#d9c48a"), "#b03030"
WIDTH, PANEL, LABELS, SCALE = 900, 450, 212, 142  # SCALE: pixels of the longest bar of a row
TOP, BAR, GAP = 78, 11, 8

NOTES = (
    "Bars: milliseconds. Factor: the other engine's time over ours; below 1 it is red. EAGLE-3 has (steps, topk, draft "
    "tokens).",
    "Both others without prefix cache and tokenizer, and with decode graphs of these batches only; SGLang also without "
    "a CUDA graph for prefills.",
)


def rows_of(rows: Sequence[Row], model: str) -> list[Row]:
    """Steps of a model at short contexts, at the batch sizes of its panel."""
    cells = ((row, row.cell) for row in rows)
    batches = PANELS[model][1]
    return [
        row
        for row, cell in cells
        if cell.model == model and cell.work != FIRST and cell.context == SHORT and cell.batch in batches
    ]


def chart(root: Path) -> str:
    """The SVG; the same for the same files."""
    every = compared(root)
    panels = {title: rows_of(every, model) for model, (title, _) in PANELS.items()}
    heights = [TOP + sum(map(_height, rows)) for rows in panels.values()]
    notes = [*NOTES, f"Ours: {_commits(root, [row for rows in panels.values() for row in rows])}."]
    height = max(heights) + 14 * len(notes) + 16
    title = "Time of a decode step on an NVIDIA H200, bfloat16, greedy"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        ' font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f"<title>Time of a decode step: overlap-spec, {', '.join(peer.name for peer in PEERS)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(16, 24, title, 'font-size="15"'),
    ]
    for number, (name, colour) in enumerate((("overlap-spec", OURS), *zip(_names(), THEIRS, strict=True))):
        lines += [_bar(16 + 130 * number, 36, 12, colour), _text(34 + 130 * number, 46, name)]
    for number, (title, rows) in enumerate(panels.items()):
        lines += _panel(number * PANEL, title, rows)
    lines += [_text(16, max(heights) + 14 * (number + 1), note, SMALL) for number, note in enumerate(notes)]
    return "\n".join([*lines, "</svg>"]) + "\n"


SMALL = 'font-size="11" fill="#666"'


def _names() -> list[str]:
    return [peer.name for peer in PEERS]


def _commits(root: Path, rows: Sequence[Row]) -> str:
    reports = own_reports(root / "benchmarks/results")
    commits = dict.fromkeys(str(reports[row.ours.origin]["run"]["commit"]) for row in rows)
    return f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"


def _height(row: Row) -> int:
    return BAR * (1 + sum(figure is not None for figure in row.theirs)) + GAP


def _panel(left: int, title: str, rows: Sequence[Row]) -> Iterator[str]:
    yield _text(left + 16, TOP - 8, title, 'font-weight="bold"')
    top = TOP
    for row in rows:
        height = _height(row) - GAP
        yield _text(left + LABELS - 8, top + height / 2 + 4, f"{row.cell.work}, batch {row.cell.batch}", RIGHT)
        yield from _bars(left, top, row)
        top += height + GAP


RIGHT = 'text-anchor="end"'


def _bars(left: int, top: int, row: Row) -> Iterator[str]:
    """Ours, and those of the peers that have measured it, each with its factor."""
    figures = [(row.ours.ms, OURS), *((each.ms, of) for each, of in zip(row.theirs, THEIRS, strict=True) if each)]
    scale = SCALE / max(ms for ms, _ in figures)
    for number, (ms, colour) in enumerate(figures):
        begin, down = left + LABELS, top + BAR * number
        yield _bar(begin, down, scale * ms, colour)
        yield _text(begin + scale * ms + 4, down + 9, f"{ms:.3g}", SMALL)
        if number:
            lost = f' fill="{LOST}"' if ms < row.ours.ms else ""
            yield _text(left + PANEL - 12, down + 9, f"{ms / row.ours.ms:.2f}x", f'{RIGHT} font-size="11"{lost}')


def _bar(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.1f}" height="{BAR - 1}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(text)}</text>'
