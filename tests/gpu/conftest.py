"""Every test of this folder is marked `cuda`, and skipped on a machine without a GPU.

Random inputs begin at the same seed, and torch's products of float32 are IEEE.

All of them on 16 cores, `-n 24` on a machine with two GPUs, which workers share (tests/conftest.py):
`pytest -m cuda -n 12 --dist loadgroup tests/gpu`. Tests that share an engine are of one `xdist_group`.
"""

import os
from pathlib import Path

import pytest
import torch
from support.gpu_order import expected_seconds, in_order, seconds_of_tests

HERE = Path(__file__).parent
NUM_REQUESTS = 150  # without --fuzz-cases
LAST_RUN = HERE.parent.parent / "benchmarks" / "results" / "cuda_tests_h200.json"
NEEDS_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none; where there is one: pytest -m cuda"
)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`items` are those of the whole run."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cuda)
            item.add_marker(NEEDS_GPU)
    if "PYTEST_XDIST_WORKER" in os.environ:
        others = [item for item in items if not item.path.is_relative_to(HERE)]
        items[:] = ordered([item for item in items if item.path.is_relative_to(HERE)]) + others


def ordered(items: list[pytest.Item]) -> list[pytest.Item]:
    """As they should begin; tests of one group stay together."""
    seconds = seconds_of_tests(LAST_RUN)
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        groups.setdefault(mark.args[0] if mark else item.nodeid, []).append(item)
    units = [(sum(expected_seconds(item.nodeid, seconds) for item in group), group) for group in groups.values()]
    return [item for group in in_order(units) for item in group]


@pytest.fixture
def num_requests(request: pytest.FixtureRequest) -> int:
    """Random requests that a ring serves with one method."""
    return int(request.config.getoption("--fuzz-cases") or NUM_REQUESTS)


@pytest.fixture(autouse=True)
def _seeded_and_ieee() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
