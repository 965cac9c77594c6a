"""What is run before captures launches everything that captures launch, though layers and kinds are left out of it."""

from contextlib import nullcontext

import pytest
import torch
from support.operations import operations
from support.replayed_parts import ReplayedParts
from support.ring import RingConfig, tiny_loaded

from overlap_spec.sampling.types import SAMPLING_WORK, SamplingWork
from overlap_spec.worker import step_graphs
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.chunks import PromptShape
from overlap_spec.worker.decode_graphs import GraphDecoder
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.prefill_graphs import CHUNKS, GraphPrefiller
from overlap_spec.worker.step_graphs import FIRST_RUNS, run_once

SHAPES = [PromptShape(16, CHUNKS + 1, 16), PromptShape(24, CHUNKS + 1, 24), PromptShape(24, 11, 24)]
WIDTHS, SIZES = (1, 2, 4), (1, 4)


def deep(method: str = "EAGLE3", topk: int = 1) -> Executor:
    """Its target has layers to leave out."""
    width = 4 if topk > 1 else None
    config = RingConfig(
        method, num_steps=3, topk=topk, num_draft_tokens=width, num_slots=10, num_pages=401, widths_seed=1
    )
    models = tiny_loaded(1, 3, method=method, topk=topk, layers=7)
    return build_executor(models, config.geometry(), torch.device("cpu"))


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("EAGLE3", 3), ("STANDALONE", 1), ("NGRAM", 1)])
def test_prompts_launch_no_more_in_all_kinds_and_layers(
    method: str, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = deep(method, topk)
    prefiller = GraphPrefiller(executor.prefill_step, executor.slots, SHAPES)

    def all_of_it() -> None:
        with torch.inference_mode():
            for shape in SHAPES:
                run_once(prefiller._parts(prefiller._packed(shape), shape), SAMPLING_WORK)

    run = operations(prefiller.run_once)
    monkeypatch.setattr(step_graphs, "rehearsing", nullcontext)
    assert operations(all_of_it) == run


def test_kinds_of_sampling_are_run_once_for_each_number_of_chunks() -> None:
    executor = deep()
    prefiller = GraphPrefiller(executor.prefill_step, executor.slots, SHAPES)
    runs = [(shape.rows, shape.chunks, len(kinds)) for shape, kinds in prefiller._first_runs()]
    assert runs == [(24, 11, len(SAMPLING_WORK)), (24, 9, len(SAMPLING_WORK)), (16, 9, 1)]


def test_every_kind_of_every_decode_step_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = deep()
    run: list[tuple[SamplingWork, ...]] = []
    monkeypatch.setattr(step_graphs, "run_once", lambda parts, kinds: run.append(tuple(kinds)))
    recorder = ReplayedParts()
    GraphDecoder(executor.decode_step, executor.slots, WIDTHS, SIZES).capture(recorder)
    assert run == [SAMPLING_WORK] * len(WIDTHS) * len(SIZES)
    assert recorder.seconds[FIRST_RUNS] > 0
