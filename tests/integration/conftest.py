"""The default target with a trained MTP layer in its checkpoint; where the matrix of parameters is written."""

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.matrix_columns import COLUMNS, DEPTHS, with_outcome
from support.merged_mimo import merge
from support.summaries import describe, update

from overlap_spec.config import ModelFiles

COMMAND = 'python -m pytest -m "" tests/integration/test_parameter_matrix.py --matrix FILE'


@pytest.fixture(scope="session")
def merged(files: ModelFiles, heads: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFiles]:
    """Needs `--heads DIR` with `mtp/`."""
    directory = tmp_path_factory.mktemp("mimo")
    yield merge(files, heads / "mtp", directory)
    shutil.rmtree(directory)


@pytest.fixture
def note_cell(request: pytest.FixtureRequest) -> Callable[[str, str, int, str], None]:
    """Writes what a cell of the matrix of parameters says; does nothing without --matrix."""
    given = request.config.getoption("--matrix")
    noted: list[tuple[str, str, int, str]] = []

    def note(parameter: str, column: str, depth: int, outcome: str) -> None:
        noted.append((parameter, column, depth, outcome))

    def write() -> None:
        if given is not None and noted:
            run = described() | {"command": COMMAND}
            update(Path(given), lambda matrix: fill_in(matrix, run, noted))

    request.addfinalizer(write)
    return note


@functools.cache
def described() -> dict[str, Any]:
    """Reads all sources."""
    return describe("cpu", torch.get_num_threads())


def fill_in(matrix: dict[str, Any], run: dict[str, Any], noted: list[tuple[str, str, int, str]]) -> None:
    """Cells of another source are forgotten: a table is of one."""
    if matrix.get("run", {}).get("source") != run["source"]:
        matrix.clear()
    matrix.update(benchmark="parameter_matrix", run=run, columns=list(COLUMNS), depths=list(DEPTHS))
    cells = matrix.setdefault("cells", {})
    for parameter, *outcome in noted:
        cells[parameter] = with_outcome(cells.get(parameter, {}), *outcome)
