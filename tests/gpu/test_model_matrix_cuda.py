"""Cells of the matrix of models on a GPU, a few, or as many as fit into --seconds: tokens are plain decoding's there.

In float32, where the order of sums decides no token; formats that have kernels of their own, in bfloat16, where they
are up to near-ties. With `--matrix FILE` outcomes are written, from which docs/models.md has its columns of the GPU:
`pytest -m cuda -n 8 tests/gpu/test_model_matrix_cuda.py --seconds 75 --matrix FILE`.
"""

import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from support.model_cells import CELLS, DIFFERS, Cell, outcome_of
from support.tiny.formats import FORMATS

from overlap_spec.frontend.codec import TextCodec

PLACE = torch.device("cuda", 0)
SHARES = 8  # that workers run beside each other
NoteCell = Callable[[str, str, str, str], None]


def in_turns(cells: list[Cell]) -> list[Cell]:
    """By rank, but each pair of architecture and format comes once before any comes twice, and so does each format."""
    rounds: Counter[tuple[str, str]] = Counter()
    turns: Counter[tuple[str, int]] = Counter()
    ranked = []
    for cell in sorted(cells, key=lambda cell: cell.rank):
        pair = cell.architecture, cell.format
        turn = cell.format, rounds[pair]
        ranked.append((rounds[pair], turns[turn], cell.rank, cell))
        rounds[pair] += 1
        turns[turn] += 1
    return [cell for *_, cell in sorted(ranked, key=lambda each: each[:3])]


@pytest.mark.parametrize("share", range(SHARES))
def test_cells(share: int, codec: TextCodec, note_model: NoteCell, request: pytest.FixtureRequest) -> None:
    """A share's cells: one in any case, and more as long as --seconds last."""
    ends, wrong = time.monotonic() + float(request.config.getoption("--seconds") or 0.0), []
    for count, cell in enumerate(in_turns(CELLS)[share::SHARES]):
        if count and time.monotonic() > ends:
            break
        outcome = outcome_of(cell, codec, FORMATS[cell.format].dtype_on_gpu, PLACE)
        print(f"{cell}: {outcome}", flush=True)
        note_model(cell.architecture, cell.format, cell.method, outcome)
        wrong += [str(cell)] if outcome == DIFFERS else []
    assert not wrong, wrong
