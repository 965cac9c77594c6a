"""How long threads spin is chosen by what waking them costs, and never against the user."""

from pathlib import Path

import pytest

from overlap_spec import hub
from overlap_spec.config import EngineConfig, ModelFiles
from overlap_spec.engine import Engine
from overlap_spec.runtime import measured as measured_module
from overlap_spec.runtime import openmp_spin as waiting
from overlap_spec.runtime.openmp_spin import SPINS, choose_spin, shortest_of

USERS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
LIBRARY = Path("libgomp.so.1")


@pytest.fixture(autouse=True)
def no_user_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_SPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(measured_module, "seconds_of_others", lambda: 0.0)  # as on a quiet machine
    for name in USERS:
        monkeypatch.delenv(name, raising=False)


def wakes_cost(us: float, covered: int, spinning: float = 1.3) -> waiting.Probe:
    """Pauses up to a spin of `covered` need no waking."""
    return lambda spin: [spinning] * 3 if spin >= covered else [us] * 3


@pytest.mark.parametrize("covered", SPINS)
def test_the_shortest_spin_that_covers_the_pauses(covered: int) -> None:
    assert shortest_of(wakes_cost(400, covered)) == covered


def test_where_waking_costs_little_no_thread_spins() -> None:
    assert shortest_of(wakes_cost(2.5, 100_000)) == 0


def test_where_spinning_costs_more_no_thread_spins() -> None:
    assert shortest_of(lambda spin: [10.0 + spin] * 3) == 0


def test_rare_pauses_count_for_less() -> None:
    probe = {0: [60, 60, 60], 1000: [1, 1, 6], 3000: [1, 1, 1]}
    assert shortest_of(lambda spin: probe.get(spin, [1, 1, 1])) == 1000


def test_it_is_measured_once_for_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[int] = []

    def probe(library: Path, num_threads: int, spin: int) -> list[float]:
        probed.append(spin)
        return [1.0] * 3 if spin >= 3000 else [50.0] * 3

    monkeypatch.setattr(waiting, "gomp_library", lambda: LIBRARY)
    monkeypatch.setattr(waiting, "run_probe", probe)
    said: list[str] = []
    chosen = [choose_spin(2, lambda what, done, total: said.append(what)) for _ in range(3)]
    assert (chosen, len(said)) == ([3000] * 3, 1)
    assert probed == [*SPINS, *SPINS]
    assert choose_spin(1, lambda *_: None) == 0


def test_what_cannot_be_probed_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[float]:
        raise OSError("no such library")

    monkeypatch.setattr(waiting, "gomp_library", lambda: LIBRARY)
    monkeypatch.setattr(waiting, "run_probe", broken)
    assert choose_spin(2, lambda *_: None) == 0
    monkeypatch.setattr(waiting, "gomp_library", lambda: None)
    assert choose_spin(2, lambda *_: None) == 0


def test_of_rounds_that_disagree_the_shorter_spin_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([100_000, 1000])
    monkeypatch.setattr(waiting, "gomp_library", lambda: LIBRARY)
    monkeypatch.setattr(waiting, "shortest_of", lambda probe: next(turns))
    assert choose_spin(2, lambda *_: None) == 1000


@pytest.fixture
def default_model(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found already: the cache of these tests is empty."""
    monkeypatch.setattr(hub, "resolve_model", lambda *_: files)


@pytest.mark.usefixtures("default_model")
@pytest.mark.parametrize("name", USERS)
def test_where_the_user_says_how_to_wait_nothing_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(waiting, "choose_spin", lambda *_: pytest.fail("measured"))
    settings, _ = Engine(EngineConfig(device="cpu"))._resolve()
    assert settings.spin_count == 0


@pytest.mark.usefixtures("default_model")
def test_an_engine_on_a_cpu_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "choose_spin", lambda *_: 777)
    settings, _ = Engine(EngineConfig(device="cpu"))._resolve()
    assert settings.spin_count == 777


@pytest.mark.skipif(waiting.gomp_library() is None, reason="this torch brings another OpenMP")
def test_the_probe_runs_here() -> None:
    library = waiting.gomp_library()
    assert library is not None
    found = waiting.run_probe(library, 2, 1000)
    assert len(found) == len(waiting.WEIGHTS) and all(us > 0 for us in found)
