"""A bar chart of a report of `bench methods`: tok/s of every method over plain decoding's, by batch size.

    pip install --group charts
    python benchmarks/methods_chart.py benchmarks/results/methods_h200.json

writes the .svg beside it, one panel for each set of prompts. The line at 1 is plain decoding: a bar that ends left of
it lost, and its figure is red. What was not measured, or is left out, has no bar; the table says why.
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from documents.left_out import is_left_out

from overlap_spec.bench.methods_records import name_of

TITLES = {"chat20": "chats", "copy20": "prompts with text to copy"}
COLOURS = ("#2f6f9f", "#7fb2d6", "#c9a227", "#8a5a83", "#5a8a5e")
BAR, GAP = 0.26, 0.22  # of a row's height
LOST = "#b03030"


@dataclass(frozen=True)
class Panel:
    """One set of prompts. `ratios[batch][i]` belongs to `methods[i]`; None: not measured, or left out."""

    title: str
    methods: list[str]
    ratios: dict[int, list[float | None]]


def panels(report: dict[str, Any]) -> list[Panel]:
    """What is drawn: every method that has figures, but plain decoding, which is the line at 1."""
    entries = [entry for entry in report["methods"][1:] if entry.get("figures")]
    found = {
        (figures["prompts"], figures["batch"], entry["label"]): float(figures["ratio"])
        for entry in entries
        for figures in entry["figures"]
        if not is_left_out(report, entry, figures)
    }
    return [
        Panel(
            f"{report['workload']['num_prompts'][name]} {TITLES.get(name, name)}",
            [name_of(entry) for entry in entries],
            {
                batch: [found.get((name, batch, entry["label"])) for entry in entries]
                for batch in report["workload"]["batch_sizes"]
            },
        )
        for name in report["workload"]["prompts"].split(",")
    ]


def caption(report: dict[str, Any]) -> str:
    """Hardware and commit."""
    run = report["run"]
    device = run["device"] if run["device"] != "cpu" else f"{run['cpu']}, {run['num_threads']} threads"
    return f"{report['methods'][0]['settings']['model']}, {device}, commit {run['commit']}"


def draw(report: dict[str, Any], path: Path) -> None:
    """Write an SVG that is the same for the same report."""
    from matplotlib import rcParams  # a dependency of the group `charts` only
    from matplotlib.figure import Figure

    rcParams |= {"svg.hashsalt": "methods", "svg.fonttype": "none", "font.size": 9}
    shown = panels(report)
    num_methods, num_bars = len(shown[0].methods), len(shown[0].ratios)
    row = num_bars * BAR + GAP
    figure = Figure(figsize=(10, 1.2 + 0.55 * num_methods * row), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, wspace=0.03)
    axes = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, shown, strict=True):
        for number, (batch, ratios) in enumerate(panel.ratios.items()):
            measured = [(index * row + number * BAR, ratio) for index, ratio in enumerate(ratios) if ratio is not None]
            places, lengths = [place for place, _ in measured], [ratio for _, ratio in measured]
            colour = COLOURS[number % len(COLOURS)]
            bars = axis.barh(places, lengths, BAR * 0.92, color=colour, label=f"batch {batch}")
            for text, ratio in zip(axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=7), lengths, strict=True):
                text.set_color(LOST if ratio < 1 else "black")
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel("tok/s over plain decoding's (1: no gain)")
        axis.set_yticks([index * row + (num_bars - 1) * BAR / 2 for index in range(num_methods)], panel.methods)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=num_bars, frameon=False)
    figure.supxlabel(caption(report), fontsize=7, color="#555555")
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    path.write_text(shortened(path.read_text()))


def shortened(svg: str) -> str:
    """Without indentation, and with two decimals: a point is 0.35 mm."""
    lines = "\n".join(line.strip() for line in svg.splitlines()) + "\n"
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", lines)


if __name__ == "__main__":
    import json

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    given = parser.parse_args().report
    draw(json.loads(given.read_text()), given.with_suffix(".svg"))
