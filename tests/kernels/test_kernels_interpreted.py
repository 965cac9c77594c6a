"""Runs `interpreted/check_*.py` under Triton's interpreter, on a CPU.

In processes of their own, because the interpreter is chosen by the environment when Triton is first imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = sorted((Path(__file__).parent / "interpreted").glob("check_*.py"))
LARGE = [
    CHECKS[0].with_name(f"check_{name}.py")
    for name in ("latent_attention", "gated_delta", "all_reduce", "ordered", "ordered_quantized")
]
LONG_CHECKS = [path for path in CHECKS if "pytest.mark.parametrize" in path.read_text()]
# The interpreter reads a loop's bounds from one-element arrays, which NumPy has begun to discourage.
LOOP_BOUNDS = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"


def interpret(marks: str, *checks: Path, cpu_s: int = 80, timeout_s: float = 500) -> None:
    """Run the checks with those marks. `cpu_s`: what ends a kernel that waits for ever, on a host of any load."""
    pytest.importorskip(
        "triton", reason="the interpreter is part of Triton, whose wheels are for Linux: pip install triton"
    )
    options = ["-q", "-p", "no:cacheprovider", "-W", LOOP_BOUNDS, "-m", marks]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, checks)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "INTERPRETED_CPU_S": str(cpu_s)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.timeout(600)
def test_kernels_agree_with_their_references_in_a_few_cases() -> None:
    interpret("not full and not slow", *(path for path in CHECKS if path not in LARGE))


@pytest.mark.timeout(600)
def test_larger_kernels_agree_with_their_references_in_a_few_cases() -> None:
    """Latent attention, a recurrence, reductions among processes, and a row's one class of bits in one order.

    Apart, so that the tests of a fault take half as long.
    """
    interpret("not full and not slow", *LARGE)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_kernels_agree_with_their_references_in_every_case() -> None:
    """In those that the tests above leave out."""
    interpret("slow or full", *LONG_CHECKS, cpu_s=3500, timeout_s=3500)
