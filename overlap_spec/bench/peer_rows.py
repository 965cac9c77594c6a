"""Rows that compare a throughput report with SGLang: which figure of the report, and which of `peer.py`.

Both were measured in bfloat16 by the same kind of call: one batch of token ids, the same prompts, prefix cache off,
no tokenizer, the better of two runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from overlap_spec.bench.peer import Peer, PeerFigure

Report = dict[str, Any]
Read = Callable[[Report], float | None]  # None: not measured in this report
ReadPeer = Callable[[Peer], PeerFigure | None]

BATCHES = (1, 8, 32, 64)


@dataclass(frozen=True)
class PeerRow:
    """One row. `peer` None: SGLang did not measure it. For times less is better, for other figures more.

    `step`: (label of the work, batch) if the row is the time of a decode step.
    """

    work: str
    read: Read
    peer: ReadPeer | None
    is_time: bool = True
    step: tuple[str, int] | None = None

    def peer_figure(self, peer: Peer) -> PeerFigure | None:
        """SGLang's figure in its better mode."""
        return self.peer(peer) if self.peer is not None else None

    def ratio(self, ours: float, peer: float) -> float:
        """How many times better than SGLang's."""
        return peer / ours if self.is_time else ours / peer


def _step(part: str, batch: int) -> Read:
    return lambda report: _of_batch(report, part, batch, "step_ms")


def _one_token(part: str, batch: int) -> Read:
    def read(report: Report) -> float | None:
        seconds = _of_batch(report, part, batch, "one_token_wall_s")
        return None if seconds is None else 1000 * seconds

    return read


def _speed_ratio(over: str, batch: int) -> Read:
    def read(report: Report) -> float | None:
        ours, others = (_of_batch(report, part, batch, "tokens_per_second") for part in ("engine", over))
        return ours / others if ours and others else None

    return read


def _worst_speed_ratio(report: Report) -> float | None:
    ratios = [ratio for batch in BATCHES if (ratio := _speed_ratio("plain", batch)(report)) is not None]
    return min(ratios) if len(ratios) == len(BATCHES) else None


def _of_batch(report: Report, part: str, batch: int, figure: str) -> float | None:
    rows = report.get(part, {}).get("batches", [])
    return next((float(row[figure]) for row in rows if row["batch"] == batch and figure in row), None)


def _first_token(report: Report) -> float | None:
    value = report["engine"].get("first_token", {}).get("first_token_ms_median")
    return None if value is None else float(value)


def _peer_step(config: str, batch: int) -> ReadPeer:
    return lambda peer: peer.step_ms(config, batch)


def _peer_one_token(config: str, batch: int) -> ReadPeer:
    return lambda peer: peer.one_token_ms(config, batch)


def _peer_overlap(config: str, batch: int) -> ReadPeer:
    return lambda peer: peer.overlap_ratio(config, batch)


def _steps(work: str, part: str, config: str, batches: tuple[int, ...]) -> tuple[PeerRow, ...]:
    """Rows of step times, by batch size."""
    return tuple(
        PeerRow(f"{work}, batch {batch}, ms a step", _step(part, batch), _peer_step(config, batch), step=(work, batch))
        for batch in batches
    )


def _one_tokens(model: str, batches: tuple[int, ...]) -> tuple[PeerRow, ...]:
    """Rows of one-token calls: the prefill of a batch, and its first tokens."""
    kinds = ((CHAIN, "engine", f"{model}-{PEER_CHAIN}"), ("plain", "plain", f"{model}-{PEER_PLAIN}"))
    return tuple(
        PeerRow(f"{work}, batch {batch}, one-token call, ms", _one_token(part, batch), _peer_one_token(config, batch))
        for work, part, config in kinds
        for batch in batches
    )


CHAIN = "EAGLE-3 (3, 1, 4)"
SYNTHETIC = f"{CHAIN}, synthetic acceptance of 2.5"
FIRST_TOKEN = PeerRow("first token of 128-token prompts, batch 1, streamed, ms (median of 20)", _first_token, None)
PEER_PLAIN, PEER_CHAIN = "nospec", "eagle3-3-1-4"  # after the model's name: "8b", "smol"

ROWS: dict[str, tuple[PeerRow, ...]] = {  # by the last part of the model's name
    "llama-3.1-8b": (
        *_steps("plain", "plain", f"8b-{PEER_PLAIN}", (1, 8, 32)),
        *_steps(SYNTHETIC, "engine", f"8b-{PEER_CHAIN}", (1, 8, 32)),
        *_one_tokens("8b", (1, 8, 32)),
        FIRST_TOKEN,
    ),
    "smollm2": (
        *_steps("plain", "plain", f"smol-{PEER_PLAIN}", BATCHES),
        *_steps(CHAIN, "engine", f"smol-{PEER_CHAIN}", BATCHES),
        PeerRow(
            "EAGLE-3 / plain tok/s, worst of batch 1, 8, 32, 64",
            _worst_speed_ratio,
            lambda peer: peer.worst_ratio(f"smol-{PEER_CHAIN}", f"smol-{PEER_PLAIN}", BATCHES),
            is_time=False,
        ),
        *(
            PeerRow(
                f"depth 2 / depth 1 tok/s, batch {batch}",
                _speed_ratio("depth1", batch),
                _peer_overlap(f"smol-{PEER_CHAIN}", batch),
                is_time=False,
            )
            for batch in (1, 64)
        ),
        *_one_tokens("smol", BATCHES),
        FIRST_TOKEN,
    ),
}
TREE_ROWS: dict[str, tuple[PeerRow, ...]] = {
    "llama-3.1-8b": _steps(
        "EAGLE-3 tree (5, 8, 32), synthetic acceptance of 2.5",
        "engine",
        "8b-eagle3-5-8-32",
        (1, 8, 32),
    ),
    "smollm2": _steps("EAGLE-3 tree (5, 4, 16)", "engine", "smol-eagle3-5-4-16", (1, 64)),
}


def peer_rows_of(report: Report) -> tuple[PeerRow, ...]:
    """The rows for a report's model and chain or tree. Raises: KeyError if the peer did not run it."""
    settings = report["engine"]["settings"]
    return (TREE_ROWS if settings["topk"] > 1 else ROWS)[settings["model"].rstrip("/").rpartition("/")[2]]
