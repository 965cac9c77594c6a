"""A start on a GPU: kernels that are compiled together, and what is captured before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING

import pytest
import torch
from overlap_spec_kernels import compiling_together
from overlap_spec_kernels.launch import TritonKernel, shared_words
from support.device_watch import compilations, device_allocations, sync_mode_warns, synchronization_is_an_error
from support.plans import plan_of
from support.prompt_plans import SAMPLINGS, fresh, prompt, run
from support.ring import RingConfig, tiny_loaded
from torch import Tensor

from overlap_spec.sampling.context import SAMPLING_WORK, SamplingWork
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.capture import NO_RUN, CudaRecorder, Parts, capture_parts, no_collection
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.warmup import (
    capture_graphs,
    cuda_prompt_lengths,
    graph_runner,
    graph_sizes,
    run_uncaptured,
    warm_up,
)

if TYPE_CHECKING:
    import triton.language as tl

PLACE = torch.device("cuda", 0)
BATCHES = (1, 4, 10)
CONFIG = RingConfig(num_steps=3, num_slots=10, num_pages=401, chunk_tokens=160, dtype=torch.float32, widths_seed=1)


def make(num_layers: int = 2) -> Executor:
    models = tiny_loaded(1, 3, torch.float32, PLACE, layers=num_layers)
    return build_executor(models, CONFIG.geometry(), PLACE)


def start(executor: Executor) -> None:
    """As the worker's process does."""
    warm_up(executor, CONFIG.geometry(), cuda_prompt_lengths(CONFIG.geometry()), decodes=False)
    capture_graphs(executor, CONFIG.geometry(), BATCHES)
    run_uncaptured(executor, CONFIG.geometry())


def test_nothing_is_left_to_compile_after_kernels_were_compiled_together() -> None:
    executor, geometry = make(), CONFIG.geometry()
    with compiling_together(4) as together, together.finding():
        warm_up(executor, geometry, cuda_prompt_lengths(geometry))
        graph_runner(executor, graph_sizes(executor, geometry, BATCHES)).run_once()
    with compilations(loaded=False) as compiled:
        warm_up(executor, geometry, cuda_prompt_lengths(geometry))
        capture_graphs(executor, geometry, BATCHES)
    eager = run(make(), SAMPLINGS["sampled"])
    assert run(executor, SAMPLINGS["sampled"]) == eager
    executor.close()
    assert not compiled, compiled


@pytest.fixture
def executor() -> Iterator[Executor]:
    executor = make()
    start(executor)
    yield executor
    executor.close()


@sync_mode_warns
def test_every_kind_is_captured_at_start(executor: Executor) -> None:
    """A step of any kind: no sync, no memory, no compilation, and the eager tokens."""
    eager = make()
    expected = {name: run(eager, sampling) for name, sampling in SAMPLINGS.items()}
    run(executor, SAMPLINGS["greedy"])
    before = device_allocations()
    with compilations(loaded=False) as compiled, synchronization_is_an_error():
        found = {name: run(executor, sampling) for name, sampling in SAMPLINGS.items()}
    assert found == expected
    assert not compiled and device_allocations() == before


@sync_mode_warns
def test_a_start_that_skipped_layers_leaves_nothing_to_do() -> None:
    """Most of 20 layers were left out of it. Prompts that no graph holds take no memory and load no kernel either."""
    executor, eager, sampling = make(20), make(20), SAMPLINGS["greedy"]
    plans = [
        plan_of(index, [fresh(slot, prompt(slot, length), sampling)], executor.slots.width)
        for index, (slot, length) in enumerate(((0, 135), (1, 150), (2, 159), (3, 140)))
    ]
    start(executor)
    run(executor, sampling)
    before = device_allocations()
    with compilations(loaded=False) as compiled, synchronization_is_an_error():
        found = [executor.launch(plan).wait().tokens for plan in plans], run(executor, sampling)
    assert device_allocations() == before and not compiled
    assert found == ([eager.launch(plan).wait().tokens for plan in plans], run(eager, sampling))
    executor.close()


def _add(at: tl.tensor, TERM: tl.constexpr) -> None:
    tl.store(at, tl.load(at) + TERM)


def test_a_capture_loads_its_kernels_and_is_made_again_for_what_launches_share() -> None:
    """Nothing is run first; every kind of sampling has a kernel of its own, and counters are shared."""
    kernel, total, recorder = TritonKernel(_add), torch.zeros(1, device=PLACE), CudaRecorder()
    counters = cache(partial(shared_words, 1, PLACE, 5))

    def judge(forwarded: Tensor, kind: SamplingWork) -> Tensor:
        kernel[1,](forwarded, TERM=1 + SAMPLING_WORK.index(kind))
        return forwarded.add_(counters())

    parts = Parts(total.zero_, judge, None, 1, lambda kind: kind)
    with no_collection():
        graphs = capture_parts(parts, recorder, run=NO_RUN)
    recorder.finish()
    assert len(recorder._given_up) == 1 and counters().item() == 5
    assert recorder.counts == {"layers": 1, "judge": len(SAMPLING_WORK)}
    for expected, kind in enumerate(SAMPLING_WORK, start=1):
        graphs.layers()
        graphs.kinds[kind].judge()
        assert total.item() == expected + 5
