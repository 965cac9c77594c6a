"""Shared fixtures: where long runs leave their summaries."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlap_spec.bench.report import describe_run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--commit", default=None, help="of the source tree, where there is no git metadata")
    parser.addoption("--summaries", default=None, help="directory that full and cuda runs write their summaries to")


@pytest.fixture
def record_summary(request: pytest.FixtureRequest) -> Callable[[str, dict[str, Any]], None]:
    """Write NAME.json with what was seen; does nothing without --summaries."""

    def record(name: str, figures: dict[str, Any], device: str = "cpu") -> None:
        directory = request.config.getoption("--summaries")
        if directory is not None:
            test = request.node.nodeid
            report = {
                "test": test,
                "run": describe_run(device, 0, request.config.getoption("--commit")),
                "figures": figures,
            }
            (Path(directory) / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")

    return record
