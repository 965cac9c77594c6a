"""Processes that compile are started ahead where no start has compiled kernels yet, and nowhere else."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.fake_settings import fake_settings

from overlap_spec.config import Settings, kernel_cache
from overlap_spec.worker import compilers as module
from overlap_spec.worker.compilers import started_compilers

ON_A_CPU = fake_settings()
ON_A_GPU = replace(ON_A_CPU, model=replace(ON_A_CPU.model, device="cuda"))


class Pool:
    """Notes what it is asked for."""

    def __init__(self, count: int, context: Any, begin: Any, of: tuple[int]) -> None:
        assert (context.get_start_method(), of) == ("spawn", (os.getpid(),)), (
            "a fork would inherit the worker's threads"
        )
        self.count, self.jobs = count, 0

    def submit(self, job: object) -> None:
        self.jobs += 1


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(module, "num_cores", lambda: 16)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("cores", "count", "ahead"), [(8, 8, 6), (16, 16, 14), (64, 16, 16)])
def test_a_first_start_on_a_gpu_leaves_cores_to_the_worker(
    cores: int, count: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "num_cores", lambda: cores)
    started: Any = started_compilers(ON_A_GPU)
    assert (started.count, started.jobs) == (count, ahead), "the pool starts one for a job"


def test_where_cores_are_few_none_are_started_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two cores the worker's imports took three times as long."""
    monkeypatch.setattr(module, "num_cores", lambda: 7)
    pool: Any = module.compilers()
    assert started_compilers(ON_A_GPU) is None and (pool.count, pool.jobs) == (7, 0)


@pytest.mark.parametrize("settings", [ON_A_CPU, replace(ON_A_GPU, compile_max_batch=8)])
def test_where_nothing_is_compiled_together_none_are_started(settings: Settings) -> None:
    assert started_compilers(settings) is None


@pytest.mark.parametrize(("name", "is_first"), [(f"{module.STAMPED}0123", False), ("A5NZ", True)])
def test_after_a_start_has_compiled_none_are_started(name: str, is_first: bool, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert (started_compilers(ON_A_GPU) is not None) == is_first


def test_a_cache_that_is_not_there_yet_is_empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "absent"))
    assert started_compilers(ON_A_GPU) is not None


def test_an_interrupt_is_the_parents_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found, before = list[Any](), signal.getsignal(signal.SIGINT)
    noted = partial(signal.getsignal, signal.SIGINT)
    monkeypatch.setattr("overlap_spec_kernels.begin_compiler", lambda parent: found.append((parent, noted())))
    try:
        module._begin(7)
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [(7, signal.SIG_IGN)]


def test_where_triton_keeps_what_it_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Triton itself has it."""
    knobs = pytest.importorskip("triton", reason="Triton's wheels are for Linux: pip install triton").knobs
    for name, value in (("TRITON_CACHE_DIR", None), ("TRITON_HOME", str(tmp_path)), ("TRITON_HOME", None)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
        assert Path(kernel_cache()) == Path(knobs.cache.dir)
