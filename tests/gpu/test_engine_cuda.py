"""The CUDA path on real weights, float32 (IEEE): the same tokens as transformers on a CPU, and no hidden sync.

SmolLM2's GGUF is taken from the cache directory of the default model. Run by hand on a GPU: `pytest -m cuda`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device_watch import (
    compilations,
    device_allocations,
    pinned_allocations,
    sync_mode_warns,
    synchronization_is_an_error,
)
from support.solo import Solo, SoloAnswer, assert_answers_equal

from overlap_spec.config import ModelFiles
from overlap_spec.messages import SamplingParams

DATA = Path(__file__).parent.parent / "data"
NUM_TOKENS = 64
BATCH = 32
FEW = 10  # prompts where a step takes long: one request, launched operation by operation
NUM_STEPS = {"plain": 0, "eagle3": 3}
METHODS = [pytest.param(method, marks=pytest.mark.xdist_group(f"{method} engine")) for method in NUM_STEPS]
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, seed=0)
SAMPLED = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, seed=3)


def engine_of(files: ModelFiles, num_steps: int, batch: int = BATCH, **flags: Any) -> Solo:
    """Captured; plain decoding with 0 steps."""
    flags = {"device": "cuda", "dtype": "float32", "graphs": True, "batch": batch, **flags}
    if num_steps == 0:
        return Solo(files, **flags, speculative_algorithm="NONE")
    return Solo(
        files,
        **flags,
        speculative_algorithm="EAGLE3",
        speculative_num_steps=num_steps,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=num_steps + 1,
    )


class Engines(dict[str, Solo]):
    """By method, each made when it is first asked for."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files

    def __missing__(self, method: str) -> Solo:
        return self.setdefault(method, engine_of(self._files, NUM_STEPS[method]))


@pytest.fixture(scope="module")
def engines(files: ModelFiles) -> Iterator[Engines]:
    """Plain and EAGLE-3 (3, 1, 4). A test says how they run: `set_up`."""
    engines = Engines(files)
    yield engines
    for engine in engines.values():
        engine.close()


def set_up(engine: Solo, depth: int, graphs: bool) -> Solo:
    engine.depth = depth
    engine.use_graphs(graphs)
    return engine


def tokens_of(answers: list[SoloAnswer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def prompts_of(rows: list[dict]) -> list[list[int]]:
    return [row["prompt_ids"] for row in rows]


@pytest.mark.parametrize("batch", [1, 7, BATCH])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_every_engine_is_transformers(
    engines: Engines, rows: list[dict], method: str, depth: int, graphs: bool, batch: int, record_summary
) -> None:
    """`batch` requests run together, fewer as they end."""
    rows = rows[:FEW] if batch == 1 and not graphs else rows
    engine = set_up(engines[method], depth, graphs)
    answers = engine.answers(prompts_of(rows), GREEDY, together=batch)
    found = assert_answers_equal(rows, tokens_of(answers), NUM_TOKENS)
    name = f"smollm2_{method}_depth{depth}_{'graphs' if graphs else 'eager'}_batch{batch}"
    figures = {"prompts": len(rows), "tokens": sum(map(len, tokens_of(answers))), "near_ties": str(found)}
    record_summary(name, figures, torch.cuda.get_device_name())


@pytest.mark.parametrize(("num_steps", "page_size"), [(1, 1), (5, 64)])
def test_other_chains_and_pages(
    files: ModelFiles, rows: list[dict], num_steps: int, page_size: int, record_summary
) -> None:
    engine = engine_of(files, num_steps, 8, depth=2, page_size=page_size)
    try:
        answers = engine.answers(prompts_of(rows), GREEDY, together=8)
    finally:
        engine.close()
    found = assert_answers_equal(rows, tokens_of(answers), NUM_TOKENS)
    name = f"smollm2_eagle3_steps{num_steps}_page{page_size}"
    record_summary(name, {"prompts": len(rows), "near_ties": str(found)}, torch.cuda.get_device_name())


@pytest.mark.xdist_group("eagle3 engine")
def test_accept_length_is_the_written_out_loops(engines: Engines, rows: list[dict], record_summary) -> None:
    chains = json.loads((DATA / "eagle3_chains.json").read_text())["chains"]["3"]
    expected = [len(step["committed"]) for chain in chains for step in chain["steps"]]
    answers = set_up(engines["eagle3"], 1, graphs=True).answers(prompts_of(rows[:20]), GREEDY, together=1)
    runs = [len(run) for answer in answers for run in answer.runs]
    accept_length = sum(runs) / len(runs)
    assert accept_length == pytest.approx(sum(expected) / len(expected), abs=0.02)
    name = torch.cuda.get_device_name()
    record_summary("smollm2_accept_length", {"accept_length": round(accept_length, 4)}, name)


@pytest.mark.xdist_group("eagle3 engine")
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_seed_gives_the_same_tokens_with_and_without_speculation(
    engines: Engines, rows: list[dict], temperature: float
) -> None:
    sampling = SamplingParams(max_new_tokens=32, temperature=temperature, top_p=0.95, top_k=200, seed=7)
    plain, chain = (set_up(engines[method], 2, graphs=True) for method in NUM_STEPS)
    expected = tokens_of(plain.answers(prompts_of(rows[:4]), sampling, together=1))
    assert tokens_of(chain.answers(prompts_of(rows[:4]), sampling, together=1)) == expected
    assert tokens_of(chain.answers(prompts_of(rows[:4]), sampling, together=4)) == expected


@sync_mode_warns
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("method", METHODS)
def test_the_launch_path_never_synchronizes(
    engines: Engines, rows: list[dict], sampling: SamplingParams, method: str, graphs: bool
) -> None:
    engine = set_up(engines[method], 2, graphs)
    engine.answers(prompts_of(rows[:3]), sampling, together=3)  # an eager step compiles on first use
    with synchronization_is_an_error():
        answers = engine.answers(prompts_of(rows[1:4]), sampling, together=3)
    assert all(len(answer.tokens) > 4 for answer in answers)


@sync_mode_warns
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", NUM_STEPS)
def test_ready_means_warm(files: ModelFiles, rows: list[dict], method: str, dtype: str, record_summary) -> None:
    """After warm-up and captures nothing is compiled and no device memory taken: any prompt, batch and sampling."""
    engine = engine_of(files, NUM_STEPS[method], dtype=dtype, depth=2)
    few = SamplingParams(max_new_tokens=6, temperature=0.0, seed=0)
    prompts = prompts_of(rows)
    before, pinned_before = device_allocations(), pinned_allocations()
    try:
        with compilations() as compiled, synchronization_is_an_error():
            for length in (1, 2, 3, 5, 7, 8, 15, 16, 17, 33, 64, 100, 129, 300, 700, 1500):
                engine.answer((prompts[0] * 60)[:length], few)
            for together in (1, 2, 3, 7, 20, BATCH):
                for sampling in (GREEDY, SAMPLED):
                    engine.answers(prompts[:BATCH], sampling, together)
        taken = device_allocations() - before
        pinned = pinned_allocations() - pinned_before
    finally:
        engine.close()
    figures = {"device_allocations": taken, "pinned_allocations": pinned, "compiled": len(compiled)}
    record_summary(f"warm_{method}_{dtype}", figures, torch.cuda.get_device_name())
    assert not compiled, compiled
    assert taken == 0
