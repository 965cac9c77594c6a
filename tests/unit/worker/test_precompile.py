"""Kernels are compiled together at the first start with a model and settings, and at no later one."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_settings import fake_settings

from overlap_spec.worker.startup import warmup as module
from overlap_spec.worker.startup.warmup import precompile

NOTHING: Any = None


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was run while kernels were only compiled."""
    done: list[str] = []

    @contextlib.contextmanager
    def compiling_together(processes: Processes) -> Iterator[None]:
        yield
        done.append(f"all compiled by {processes.name}")

    monkeypatch.setattr(module, "compiling_together", compiling_together)
    monkeypatch.setattr(module, "cuda_prompt_lengths", lambda geometry: (1,))
    monkeypatch.setattr(module, "warm_up", lambda *_, **__: done.append("warm-up"))
    monkeypatch.setattr(module, "_stamp", lambda *_: tmp_path / "stamp")
    monkeypatch.setattr(module, "compilers", lambda: Processes("new ones", done))
    return done


class Processes:
    """That compile. Notes when they are ended."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name = name
        self._done = done

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        assert cancel_futures and not wait
        self._done.append(f"{self.name} ended")


def test_a_second_start_compiles_nothing(compiled: list[str]) -> None:
    for _ in range(2):
        precompile(fake_settings(), NOTHING, NOTHING)
    assert compiled == ["warm-up", "all compiled by new ones"]


def test_processes_that_were_started_ahead_compile_or_end(compiled: list[str]) -> None:
    started: Any = Processes("those", compiled)
    for _ in range(2):
        precompile(fake_settings(), NOTHING, NOTHING, started)
    assert compiled == ["warm-up", "all compiled by those", "those ended"]


def test_a_failure_is_no_failure_of_the_start(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a step")

    with monkeypatch.context() as broken:
        broken.setattr(module, "warm_up", fail)
        precompile(fake_settings(), NOTHING, NOTHING)
    assert "one after another" in caplog.text
    precompile(fake_settings(), NOTHING, NOTHING)
    assert compiled == ["warm-up", "all compiled by new ones"], "there was no stamp"
