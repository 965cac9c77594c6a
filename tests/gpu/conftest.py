"""Every test of this folder is marked `cuda`, and skipped on a machine without a GPU.

Random inputs begin at the same seed, and torch's products of float32 are IEEE.
"""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
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


@pytest.fixture(autouse=True)
def _seeded_and_ieee() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
