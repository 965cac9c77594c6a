"""SGLang's figures are those that its lines say, and of the mode that is hardest on us."""

import json
from pathlib import Path
from typing import Any

import pytest

from overlap_spec.bench.peer import DIRECTORY, Peer, PeerFigure, read_peer
from overlap_spec.bench.peer_rows import ROWS, TREE_ROWS

ROOT = Path(__file__).parents[3]
PEER = read_peer(ROOT / DIRECTORY)


def line(config: str, batch: int, **figures: Any) -> dict[str, Any]:
    return {"config": config, "bs": batch, "kind": "batch", "ms_per_tok_seq": 9.0} | figures


MODES = Peer(
    [
        line("a", 1, ms_per_verify_step=4.0, prefill_s=0.02, tok_s=100.0),
        line("a-sync", 1, ms_per_verify_step=3.5, prefill_s=0.03, tok_s=120.0),
        line("a", 8, ms_per_verify_step=5.0, prefill_s=0.05, tok_s=900.0),
        line("a-sync", 8, ms_per_verify_step=6.0, prefill_s=0.04, tok_s=600.0),
        line("plain", 1, ms_per_tok_seq=1.5, prefill_s=0.01, tok_s=200.0),
        line("plain", 8, ms_per_tok_seq=2.0, prefill_s=0.01, tok_s=1000.0),
        line("a-sync-not", 1, ms_per_verify_step=0.1, prefill_s=0.001, tok_s=9999.0),
        {"config": "a", "bs": 1, "kind": "stream", "ms_per_verify_step": 0.1, "prefill_s": 0.001, "tok_s": 9999.0},
        {"config": "a", "kind": "info", "version": "0.5.14"},
        {"config": "b", "bs": 1, "error": "exited 1"},
    ]
)


def test_the_better_mode_at_each_batch_size_is_what_ours_is_compared_with() -> None:
    assert MODES.step_ms("a", 1) == PeerFigure(3.5, "a-sync") and MODES.step_ms("a", 8) == PeerFigure(5.0, "a")
    assert MODES.one_token_ms("a", 1) == PeerFigure(20.0, "a")
    assert MODES.one_token_ms("a", 8) == PeerFigure(40.0, "a-sync")
    assert MODES.speed("a", 1) == PeerFigure(120.0, "a-sync") and MODES.speed("a", 8) == PeerFigure(900.0, "a")
    assert MODES.step_ms("plain", 1) == PeerFigure(1.5, "plain")


def test_ratios_of_the_peer() -> None:
    assert MODES.worst_ratio("a", "plain", (1, 8)) == PeerFigure(0.6, "a-sync / plain, batch 1")
    assert MODES.worst_ratio("a", "plain", (8,)) == PeerFigure(0.9, "a / plain, batch 8")
    assert MODES.overlap_ratio("a", 8) == PeerFigure(1.5, "a / a-sync")


def test_what_the_peer_did_not_measure() -> None:
    assert MODES.step_ms("a", 2) is None and MODES.speed("b", 1) is None
    assert MODES.worst_ratio("a", "plain", (1, 2)) is None
    assert MODES.overlap_ratio("plain", 1) is None


@pytest.mark.parametrize(
    ("config", "batch", "step_ms", "one_token_ms", "speed"),
    [  # read by hand from the lines
        ("smol-nospec", 1, (1.1707, "smol-nospec"), (14.2, "smol-nospec"), (836.1, "smol-nospec")),
        ("smol-nospec", 64, (1.4728, "smol-nospec"), (26.0, "smol-nospec"), (42084.9, "smol-nospec")),
        (
            *("smol-eagle3-3-1-4", 1, (3.192, "smol-eagle3-3-1-4-sync")),
            *((16.8, "smol-eagle3-3-1-4-sync"), (539.6, "smol-eagle3-3-1-4-sync")),
        ),
        (
            *("smol-eagle3-3-1-4", 64, (3.682, "smol-eagle3-3-1-4-sync")),
            *((27.4, "smol-eagle3-3-1-4-sync"), (28481.7, "smol-eagle3-3-1-4-sync")),
        ),
        ("8b-eagle3-3-1-4", 1, (6.231, "8b-eagle3-3-1-4"), (18.5, "8b-eagle3-3-1-4-sync"), (384.8, "8b-eagle3-3-1-4")),
        (
            *("8b-eagle3-3-1-4", 32, (7.689, "8b-eagle3-3-1-4")),
            *((101.8, "8b-eagle3-3-1-4-sync"), (9757.8, "8b-eagle3-3-1-4")),
        ),
        ("8b-eagle3-5-8-32", 8, (12.736, "8b-eagle3-5-8-32"), (33.1, "8b-eagle3-5-8-32"), (1587.4, "8b-eagle3-5-8-32")),
    ],
)
def test_lines_read_by_hand(
    config: str,
    batch: int,
    step_ms: tuple[float, str],
    one_token_ms: tuple[float, str],
    speed: tuple[float, str],
) -> None:
    assert PEER.step_ms(config, batch) == PeerFigure(*step_ms)
    assert PEER.one_token_ms(config, batch) == PeerFigure(*one_token_ms)
    assert PEER.speed(config, batch) == PeerFigure(*speed)


def test_ratios_read_by_hand() -> None:
    worst = PEER.worst_ratio("smol-eagle3-3-1-4", "smol-nospec", (1, 8, 32, 64))
    assert worst == PeerFigure(15199.7 / 23926.0, "smol-eagle3-3-1-4-sync / smol-nospec, batch 32")
    overlap = PEER.overlap_ratio("smol-eagle3-3-1-4", 1)
    assert overlap is not None and overlap.value == 487.9 / 539.6


def test_every_row_with_a_peer_finds_its_line() -> None:
    compared = [row for table in (ROWS, TREE_ROWS) for rows in table.values() for row in rows]
    lines = {row.work: row.peer_figure(PEER) for row in compared if row.peer is not None}
    assert lines and all(lines.values()), [work for work, found in lines.items() if found is None]


def test_no_two_lines_measure_the_same() -> None:
    files = (ROOT / DIRECTORY).glob("*.jsonl")
    rows = [json.loads(text) for file in files for text in file.read_text().splitlines()]
    keys = [(row["config"], row.get("bs"), row["kind"]) for row in rows]
    assert len(keys) == len(set(keys)) == 76


def test_without_the_lines_there_is_no_figure(tmp_path: Path) -> None:
    assert read_peer(tmp_path / "absent").step_ms("8b-nospec", 1) is None
