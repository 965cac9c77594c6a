"""The default target with a trained MTP layer in its checkpoint."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.merged_mimo import merge

from overlap_spec.config import ModelFiles


@pytest.fixture(scope="session")
def merged(files: ModelFiles, heads: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFiles]:
    """Needs `--heads DIR` with `mtp/`."""
    directory = tmp_path_factory.mktemp("mimo")
    yield merge(files, heads / "mtp", directory)
    shutil.rmtree(directory)
