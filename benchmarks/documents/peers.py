"""Steps and first tokens of other engines on one H200, read from the raw lines in `benchmarks/peers`.

A cell is one thing that was measured. Where a peer measured it several times or in several modes, the shortest time and
the most tok/s count, which is hardest on us.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

LLAMA, SMOLLM2 = "8B", "SmolLM2"
PLAIN, CHAIN, FIRST = "plain", "EAGLE-3 (3, 1, 4)", "first token"
SHORT = 128  # tokens of a random prompt; chats are shorter

Line = Mapping[str, Any]


class Cell(NamedTuple):
    """The work of a model for a batch of requests: decode steps, or `FIRST`. `context`: tokens of a prompt."""

    model: str
    work: str
    batch: int
    context: int = SHORT


@dataclass(frozen=True)
class Figure:
    """`ms`: of a step, or of a call for one token. `speed`: tok/s after the first token; 0 if it was not measured.

    `origin`: the peer's configuration, or our report.
    """

    ms: float
    speed: float = 0.0
    origin: str = ""


Cells = dict[Cell, Figure]


def best(figures: Iterable[tuple[Cell, Figure]]) -> Cells:
    """Of each cell the shortest time, and the most tok/s."""
    found: Cells = {}
    for cell, figure in figures:
        known = found.get(cell, figure)
        found[cell] = replace(min(known, figure, key=lambda each: each.ms), speed=max(known.speed, figure.speed))
    return found


@dataclass(frozen=True)
class Peer:
    """An engine that was measured. `configs`: model and work by configuration. `steps`: fields with a step's time.

    Of `steps` the first one counts that a line has.
    """

    name: str
    configs: Mapping[str, tuple[str, str]]
    steps: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Its lines, from the root of the repository."""
        return f"benchmarks/peers/{self.name.lower().replace(' ', '-')}"

    def cells(self, root: Path) -> Cells:
        """Everything that its lines have; nothing if there are none."""
        files = sorted((root / self.folder).glob("*.jsonl"))
        return self.read(json.loads(text) for file in files for text in file.read_text().splitlines())

    def read(self, lines: Iterable[Line]) -> Cells:
        """Of configurations that are known."""
        return best(each for line in lines if line["config"] in self.configs for each in self._figures(line))

    def _figures(self, line: Line) -> Iterator[tuple[Cell, Figure]]:
        """A `batch` has a step and a first token, a `first` has a first token of random prompts. Others have none."""
        model, work = self.configs[line["config"]]
        if line.get("kind") == "batch":
            context, origin = max(SHORT, round(line["in"])), line["config"]
            step = next(float(line[name]) for name in self.steps if name in line)
            yield Cell(model, work, line["bs"], context), Figure(step, float(line["decode_tok_s"]), origin)
            yield Cell(model, FIRST, line["bs"], context), Figure(round(1000 * line["prefill_s"], 3), 0.0, origin)
        elif line.get("kind") == "first" and model == LLAMA:  # SmolLM2's other prompts are chats
            yield Cell(model, FIRST, line["bs"], line["in"]), Figure(float(line["wall_ms_best"]), 0.0, line["config"])


SGLANG = Peer(
    "SGLang 0.5.14",
    {
        "8b-nospec": (LLAMA, PLAIN),
        "8b-eagle3-3-1-4": (LLAMA, CHAIN),
        "8b-eagle3-3-1-4-sync": (LLAMA, CHAIN),  # with its overlap off
        "8b-eagle3-5-8-32": (LLAMA, "EAGLE-3 tree (5, 8, 32)"),
        "smol-nospec": (SMOLLM2, PLAIN),
        "smol-eagle3-3-1-4": (SMOLLM2, CHAIN),
        "smol-eagle3-3-1-4-sync": (SMOLLM2, CHAIN),
        "smol-eagle3-5-4-16": (SMOLLM2, "EAGLE-3 tree (5, 4, 16)"),
    },
    ("ms_per_verify_step", "ms_per_tok_seq"),
)
VLLM = Peer(
    "vLLM 0.25.1",
    {
        "8b-plain": (LLAMA, PLAIN),
        "8b-eagle3": (LLAMA, CHAIN),  # three guesses
        "smol-plain": (SMOLLM2, PLAIN),
        "smol-eagle3": (SMOLLM2, CHAIN),
    },
    ("ms_per_engine_step",),
)
PEERS = (SGLANG, VLLM)
