"""What throughput is compared with: figures of SGLang 0.5.14 on one H200, and what is to be reached there.

Not here: our figures, which come from result files. SGLang was measured in bfloat16 as `throughput.py` measures: one
batched call, the same prompts, prefix cache off, without a tokenizer, the better of two runs, with its overlap on or
off, whichever was faster.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]
Read = Callable[[Report], float | None]  # None: not measured in this report


@dataclass(frozen=True)
class Target:
    """One row. `peer` None: not measured there. Less is better for times, more for the rest."""

    work: str
    read: Read
    peer: float | None
    must: float
    aim: float | None
    is_time: bool = True

    def ratio(self, ours: float) -> float | None:
        """How many times better than the peer."""
        if self.peer is None:
            return None
        return self.peer / ours if self.is_time else ours / self.peer

    def is_met(self, ours: float) -> bool:
        """Whether it is what must be reached."""
        return ours <= self.must if self.is_time else ours >= self.must


def _step(part: str, batch: int) -> Read:
    return lambda report: _of_batch(report, part, batch, "step_ms")


def _speed_ratio(over: str, batch: int) -> Read:
    def read(report: Report) -> float | None:
        ours, others = (_of_batch(report, part, batch, "tokens_per_second") for part in ("engine", over))
        return ours / others if ours and others else None

    return read


def _worst_speed_ratio(report: Report) -> float | None:
    ratios = [ratio for batch in (1, 8, 32, 64) if (ratio := _speed_ratio("plain", batch)(report)) is not None]
    return min(ratios) if len(ratios) == 4 else None


def _of_batch(report: Report, part: str, batch: int, figure: str) -> float | None:
    rows = report.get(part, {}).get("batches", [])
    return next((float(row[figure]) for row in rows if row["batch"] == batch), None)


def _first_token(report: Report) -> float | None:
    value = report["engine"].get("first_token", {}).get("first_token_ms_median")
    return None if value is None else float(value)


def _chat_speed(report: Report) -> float | None:
    value = report["engine"].get("chats", {}).get("tokens_per_second")
    return None if value is None else float(value)


def _chat_ratio(report: Report) -> float | None:
    ours, plain = _chat_speed(report), report.get("plain", {}).get("chats", {}).get("tokens_per_second")
    return ours / plain if ours and plain else None


def _steps(work: str, figures: dict[int, tuple[float, float]]) -> tuple[Target, ...]:
    """Step times by batch: those of the peer, and what must be reached."""
    return tuple(
        Target(f"{work}, batch {batch}, ms a step", _step("engine", batch), peer, must, None)
        for batch, (peer, must) in figures.items()
    )


FIRST_TOKEN = "first token of 128-token prompts, batch 1, ms (SGLang: 28 to 40)"
SYNTHETIC = "EAGLE-3 (3, 1, 4), synthetic acceptance of 2.5"

TARGETS: dict[str, tuple[Target, ...]] = {  # by the last part of the model's name
    "llama-3.1-8b": (
        Target("plain, batch 1, ms a step", _step("plain", 1), 4.82, 4.30, 4.03),
        Target(f"{SYNTHETIC}, batch 1, ms a step", _step("engine", 1), 6.23, 5.0, 4.88),
        Target(f"{SYNTHETIC}, batch 8, ms a step", _step("engine", 8), 6.57, 5.4, 5.1),
        Target(f"{SYNTHETIC}, batch 32, ms a step", _step("engine", 32), 7.69, 6.5, 6.0),
        Target(FIRST_TOKEN, _first_token, 28.0, 25.0, None),
    ),
    "smollm2": (
        Target("plain, batch 1, ms a step", _step("plain", 1), 1.17, 0.60, 0.40),
        Target("plain, batch 64, ms a step", _step("plain", 64), 1.47, 1.0, 0.7),
        Target("EAGLE-3 (3, 1, 4), batch 1, ms a step", _step("engine", 1), 3.19, 0.95, 0.60),
        Target("EAGLE-3 (3, 1, 4), batch 64, ms a step", _step("engine", 64), 3.68, 1.7, 1.2),
        Target("EAGLE-3, chat20 to end of turn, batch 1, tok/s", _chat_speed, None, 2400, 3900, False),
        Target("EAGLE-3 / plain tok/s, chat20 to end of turn, batch 1", _chat_ratio, None, 1.4, 1.55, False),
        Target("EAGLE-3 / plain tok/s, worst of batch 1, 8, 32, 64", _worst_speed_ratio, 0.58, 0.98, 1.0, False),
        Target("depth 2 / depth 1 tok/s, batch 1", _speed_ratio("depth1", 1), 0.91, 1.0, None, False),
        Target("depth 2 / depth 1 tok/s, batch 64", _speed_ratio("depth1", 64), 0.88, 1.0, None, False),
        Target(FIRST_TOKEN, _first_token, 28.0, 10.0, None),
    ),
}
TREE_TARGETS: dict[str, tuple[Target, ...]] = {
    "llama-3.1-8b": _steps(
        "EAGLE-3 tree (5, 8, 32), synthetic acceptance of 2.5", {1: (8.59, 6.2), 8: (12.7, 8.0), 32: (36.5, 26.0)}
    ),
    "smollm2": _steps("EAGLE-3 tree (5, 4, 16)", {1: (4.66, 1.3), 64: (6.80, 2.8)}),
}


def targets_of(report: Report) -> tuple[Target, ...]:
    """The rows for a report's model and chain or tree. Raises: KeyError if nothing is to be reached with it."""
    settings = report["engine"]["settings"]
    return (TREE_TARGETS if settings["topk"] > 1 else TARGETS)[settings["model"].rstrip("/").rpartition("/")[2]]
