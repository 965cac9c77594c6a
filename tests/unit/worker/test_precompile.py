"""Kernels are compiled together at the first start with a model and settings, and at no later one."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_settings import fake_settings

from overlap_spec.worker.sizing import precompile as module
from overlap_spec.worker.sizing.precompile import precompile

NOTHING: Any = None


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was run while kernels were only compiled."""
    done: list[str] = []

    @contextlib.contextmanager
    def compiling_together(num_threads: int) -> Iterator[None]:
        assert num_threads >= 1
        yield
        done.append("all compiled")

    monkeypatch.setattr(module, "compiling_together", compiling_together)
    monkeypatch.setattr(module, "cuda_prompt_lengths", lambda geometry: (1,))
    monkeypatch.setattr(module, "warm_up", lambda *_, **__: done.append("warm-up"))
    monkeypatch.setattr(module, "_stamp", lambda settings: tmp_path / "stamp")
    return done


def test_a_second_start_compiles_nothing(compiled: list[str]) -> None:
    for _ in range(2):
        precompile(fake_settings(), NOTHING, NOTHING)
    assert compiled == ["warm-up", "all compiled"]


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
    assert compiled == ["warm-up", "all compiled"], "there was no stamp"
