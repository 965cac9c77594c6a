"""What runs under Triton's interpreter, by short ways."""

import os
import resource
from pathlib import Path

import pytest
from support import quick_interpreter

HERE = Path(__file__).parent

if os.environ.get("TRITON_INTERPRET") == "1":  # pytest reads this file wherever it looks for tests, too
    quick_interpreter.install()
    limit = os.environ.get("INTERPRETED_CPU_S")  # of each process: what waits for ever is ended
    if limit:
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))


@pytest.hookimpl(tryfirst=True)  # before tests/conftest.py looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a check without marks the cases 0, 4, 8, .. are quick, and of the others every tenth is slow, the rest full.

    `items` are those of the whole run.
    """
    for item in items:
        if item.path.parent == HERE:
            if not any(item.get_closest_marker(name) for name in ("slow_but_every", "slow", "full")):
                item.add_marker(pytest.mark.slow_but_every(4))
            if not any(item.get_closest_marker(name) for name in ("full_but_every", "full")):
                item.add_marker(pytest.mark.full_but_every(10))
