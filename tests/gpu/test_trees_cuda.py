"""Trees on a GPU, float32 (IEEE), launched operation by operation and in graphs: the same tokens as plain decoding.

On the default model with the head that ships with it, and random schedules with every drafting model on tiny ones. As
in tests/gpu/test_engine_cuda.py, nothing on the launch path may wait for the device.
"""

import json
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.device_watch import compilations, device_allocations, sync_mode_warns, synchronization_is_an_error
from support.plain_oracle import PlainOracle
from support.plans import SlotPart, plan_of
from support.random_schedules import Counting, run_requests, run_schedules
from support.ring import RingConfig, tiny_loaded
from support.solo import Solo, assert_answers_equal
from test_engine_cuda import DATA, FEW, GREEDY, NUM_TOKENS, SAMPLED, prompts_of, set_up, tokens_of
from test_ring_cuda import BATCH_SIZES, FULL, PLACE, mixed_requests, watch_for

from overlap_spec.config import ModelFiles
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import ResetSlot, SamplingParams, StepPlan, StepResult, TreePaths, find

NUM_SCHEDULES, MOST_TOGETHER = 15, 8
SHAPES = {"4-3-10": (4, 3, 10), "5-8-32": (5, 8, 32), "1-4-5": (1, 4, 5), "8-16-64": (8, 16, 64)}
DRAFTED = ["EAGLE", "EAGLE with a token map", "EAGLE3", "NEXTN", "STANDALONE", "STANDALONE of fewer tokens"]
DRAFTED += ["DFLASH", "P-EAGLE"]


def tree_of(files: ModelFiles, shape: tuple[int, int, int], **flags: Any) -> Solo:
    num_steps, topk, width = shape
    flags = {"device": "cuda", "dtype": "float32", "graphs": True, "batch": MOST_TOGETHER, **flags}
    return Solo(
        files,
        **flags,
        speculative_algorithm="EAGLE3",
        speculative_num_steps=num_steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=width,
    )


@pytest.fixture(scope="module")
def engine(files: ModelFiles) -> Iterator[Solo]:
    """(4, 3, 10). A test says how it runs: `set_up`."""
    engine = tree_of(files, SHAPES["4-3-10"])
    yield engine
    engine.close()


@pytest.mark.xdist_group("tree engine")
@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("depth", [1, 2])
def test_trees_are_transformers(
    engine: Solo, rows: list[dict], depth: int, graphs: bool, batch: int, record_summary
) -> None:
    """`batch` requests run together, fewer as they end."""
    rows = rows if graphs else rows[:FEW]
    answers = set_up(engine, depth, graphs).answers(prompts_of(rows), GREEDY, together=batch)
    found = assert_answers_equal(rows, tokens_of(answers), NUM_TOKENS)
    runs = [len(run) for answer in answers for run in answer.runs]
    name = f"smollm2_eagle3_tree_depth{depth}_{'graphs' if graphs else 'eager'}_batch{batch}"
    figures = {"prompts": len(rows), "accept_length": round(sum(runs) / len(runs), 4), "near_ties": str(found)}
    record_summary(name, figures, torch.cuda.get_device_name())


@pytest.mark.parametrize(("shape", "page_size"), [("5-8-32", 64), ("1-4-5", 1), ("8-16-64", 16)])
def test_other_trees_and_pages(files: ModelFiles, rows: list[dict], shape: str, page_size: int, record_summary) -> None:
    engine = tree_of(files, SHAPES[shape], depth=2, page_size=page_size)
    try:
        answers = engine.answers(prompts_of(rows), GREEDY, together=MOST_TOGETHER)
    finally:
        engine.close()
    found = assert_answers_equal(rows, tokens_of(answers), NUM_TOKENS)
    runs = [len(run) for answer in answers for run in answer.runs]
    figures = {"prompts": len(rows), "accept_length": round(sum(runs) / len(runs), 4), "near_ties": str(found)}
    record_summary(f"smollm2_eagle3_tree_{shape}_page{page_size}", figures, torch.cuda.get_device_name())


@pytest.mark.xdist_group("tree engine")
def test_accept_length_is_the_written_out_loops(engine: Solo, rows: list[dict], record_summary) -> None:
    trees = json.loads((DATA / "trees.json").read_text())
    assert tuple(trees["shape"]) == SHAPES["4-3-10"]
    expected = [len(step["committed"]) for row in trees["trees"]["eagle3"] for step in row["steps"]]
    answers = set_up(engine, 1, graphs=True).answers(prompts_of(rows[:20]), GREEDY, together=1)
    runs = [len(run) for answer in answers for run in answer.runs]
    accept_length = sum(runs) / len(runs)
    assert accept_length == pytest.approx(sum(expected) / len(expected), abs=0.03)
    figures = {"accept_length": round(accept_length, 4)}
    record_summary("smollm2_tree_accept_length", figures, torch.cuda.get_device_name())


@pytest.mark.xdist_group("tree engine")
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_seed_gives_plain_decodings_tokens(
    files: ModelFiles, engine: Solo, rows: list[dict], temperature: float
) -> None:
    sampling = SamplingParams(max_new_tokens=32, temperature=temperature, top_p=0.95, top_k=200, seed=7)
    flags: dict[str, Any] = {"device": "cuda", "dtype": "float32", "graphs": True, "speculative_algorithm": "NONE"}
    plain = Solo(files, **flags)
    try:
        expected = tokens_of(plain.answers(prompts_of(rows[:4]), sampling, together=1))
    finally:
        plain.close()
    for together in (1, 4):
        answers = set_up(engine, 2, graphs=True).answers(prompts_of(rows[:4]), sampling, together)
        assert tokens_of(answers) == expected


