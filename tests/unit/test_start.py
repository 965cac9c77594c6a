"""A start is fast: a process imports only what it needs, and says what it does before anything that takes time."""

import subprocess
import sys
from pathlib import Path

import pytest

SLOW = ("torch", "transformers", "numpy")


def modules_after(program: str) -> set[str]:
    """What is imported once `program` has run in a process of its own."""
    listing = "import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", f"{program}\n{listing}"], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "unneeded"),
    [
        ("overlap_spec.worker.entry", SLOW),  # the GPU is opened while these are imported
        (
            "overlap_spec.worker.worker_actor",
            ("torch._dynamo", "torch._inductor", "transformers", "triton", "sympy"),
        ),
        ("overlap_spec.entrypoints.cli.chat", ("overlap_spec.engine",)),
        ("overlap_spec.entrypoints.cli.chat, overlap_spec.engine, overlap_spec.scheduler.scheduler_actor", SLOW),
        ("overlap_spec.frontend.frontend_actor", ("torch", "transformers")),  # NumPy reads long prompts there
    ],
)
def test_a_process_imports_nothing_slow_that_it_does_not_need(modules: str, unneeded: tuple[str, ...]) -> None:
    assert not modules_after(f"import {modules}") & set(unneeded)


@pytest.mark.slow
def test_a_chat_says_what_it_does_before_it_imports_an_engine(tmp_path: Path) -> None:
    program = (
        f"folder = {str(tmp_path)!r}"
        + """
import io, sys
class Words(io.StringIO):
    def write(self, words):
        if words.strip() and not self.getvalue().strip():
            slow = [name for name in ("overlap_spec.engine", "torch", "rich", "zmq", "uvloop") if name in sys.modules]
            print("slow before the first word:", slow, words)
        return super().write(words)
sys.stderr = Words()
from overlap_spec.entrypoints.cli import main
print("status", main(["chat", "Hi", "--model-path", folder]))
"""
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == f"slow before the first word: [] starting {tmp_path}"
