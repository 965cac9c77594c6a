"""A tiny model on disk for soaks."""

from pathlib import Path

import pytest
from support.soak.requests import CONTEXT
from support.tiny.models import tiny_eagle3, tiny_target, write_checkpoint
from support.tiny.tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def soak_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer, and its EAGLE-3 head in `head/`."""
    directory = tmp_path_factory.mktemp("soaked")
    target = tiny_target(seed=1, max_position_embeddings=CONTEXT)
    write_checkpoint(directory, target)
    write_tokenizer(directory)
    write_checkpoint(directory / "head", tiny_eagle3(seed=2, target=target))
    return directory
