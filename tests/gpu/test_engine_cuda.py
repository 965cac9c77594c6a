"""The CUDA path on real weights, float32 (IEEE): the same tokens as transformers on a CPU, and no hidden sync.

SmolLM2's GGUF is taken from the cache directory of the default model. Run by hand on a GPU: `pytest -m cuda`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from solo import Solo, assert_equal_up_to_near_ties

from overlap_spec.config import EngineConfig, ModelFiles
from overlap_spec.hub import resolve_model
from overlap_spec.messages import SamplingParams

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DATA = Path(__file__).parent.parent / "data"
NUM_TOKENS = 64
CHAIN = {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1}


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve_model(EngineConfig())


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return json.loads((DATA / "greedy64.json").read_text())["rows"]


def solo(files: ModelFiles, num_steps: int, depth: int = 1, page_size: int = 16, graphs: bool = True) -> Solo:
    flags: dict[str, Any] = {"device": "cuda", "dtype": "float32", "page_size": page_size, "graphs": graphs}
    if num_steps == 0:
        return Solo(files, depth, **flags, speculative_algorithm="NONE")
    numbers = {"speculative_num_steps": num_steps, "speculative_num_draft_tokens": num_steps + 1}
    return Solo(files, depth, **flags, **CHAIN, **numbers)


@pytest.fixture(scope="module")
def plain(files: ModelFiles) -> Iterator[Solo]:
    engine = solo(files, 0)
    yield engine
    engine.close()


def greedy() -> SamplingParams:
    return SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, seed=0)


def test_plain_decoding_is_transformers(plain: Solo, rows: list[dict], record_summary) -> None:
    found = assert_equal_up_to_near_ties(rows, lambda ids: plain.answer(ids, greedy()).tokens, NUM_TOKENS)
    record_summary("smollm2_plain_h200", {"prompts": len(rows), "near_ties": str(found)}, device_name())


@pytest.mark.parametrize(
    ("num_steps", "depth", "page_size", "graphs"),
    [(3, 1, 16, True), (3, 2, 16, True), (1, 2, 1, True), (5, 2, 1, True), (3, 2, 16, False)],
)
def test_eagle3_is_plain_decoding(
    files: ModelFiles, rows: list[dict], num_steps: int, depth: int, page_size: int, graphs: bool, record_summary
) -> None:
    engine = solo(files, num_steps, depth, page_size, graphs)
    try:
        found = assert_equal_up_to_near_ties(rows, lambda ids: engine.answer(ids, greedy()).tokens, NUM_TOKENS)
    finally:
        engine.close()
    figures = {"prompts": len(rows), "near_ties": str(found)}
    kind = "graphs" if graphs else "eager"
    record_summary(f"smollm2_eagle3_h200_steps{num_steps}_depth{depth}_page{page_size}_{kind}", figures, device_name())


def test_accept_length_is_the_written_out_loops(files: ModelFiles, rows: list[dict], record_summary) -> None:
    chains = json.loads((DATA / "eagle3_chains.json").read_text())["chains"]["3"]
    expected = [len(step["committed"]) for chain in chains for step in chain["steps"]]
    engine = solo(files, 3)
    try:
        runs = [len(run) for row in rows[:20] for run in engine.answer(row["prompt_ids"], greedy()).runs]
    finally:
        engine.close()
    accept_length = sum(runs) / len(runs)
    assert accept_length == pytest.approx(sum(expected) / len(expected), abs=0.02)
    record_summary("smollm2_accept_length_h200", {"accept_length": round(accept_length, 4)}, device_name())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_seed_gives_the_same_tokens_with_and_without_speculation(
    files: ModelFiles, plain: Solo, rows: list[dict], temperature: float
) -> None:
    sampling = SamplingParams(max_new_tokens=32, temperature=temperature, top_p=0.95, top_k=200, seed=7)
    engine = solo(files, 3, depth=2)
    try:
        for row in rows[:4]:
            expected = plain.answer(row["prompt_ids"], sampling).tokens
            assert engine.answer(row["prompt_ids"], sampling).tokens == expected
    finally:
        engine.close()


@pytest.mark.parametrize(
    "sampling",
    [greedy(), SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, seed=3)],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("num_steps", [0, 3])
def test_the_launch_path_never_synchronizes(
    files: ModelFiles, rows: list[dict], sampling: SamplingParams, num_steps: int, graphs: bool
) -> None:
    engine = solo(files, num_steps, depth=2, graphs=graphs)
    try:
        engine.answer(rows[0]["prompt_ids"], sampling)  # kernels are compiled on first use
        torch.cuda.set_sync_debug_mode("error")
        answer = engine.answer(rows[1]["prompt_ids"], sampling)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        engine.close()
    assert len(answer.tokens) > 4


def test_nothing_is_compiled_after_warm_up(files: ModelFiles, rows: list[dict]) -> None:
    """Ready means warm: prompts of any length, and what a prefix hit leaves of them, meet compiled kernels."""
    engine = solo(files, 3, depth=2)
    compiled: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **what: compiled.append(str(what.get("fn")))
    try:
        for length in (1, 2, 3, 5, 7, 8, 15, 16, 17, 33, 64, 100, 129, 300, 700, 1500):
            prompt = (rows[0]["prompt_ids"] * 60)[:length]
            engine.answer(prompt, SamplingParams(max_new_tokens=6, temperature=0.0, seed=0))
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
        engine.close()
    assert not compiled, compiled


def device_name() -> str:
    return torch.cuda.get_device_name()
