"""The chart of the README: the time of a decode step beside SGLang's, as SVG, from the committed JSON."""

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path

from overlap_spec.bench.peer import DIRECTORY, PEER, Peer, read_peer
from overlap_spec.bench.peer_rows import peer_rows_of

CHART = "docs/step_time.svg"
PANELS = {
    "Llama-3.1-8B (shape)": ("throughput_8b_h200", "throughput_tree_8b_h200"),
    "SmolLM2-135M": ("throughput_h200", "throughput_tree_h200"),
}
OURS, THEIRS = "#2f6f9f", "#c4c9ce"
WIDTH, PANEL, LABELS, SCALE = 900, 450, 212, 142  # SCALE: pixels of SGLang's bar
TOP, ROW, BAR = 78, 34, 12

NOTE = "Bars: milliseconds. Factor: SGLang's time over ours. EAGLE-3 has (steps, topk, draft tokens)."


@dataclass(frozen=True)
class Row:
    """One pair of bars. Milliseconds."""

    label: str
    ours: float
    theirs: float


def rows_of(root: Path, names: tuple[str, ...], peer: Peer) -> list[Row]:
    """Every step time that both engines have."""
    rows = []
    for name in names:
        report = json.loads((root / f"benchmarks/results/{name}.json").read_text())
        for row in peer_rows_of(report):
            ours, theirs = row.read(report), row.peer_figure(peer)
            if row.step is not None and ours is not None and theirs is not None:
                work, batch = row.step
                rows.append(Row(f"{work.partition(', synthetic')[0]}, batch {batch}", ours, theirs.value))
    return rows


def chart(root: Path) -> str:
    """The SVG; the same for the same files."""
    peer = read_peer(root / DIRECTORY)
    panels = {title: rows_of(root, names, peer) for title, names in PANELS.items()}
    height = TOP + ROW * max(map(len, panels.values())) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        ' font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f"<title>Time of a decode step: overlap-spec and {PEER}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(16, 24, f"Time of a decode step on an NVIDIA H200, bfloat16, greedy: {PEER} = 100%", 'font-size="15"'),
        _bar(16, 36, 12, OURS) + _text(34, 46, "overlap-spec"),
        _bar(130, 36, 12, THEIRS) + _text(148, 46, PEER),
    ]
    for number, (title, rows) in enumerate(panels.items()):
        lines += _panel(number * PANEL, title, rows)
    lines.append(_text(16, height - 10, NOTE, SMALL))
    return "\n".join([*lines, "</svg>"]) + "\n"


SMALL = 'font-size="11" fill="#666"'


def _panel(left: int, title: str, rows: list[Row]) -> list[str]:
    lines = [_text(left + 16, TOP - 8, title, 'font-weight="bold"')]
    for number, row in enumerate(rows):
        top = TOP + number * ROW
        begin, share = left + LABELS, row.ours / row.theirs
        lines += [
            _text(begin - 8, top + 16, row.label, 'text-anchor="end"'),
            _bar(begin, top, SCALE * share, OURS) + _text(begin + SCALE * share + 4, top + 10, _ms(row.ours), SMALL),
            _bar(begin, top + BAR + 1, SCALE, THEIRS) + _text(begin + SCALE + 4, top + 23, _ms(row.theirs), SMALL),
            _text(left + PANEL - 12, top + 16, f"{1 / share:.2f}x", 'text-anchor="end" font-weight="bold"'),
        ]
    return lines


def _bar(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(text)}</text>'


def _ms(value: float) -> str:
    return f"{value:.3g}"
