"""Shared fixtures: the default model and its references, a tokenizer, where long runs leave their summaries."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Before torch loads OpenMP: processes share the cores here, and a thread that waits by spinning takes one from another.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch  # after the lines above
from tiny_tokenizer import write_tokenizer

from overlap_spec.bench.report import describe_run
from overlap_spec.config import EngineConfig, ModelFiles
from overlap_spec.hub import resolve_model
from overlap_spec.tokenizer.codec import TextCodec, load_codec

DATA = Path(__file__).parent / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--commit", default=None, help="of the source tree, where there is no git metadata")
    parser.addoption("--summaries", default=None, help="JSON file that full and cuda runs add their summaries to")
    parser.addoption("--heads", default=None, help="directory of heads trained for the default target, one folder each")


@pytest.fixture(scope="session")
def heads(request: pytest.FixtureRequest) -> Path:
    """The directory of trained heads; tests that need them are skipped without it."""
    given = request.config.getoption("--heads")
    if given is None:
        pytest.skip(
            "needs --heads DIR: only the EAGLE-3 head of the default model is shipped; the formats of the others are "
            "checked with random weights in every run"
        )
    return Path(given)


@pytest.fixture(scope="session")
def files() -> ModelFiles:
    """Of the default model, found or downloaded once."""
    return resolve_model(EngineConfig())


@pytest.fixture(scope="session")
def rows() -> list[dict[str, Any]]:
    """Prompts, and the default model's tokens in transformers (tests/data/make_references.py)."""
    return json.loads((DATA / "greedy64.json").read_text())["rows"]


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """Of a tiny tokenizer."""
    return load_codec(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def record_summary(request: pytest.FixtureRequest) -> Callable[[str, dict[str, Any]], None]:
    """Note what was seen under NAME; does nothing without --summaries."""

    def record(name: str, figures: dict[str, Any], device: str = "cpu") -> None:
        given = request.config.getoption("--summaries")
        if given is None:
            return
        path, commit = Path(given), request.config.getoption("--commit")
        summaries = json.loads(path.read_text()) if path.is_file() else {}
        run = describe_run(device, torch.get_num_threads(), commit) | {"command": "pytest -m MARKER --summaries FILE"}
        summaries[name] = {"test": request.node.nodeid, "run": run, "figures": figures}
        path.write_text(json.dumps(summaries, indent=1) + "\n")

    return record
