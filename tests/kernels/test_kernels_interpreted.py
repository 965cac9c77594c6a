"""Runs `interpreted/check_*.py` under Triton's interpreter, on a CPU.

In processes of their own, because the interpreter is chosen by the environment when Triton is first imported; two at a
time, each on one core.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

CHECKS = sorted((Path(__file__).parent / "interpreted").glob("check_*.py"))
# The interpreter reads a loop's bounds from one-element arrays, which NumPy has begun to discourage.
LOOP_BOUNDS = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"

Runs = dict[Path, Future[subprocess.CompletedProcess[str]]]


def interpreted(checks: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", LOOP_BOUNDS, str(checks)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Of the checks that pytest was asked for, all begun before the first is waited for."""
    pytest.importorskip(
        "triton", reason="the interpreter is part of Triton, whose wheels are for Linux: pip install triton"
    )
    chosen = [item.callspec.params["checks"] for item in request.session.items if item.module is request.module]
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {checks: pool.submit(interpreted, checks) for checks in chosen}
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("checks", CHECKS, ids=lambda path: path.stem)
def test_kernels_agree_with_their_twins(checks: Path, runs: Runs) -> None:
    run = runs[checks].result()
    assert run.returncode == 0, run.stdout + run.stderr
