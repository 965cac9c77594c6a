"""Runs of several turns: each engine's best, and transformers where it is fastest."""

from typing import Any

import pytest
from support.fake_settings import fake_settings

from overlap_spec.bench.baseline import TransformersGenerate
from overlap_spec.bench.runs import best_of
from overlap_spec.bench.workload import Workload


def test_the_best_turn_stands_and_all_are_said() -> None:
    turns = [{"tokens_per_second": speed, "turn": turn} for turn, speed in enumerate((2.0, 3.0, 1.0))]
    assert best_of(turns) == {"tokens_per_second": 3.0, "turn": 1, "turns": [2.0, 3.0, 1.0]}


@pytest.mark.parametrize("fastest", ["its own", "as the worker's"])
def test_transformers_runs_where_its_first_turn_was_fastest(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(self: TransformersGenerate, name: str) -> dict[str, Any]:
        ran.append(name)
        return {"tokens_per_second": 2.0 if name == fastest else 1.0}

    monkeypatch.setattr(TransformersGenerate, "_run", run)
    generate = TransformersGenerate(fake_settings(), Workload())
    assert [generate.measure()["threads wait"] for _ in range(3)] == [fastest] * 3
    assert ran == ["its own", "as the worker's", fastest, fastest]


def test_transformers_gets_the_threads_that_the_machine_would_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KMP_AFFINITY", "the user's")
    environment = TransformersGenerate(fake_settings(), Workload()).environments["its own"]
    assert environment["KMP_AFFINITY"] == "the user's"
    assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS"} & environment.keys()
