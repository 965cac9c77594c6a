"""Runs `interpreted/check_*.py` under Triton's interpreter, on a CPU.

In a process of its own, because the interpreter is chosen by the environment when Triton is first imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = sorted((Path(__file__).parent / "interpreted").glob("check_*.py"))
# The interpreter reads a loop's bounds from one-element arrays, which NumPy has begun to discourage.
LOOP_BOUNDS = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"


@pytest.mark.parametrize("checks", CHECKS, ids=lambda path: path.stem)
def test_kernels_agree_with_their_twins(checks: Path) -> None:
    pytest.importorskip(
        "triton", reason="the interpreter is part of Triton, whose wheels are for Linux: pip install triton"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", LOOP_BOUNDS, str(checks)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stdout + run.stderr
