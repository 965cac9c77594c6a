"""Prefill steps laid out for more rows and chunks than they have: the same tokens, whatever is left over."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
import torch
from support.graph_runners import runner_of
from support.plans import SlotPart, plan_of
from support.prompt_plans import SAMPLINGS, fresh, pack, run
from support.ring import RingConfig, tiny_loaded
from support.tiny.methods import MULTI_LAYER

from overlap_spec.messages import ChunkWork, SamplingParams
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.prefill import Chunks, PromptInputs, fields_of
from overlap_spec.worker.startup.warmup import graph_sizes
from overlap_spec.worker.step import PromptShape, captured_shapes


@pytest.fixture(params=["NONE", "EAGLE3", *MULTI_LAYER])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    num_steps = 0 if request.param == "NONE" else 3
    models = tiny_loaded(1, num_steps, method=request.param)
    config = RingConfig(num_steps=num_steps, num_slots=10, num_pages=401)
    yield build_executor(models, config.geometry(), torch.device("cpu"))


@pytest.mark.full_but_every(4)
@pytest.mark.slow_but_every(9)
@pytest.mark.parametrize("reads_last", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_padding_changes_no_token(executor: Executor, sampling: SamplingParams, reads_last: bool) -> None:
    expected = run(executor, sampling)
    shapes = [replace(shape, reads_last=reads_last) for shape in captured_shapes(160, 0, 10)]
    executor.use(runner_of(executor, prompts=shapes))  # nothing captured: eager
    assert run(executor, sampling) == expected
    assert [len(row) for row in expected[0]] == [1, 1, 1, 0]
    assert all(tokens for step in expected[1:] for tokens in step)


@pytest.mark.slow
def test_an_empty_step_of_more_rows_than_a_request_has_positions() -> None:
    """As it is captured: `--context-length` may be below the rows of a step with many requests."""
    models = tiny_loaded(1, 3, method="EAGLE3")
    config = RingConfig(num_steps=3, num_slots=10, num_pages=401, max_len=1040)
    executor = build_executor(models, config.geometry(), torch.device("cpu"))
    shapes = captured_shapes(config.max_len, 1536, config.num_slots)
    assert shapes[-1].rows > config.max_len + 100
    runner_of(executor, prompts=shapes[-1:]).run_once()


def test_rows_left_over_are_the_last_chunks() -> None:
    plan = plan_of(0, [fresh(4, [7, 8, 9], SAMPLINGS["greedy"]), SlotPart(5, [], 2, pack([1]), 6)], 1)
    shape = PromptShape(7, 4, 7)
    packed = torch.from_numpy(Chunks(plan.chunks, plan.resets).laid_out(shape, dummy=10))
    inputs = PromptInputs.of(packed, shape)
    assert inputs.tokens.tolist() == [7, 8, 9, 1, 0, 0, 0]
    assert inputs.next_tokens.tolist() == [8, 9, -1, 6, 0, 0, 0]
    assert inputs.positions.tolist() == [0, 1, 2, 2, 0, 1, 2]
    assert inputs.owners.tolist() == [0, 0, 0, 1, 3, 3, 3]
    assert inputs.slots.tolist() == [4, 5, 10, 10]
    assert inputs.finals.tolist() == [4, 10, 10, 10]
    assert inputs.last_rows.tolist() == [2, 3, 0, 0]
    assert inputs.lengths.tolist() == [3, 0, 0, 0]
    assert inputs.fresh.tolist() == [1, 0, 0, 0]
    assert inputs.row_starts.tolist() == [0, 3, 4, 4, 7] and inputs.drawn is None
    output, shape = [SlotPart(5, [], 0, pack([1, 2, 3]), 6)], replace(shape, are_drawn=True)
    work = msgspec.structs.replace(plan_of(0, output, 1).chunks[0], num_drawn=2)
    packed = torch.from_numpy(Chunks([work]).laid_out(shape, dummy=10))
    drawn = PromptInputs.of(packed, shape).drawn
    assert drawn is not None and drawn.tolist() == [0, 1, 1, 3]


@pytest.mark.parametrize("deterministic", [False, True])
def test_steps_with_output_are_captured_with_the_flag_alone(deterministic: bool) -> None:
    """Last, so that their memory is the largest steps'."""
    config = RingConfig(num_steps=0, num_slots=10, num_pages=401, chunk_tokens=128, deterministic=deterministic)
    executor = build_executor(tiny_loaded(1, 0, family="qwen3 next"), config.geometry(), torch.device("cpu"))
    shapes = graph_sizes(executor, config.geometry(), (1,)).shapes()
    captured = [(shape.prompt_rows, shape.prompts.are_drawn) for shape in shapes if shape.prompts and not shape.slots]
    drawn = [(128, True), (64, True)] if deterministic else []
    assert captured == [*[(rows, False) for rows in (128, 64, 32, 16)], *drawn]


def test_rows_left_over_are_not_output() -> None:
    """A prompt of 13 tokens, the last of which are output, in a step of 64 rows."""
    models, config = tiny_loaded(1, 0, family="qwen3 next"), RingConfig(num_steps=0, num_slots=10, num_pages=401)
    found, padded = [], [replace(shape, are_drawn=True) for shape in captured_shapes(64, 0, 10)[2:]]
    for num_drawn, shapes in ((0, []), (5, []), (5, padded)):
        executor = build_executor(models, config.geometry(), torch.device("cpu"))
        executor.use(runner_of(executor, prompts=shapes))
        plan = plan_of(0, [fresh(1, list(range(13)), SAMPLINGS["greedy"])], 1)
        executor.launch(
            msgspec.structs.replace(plan, chunks=[msgspec.structs.replace(plan.chunks[0], num_drawn=num_drawn)])
        ).wait()
        found.append(executor._snapshots.state.layers[0].memory[1])
    for state in found[1:]:
        torch.testing.assert_close(state, found[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("next_token", "length"), [(-1, 9), (0, 0), (7, 0)])
def test_a_slot_gets_its_length_when_its_prompt_is_complete(next_token: int, length: int) -> None:
    """Token 0 is a next token like another."""
    chunks = Chunks([ChunkWork(2, 6, pack([5, 6, 7]), next_token)])
    fields = fields_of(chunks.laid_out(chunks.shape, 9), chunks.shape)
    assert [field.tolist() for field in fields[4:8]] == [[2], [2 if next_token < 0 else 9], [2], [length]]
