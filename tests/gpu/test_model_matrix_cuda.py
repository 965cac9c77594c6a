"""Cells of the matrix of models on a GPU, a few, or as many as fit into --seconds: tokens are plain decoding's there.

In float32, where the order of sums decides no token; formats that have kernels of their own, in bfloat16, where they
are up to near-ties. With `--matrix FILE` outcomes are written, from which docs/models.md has its columns of the GPU.
"""

import time
from collections.abc import Callable

import pytest
import torch
from support.model_cells import CELLS, DIFFERS, EQUAL, NEAR, Cell, outcome_of
from support.tiny.formats import FORMATS

from overlap_spec.tokenizer.codec import TextCodec

PLACE = torch.device("cuda", 0)
FEW = 5  # run in any case
NoteCell = Callable[[str, str, str, str], None]


def in_turns(cells: list[Cell]) -> list[Cell]:
    """By rank, but each format comes once before any comes twice."""
    turns: dict[str, int] = {}
    ranked = []
    for cell in sorted(cells, key=lambda cell: cell.rank):
        turns[cell.format] = turns.get(cell.format, -1) + 1
        ranked.append((turns[cell.format], cell.rank, cell))
    return [cell for _, _, cell in sorted(ranked, key=lambda each: each[:2])]


def test_cells(codec: TextCodec, note_model: NoteCell, request: pytest.FixtureRequest) -> None:
    ends, wrong = time.monotonic() + float(request.config.getoption("--seconds") or 0.0), []
    seen: set[str] = set()
    for count, cell in enumerate(in_turns(CELLS)):
        if count >= FEW and time.monotonic() > ends:
            break
        outcome = outcome_of(cell, codec, FORMATS[cell.format].dtype_on_gpu, PLACE)
        print(f"{cell}: {outcome}", flush=True)
        note_model(cell.architecture, cell.format, cell.method, outcome)
        seen.add(outcome)
        wrong += [str(cell)] if outcome == DIFFERS else []
    assert not wrong, wrong
    assert seen & {EQUAL, NEAR}, "some are not refused"