@pytest.mark.xdist_group("tree engine")
@sync_mode_warns
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_the_launch_path_never_synchronizes(
    engine: Solo, rows: list[dict], sampling: SamplingParams, graphs: bool
) -> None:
    set_up(engine, 2, graphs)
    engine.answers(prompts_of(rows[:3]), sampling, together=3)  # an eager step compiles on first use
    with synchronization_is_an_error():
        answers = engine.answers(prompts_of(rows[1:4]), sampling, together=3)
    assert all(len(answer.tokens) > 4 for answer in answers)


@sync_mode_warns
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ready_means_warm(files: ModelFiles, rows: list[dict], dtype: str) -> None:
    engine = tree_of(files, SHAPES["4-3-10"], dtype=dtype, depth=2)
    few = SamplingParams(max_new_tokens=6, temperature=0.0, seed=0)
    prompts, before = prompts_of(rows), device_allocations()
    try:
        with compilations() as compiled, synchronization_is_an_error():
            for length in (1, 3, 8, 17, 64, 129, 700):
                engine.answer((prompts[0] * 60)[:length], few)
            for together in (1, 2, 7, MOST_TOGETHER):
                for sampling in (GREEDY, SAMPLED):
                    engine.answers(prompts[:MOST_TOGETHER], sampling, together)
        taken = device_allocations() - before
    finally:
        engine.close()
    assert not compiled, compiled
    assert taken == 0


@pytest.mark.parametrize("batch_sizes", [(), BATCH_SIZES], ids=["eager", "graphs"])
@pytest.mark.parametrize("method", DRAFTED)
def test_random_schedules(codec: TextCodec, method: str, batch_sizes: tuple[int, ...], record_summary) -> None:
    seen = run_schedules(
        NUM_SCHEDULES,
        codec,
        method=method,
        topk=3,
        dtype=torch.float32,
        place=PLACE,
        graph_batch_sizes=batch_sizes,
    )
    name = f"schedules_trees_{'graphs' if batch_sizes else 'eager'}_{method.replace(' ', '_')}"
    record_summary(name, {"schedules": NUM_SCHEDULES, **seen}, torch.cuda.get_device_name())


def test_paths_of_wide_steps_tell_what_narrow_ones_commit(files: ModelFiles, rows: list[dict], record_summary) -> None:
    """Mean runs at width 8, by columns that stood, against mean runs of steps that are narrower."""
    engine = tree_of(files, (5, 4, 8), speculative_adaptive=True)
    try:
        runs = {width: results_of(engine, prompts_of(rows[:20]), width) for width in (8, 4, 2)}
    finally:
        engine.close()
    trees = [find(result.extensions, TreePaths) for result in runs[8]]
    paths = [each.paths[0] for each in trees if each is not None]
    assert all(each is not None and each.last_guesses == [7] for each in trees)
    figures = {}
    for width, results in runs.items():
        foretold = 1 + sum(column < width for path in paths for column in path) / len(paths)
        measured = sum(len(result.tokens[0]) for result in results) / len(results)
        assert measured == pytest.approx(foretold, rel=0.06)
        figures |= {f"width_{width}": round(measured, 4), f"width_{width}_foretold": round(foretold, 4)}
    record_summary("smollm2_eagle3_tree_columns", figures, torch.cuda.get_device_name())


def results_of(engine: Solo, prompts: list[list[int]], width: int) -> list[StepResult]:
    """Decode steps of one request after the other, all of this width."""
    results = []
    for prompt in prompts:
        pages = list(range(1, engine._geometry.num_pages))[: engine._geometry.num_page_columns]
        reset = ResetSlot(SamplingParams(temperature=0.0, seed=0), len(prompt), (), len(prompt))
        work = SlotPart(slot=0, new_pages=pages, tokens=array("i", prompt).tobytes(), reset=reset)
        engine.executor.launch(plan_of(0, [work], engine._geometry.width)).wait()
        num_tokens = 1
        while num_tokens < NUM_TOKENS:
            results.append(engine.executor.launch(StepPlan(0, width, [0])).wait())
            num_tokens += len(results[-1].tokens[0])
    return results


@sync_mode_warns
@pytest.mark.parametrize("method", DRAFTED)
def test_requests_in_graphs(codec: TextCodec, method: str, num_requests: int, record_summary) -> None:
    more = {"method": method, "graph_batch_sizes": BATCH_SIZES, "widths_seed": 1, "topk": 3, "num_pages": 60}
    config = RingConfig(**{**vars(FULL), **more})
    models, figures = tiny_loaded(20, config.num_steps, torch.float32, PLACE, method, topk=config.topk), {}
    oracle = PlainOracle(20, codec, torch.float32, PLACE)
    counting = Counting(oracle)
    requests = mixed_requests("the same for every method", num_requests)
    try:
        seen = run_requests(requests, models, config, codec, counting, method, watch_for(config, figures))
    finally:
        oracle.close()
    figures |= {"requests": num_requests, "wrong": len(counting.wrong), **seen}
    record_summary(f"requests_trees_{method.replace(' ', '_')}", figures, torch.cuda.get_device_name())
    assert not counting.wrong, counting.wrong
    assert seen["finished"] > num_requests // 2
