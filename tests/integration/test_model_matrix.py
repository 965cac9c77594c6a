"""Every architecture in every format with every drafting method: tokens are plain decoding's, of the same weights.

With `--matrix FILE` the outcome of each cell is written, from which docs/models.md has its tables. A cell is loaded
from files, by the loaders of an engine; what they refuse is the cell's sentence. In CI a few cells run, spread over
the matrix by a hash of their names.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from documents.age import changed_parts
from support.model_cells import CELLS, DIFFERS, EQUAL, METHODS, Cell, by_method, outcome_of
from support.tiny.formats import ARCHITECTURES as TINY_ARCHITECTURES, FORMATS
from support.tiny.models import CPU

from overlap_spec.config.speculation import ONLY_CHAINS
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.models.registry import ARCHITECTURES
from overlap_spec.runtime.source import describe_source

RESULTS, MATRIX = Path(__file__).parent.parent.parent / "benchmarks/results", "model_matrix.json"
NUM_SLOW = 10
NoteCell = Callable[[str, str, str, str], None]  # architecture, format, method, outcome

RANKED = sorted(CELLS, key=lambda cell: cell.rank)
ROWS = [(architecture, format_) for format_ in FORMATS for architecture in TINY_ARCHITECTURES]


@pytest.mark.full_but_every(3)
@pytest.mark.slow
@pytest.mark.parametrize("cell", RANKED[:NUM_SLOW], ids=str)
def test_a_sample_of_cells(codec: TextCodec, cell: Cell) -> None:
    assert outcome_of(cell, codec, torch.float64, CPU) != DIFFERS


@pytest.mark.full
@pytest.mark.parametrize(("architecture", "format_"), ROWS)
def test_every_cell(codec: TextCodec, note_model: NoteCell, architecture: str, format_: str) -> None:
    outcomes = {
        method: outcome_of(Cell(architecture, format_, method), codec, torch.float64, CPU) for method in METHODS
    }
    for method, outcome in outcomes.items():
        note_model(architecture, format_, method, outcome)
    assert DIFFERS not in outcomes.values(), outcomes


def test_every_architecture_has_rows() -> None:
    assert TINY_ARCHITECTURES.keys() == ARCHITECTURES.keys(), "add a tiny one to tests/support/tiny/formats.py"


@pytest.mark.slow
def test_the_matrix_has_every_cell() -> None:
    """The one that documents show, unless it is older than the code."""
    matrix = json.loads((RESULTS / MATRIX).read_text())
    cells = matrix["cells"]
    rows = {cell: by_method(cells.get(cell.architecture, {}).get(cell.format, {})) for cell in CELLS}
    outcomes = {cell: row.get(cell.method, "") for cell, row in rows.items()}
    assert DIFFERS not in outcomes.values()
    if not changed_parts(matrix, describe_source()):
        assert all(outcomes.values()), [str(cell) for cell, outcome in outcomes.items() if not outcome]
        of_float = {outcomes[cell] for cell in CELLS if cell.format == "float"}
        assert of_float == {EQUAL, ONLY_CHAINS}, "no 16-bit checkpoint of a supported architecture is refused"
