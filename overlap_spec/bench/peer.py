"""Figures of SGLang 0.5.14 on the same kind of GPU, read from its log lines in `benchmarks/peers/sglang-0.5.14`.

A configuration has up to two modes: overlap on, and off (`-sync`). At each batch size the comparison takes SGLang's
better measured mode. For plain decoding and trees only overlap on was measured.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEER = "SGLang 0.5.14"
DIRECTORY = Path("benchmarks/peers/sglang-0.5.14")  # in a checkout
SYNC = "-sync"  # suffix of a configuration that ran with its overlap off

Line = dict[str, Any]


@dataclass(frozen=True)
class PeerFigure:
    """A figure and its origin. `lines`: the names in the files of the configurations that it was read from."""

    value: float
    lines: str


class Peer:
    """Figures from the lines that describe batches; None where nothing was measured."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._batches = [line for line in lines if line.get("kind") == "batch"]

    def step_ms(self, config: str, batch: int) -> PeerFigure | None:
        """Time of a decode step: a verify step, or a plain one."""
        return self._best(config, batch, _step_ms, min)

    def one_token_ms(self, config: str, batch: int) -> PeerFigure | None:
        """The smallest wall time of three calls for one token."""
        return self._best(config, batch, lambda line: round(1000 * line["prefill_s"], 3), min)

    def speed(self, config: str, batch: int) -> PeerFigure | None:
        """tok/s over the whole wall time, prefill included."""
        return self._best(config, batch, _speed, max)

    def worst_ratio(self, config: str, over: str, batches: Sequence[int]) -> PeerFigure | None:
        """The smallest ratio of two configurations' tok/s over all of these batch sizes."""
        ratios = []
        for batch in batches:
            ours, others = self.speed(config, batch), self.speed(over, batch)
            if ours is None or others is None:
                return None
            lines = f"{ours.lines} / {others.lines}, batch {batch}"
            ratios.append(PeerFigure(ours.value / others.value, lines))
        return min(ratios, key=lambda ratio: ratio.value, default=None)

    def overlap_ratio(self, config: str, batch: int) -> PeerFigure | None:
        """tok/s with the overlap on over tok/s with it off."""
        by_name = {line["config"]: _speed(line) for line in self._modes(config, batch)}
        if len(by_name) < 2:
            return None
        return PeerFigure(by_name[config] / by_name[config + SYNC], f"{config} / {config}{SYNC}")

    def _best(
        self, config: str, batch: int, read: Callable[[Line], float], pick: Callable[..., PeerFigure]
    ) -> PeerFigure | None:
        figures = [PeerFigure(read(line), line["config"]) for line in self._modes(config, batch)]
        return pick(figures, key=lambda figure: figure.value) if figures else None

    def _modes(self, config: str, batch: int) -> list[Line]:
        return [line for line in self._batches if line["bs"] == batch and line["config"] in (config, config + SYNC)]


def _step_ms(line: Line) -> float:
    return float(line["ms_per_verify_step" if "ms_per_verify_step" in line else "ms_per_tok_seq"])


def _speed(line: Line) -> float:
    return float(line["tok_s"])


def read_peer(directory: Path) -> Peer:
    """All lines of a directory; none if it is not there."""
    files = sorted(directory.glob("*.jsonl"))
    return Peer(json.loads(text) for file in files for text in file.read_text().splitlines())
