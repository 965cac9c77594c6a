"""Mixed steps on a GPU: replays give the tokens of steps that have their parts one after the other, in float32 (IEEE).

While they run nothing waits for the device, nothing is compiled and no memory is taken.
"""

from collections.abc import Iterator

import pytest
import torch
from support.device_watch import compilations, device_allocations, sync_mode_warns, synchronization_is_an_error
from support.graph_runners import counted, runner_of
from support.prompt_plans import SAMPLINGS, run_mixed
from support.ring import RingConfig, tiny_loaded

from overlap_spec.worker import step
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.warmup import capture_graphs, cuda_prompt_lengths, run_uncaptured, warm_up

PLACE = torch.device("cuda", 0)
BATCHES = (1, 4, 10)
MIXED = 4  # steps of `run_mixed`
METHODS = [("NONE", 1), ("EAGLE3", 1), ("EAGLE3", 3)]


def config_of(method: str, topk: int) -> RingConfig:
    num_steps, method = (0, "EAGLE3") if method == "NONE" else (3, method)
    return RingConfig(
        method=method, num_steps=num_steps, topk=topk, num_slots=10, num_pages=401, chunk_tokens=160,
        dtype=torch.float32, place=PLACE, graph_batch_sizes=BATCHES,
    )  # fmt: skip


def launched(config: RingConfig, joins: bool) -> Executor:
    """Without graphs. `joins`: windows and prompts run together."""
    models = tiny_loaded(1, config.num_steps, torch.float32, PLACE, config.method, topk=config.topk)
    executor = build_executor(models, config.geometry(), PLACE)
    if not joins:
        executor.use(runner_of(executor))  # of nothing
    return executor


@pytest.fixture(params=METHODS, ids=str)
def config(request: pytest.FixtureRequest) -> RingConfig:
    return config_of(*request.param)


@pytest.fixture
def captured(config: RingConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    monkeypatch.setattr(step, "READS_ALL", 20)  # so the larger size of prompts reads last rows alone
    executor, geometry = launched(config, joins=True), config.geometry()
    warm_up(executor, geometry, cuda_prompt_lengths(geometry))
    counts = capture_graphs(executor, geometry, BATCHES).counts
    assert counts["layers together"] == 4, "two batches, two sizes of prompts"
    run_uncaptured(executor, geometry)
    yield executor
    executor.close()


@sync_mode_warns
def test_a_replay_is_two_steps(config: RingConfig, captured: Executor) -> None:
    """Every kind of sampling in turns, on the same graphs."""
    apart, eager = launched(config, joins=False), launched(config, joins=True)
    alone, both = counted(apart), counted(captured)
    expected = {name: run_mixed(apart, sampling) for name, sampling in SAMPLINGS.items()}
    assert {name: run_mixed(eager, sampling) for name, sampling in SAMPLINGS.items()} == expected
    run_mixed(captured, SAMPLINGS["greedy"])
    before = device_allocations()
    with compilations(loaded=False) as compiled, synchronization_is_an_error():
        found = {name: run_mixed(captured, sampling) for name, sampling in SAMPLINGS.items()}
    assert found == expected
    assert not compiled and device_allocations() == before
    assert alone.num_together == 0 and both.num_together == (1 + len(SAMPLINGS)) * MIXED
