"""Kernels are compiled together at the first start with a model and settings, and at no later one.

What the start launches goes on meanwhile.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_settings import fake_settings

from overlap_spec.worker.startup import warmup as module
from overlap_spec.worker.startup.warmup import precompiling

NOTHING: Any = None


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was run while kernels were only compiled."""
    done: list[str] = []

    class Compilations:
        @contextlib.contextmanager
        def finding(self) -> Iterator[None]:
            yield
            done.append("found")

        def waited(self) -> float:
            return 1.5

    @contextlib.contextmanager
    def compiling_together(processes: Processes) -> Iterator[Compilations]:
        yield Compilations()
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


FOUND = ["warm-up", "found", "the start"]


def start(compiled: list[str], started: Any = None) -> float:
    """Seconds for which it says that launches waited."""
    with precompiling(fake_settings(), NOTHING, NOTHING, started) as waited:
        compiled.append("the start")
        return waited()


def test_a_second_start_compiles_nothing(compiled: list[str]) -> None:
    assert [start(compiled), start(compiled)] == [1.5, 0.0]
    assert compiled == [*FOUND, "all compiled by new ones", "the start"]


def test_processes_that_were_started_ahead_compile_or_end(compiled: list[str]) -> None:
    started: Any = Processes("those", compiled)
    for _ in range(2):
        start(compiled, started)
    assert compiled == [*FOUND, "all compiled by those", "those ended", "the start"]


def test_a_failure_is_no_failure_of_the_start(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a step")

    with monkeypatch.context() as broken:
        broken.setattr(module, "warm_up", fail)
        start(compiled)
    assert "one after another" in caplog.text and compiled == ["the start", "all compiled by new ones"]
    compiled.clear()
    start(compiled)
    assert compiled == [*FOUND, "all compiled by new ones"], "there was no stamp"


def test_a_start_that_fails_leaves_no_stamp(compiled: list[str]) -> None:
    """What it found may not be compiled."""
    with pytest.raises(ZeroDivisionError), precompiling(fake_settings(), NOTHING, NOTHING):
        raise ZeroDivisionError
    assert compiled == FOUND[:2] and start(compiled) == 1.5


def test_what_other_ranks_would_wait_for_ends_the_start(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a step")

    monkeypatch.setattr(module, "warm_up", fail)
    ranks: Any = SimpleNamespace(ranks=2, of_first=lambda name, found, kind: found())
    with pytest.raises(RuntimeError, match="a step"), precompiling(fake_settings(), NOTHING, NOTHING, None, ranks):
        compiled.append("the start")
    assert not compiled
