"""Captured prefill steps on a GPU: the tokens of eager ones in float32 (IEEE), and no sync on the way."""

from collections.abc import Callable, Iterator

import pytest
import torch
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.prompt_plans import SAMPLINGS, run
from support.ring import RingConfig, tiny_loaded

from overlap_spec.messages import SamplingParams
from overlap_spec.worker import step
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.warmup import capture_graphs, warm_up

Make = Callable[[bool], Executor]


@pytest.fixture(params=[0, 3], ids=["plain", "eagle3"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    place = torch.device("cuda", 0)
    config = RingConfig(num_steps=request.param, num_slots=10, num_pages=401, chunk_tokens=160, dtype=torch.float32)
    models = tiny_loaded(1, request.param, torch.float32, place)

    def made(graphs: bool) -> Executor:
        executor = build_executor(models, config.geometry(), place)
        warm_up(executor, config.geometry())
        capture_graphs(executor, config.geometry(), (1, 4, 10) if graphs else ())
        return executor

    yield made


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_replay_is_the_eager_step(make: Make, sampling: SamplingParams) -> None:
    expected = run(make(False), sampling)
    captured = make(True)
    assert run(captured, sampling) == expected
    assert run(captured, sampling) == expected, "a replay left something behind"


def test_a_replay_that_reads_last_rows_is_the_eager_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a large model's, here of more than 20 rows."""
    monkeypatch.setattr(step, "READS_ALL", 20)
    expected = run(make(False), SAMPLINGS["greedy"])
    captured = make(True)
    assert run(captured, SAMPLINGS["greedy"]) == expected
    assert run(captured, SAMPLINGS["greedy"]) == expected


@sync_mode_warns
def test_launching_never_synchronizes(make: Make) -> None:
    executor = make(True)
    run(executor, SAMPLINGS["greedy"])
    with synchronization_is_an_error():
        run(executor, SAMPLINGS["greedy"])
