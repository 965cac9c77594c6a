"""Prefill steps laid out for more rows and chunks than they have: the same tokens, whatever is left over."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.plans import SlotPart, plan_of
from support.prompt_plans import SAMPLINGS, fresh, pack, run
from support.ring import RingConfig, tiny_loaded
from support.tiny.methods import MULTI_LAYER

from overlap_spec.messages import ChunkWork, SamplingParams
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.chunks import Chunks, PromptShape, fields_of
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.prefill import PromptInputs
from overlap_spec.worker.prefill_graphs import CHUNKS, ROWS, GraphPrefiller, captured_shapes


@pytest.fixture(params=["NONE", "EAGLE3", *MULTI_LAYER])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    num_steps = 0 if request.param == "NONE" else 3
    models = tiny_loaded(1, num_steps, method=request.param)
    config = RingConfig(num_steps=num_steps, num_slots=10, num_pages=401)
    yield build_executor(models, config.geometry(), torch.device("cpu"))


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("reads_last", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_padding_changes_no_token(executor: Executor, sampling: SamplingParams, reads_last: bool) -> None:
    expected = run(executor, sampling)
    shapes = [replace(shape, reads_last=reads_last) for shape in captured_shapes(160, 0, 10)]
    padded = GraphPrefiller(executor.prefill_step, executor.slots, shapes)  # nothing captured: eager
    executor.use(executor.decode_step, padded)
    assert run(executor, sampling) == expected
    assert [len(row) for row in expected[0]] == [1, 1, 1, 0]
    assert all(tokens for step in expected[1:] for tokens in step)


def test_a_step_gets_the_smallest_size_that_holds_it(executor: Executor) -> None:
    prefiller = GraphPrefiller(executor.prefill_step, executor.slots, captured_shapes(160, 0, 10))
    assert prefiller.shape_for(PromptShape(17, 2, 9)) == PromptShape(32, CHUNKS + 1, 32)
    assert prefiller.shape_for(PromptShape(128, CHUNKS, 100)).rows == 128
    too_long, too_many = PromptShape(129, 1, 129), PromptShape(20, CHUNKS + 1, 3)
    assert prefiller.shape_for(too_long) == too_long, f"{ROWS}: more rows than positions are not captured"
    assert prefiller.shape_for(too_many) == too_many


def few(shapes: list[PromptShape]) -> list[int]:
    return [shape.rows for shape in shapes if shape.chunks == CHUNKS + 1]


def test_a_large_model_has_finer_sizes_up_to_what_is_captured_of_it() -> None:
    large, huge, small = 1400, 140, 80_000  # rows of steps that hide their launches
    assert few(captured_shapes(8192, large, 128)) == [16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024]
    assert few(captured_shapes(8192, huge, 128)) == few(captured_shapes(8192, small, 128)) == list(ROWS)
    assert few(captured_shapes(700, large, 128))[-1] == 640


def test_large_steps_of_large_models_read_last_rows_alone(executor: Executor) -> None:
    def size_for(num_rows: int, batch_rows: int, scored: bool) -> int:
        shapes = captured_shapes(8192, batch_rows, 10, reads_last=True)
        prefiller = GraphPrefiller(executor.prefill_step, executor.slots, shapes)
        return prefiller.shape_for(PromptShape(num_rows, 2, num_rows, reads_last=not scored)).rows

    large, small = 1400, 80_000
    assert size_for(600, large, scored=False) == 640
    assert size_for(600, large, scored=True) == 600, "not captured"
    assert size_for(200, large, scored=True) == 256
    assert size_for(500, small, scored=True) == 512


def test_a_step_of_many_requests_is_padded_further(executor: Executor) -> None:
    shapes = captured_shapes(8192, 1400, 128)
    prefiller = GraphPrefiller(executor.prefill_step, executor.slots, shapes)
    assert prefiller.shape_for(PromptShape(600, 4, 300)).rows == 640
    assert prefiller.shape_for(PromptShape(600, 20, 300)).rows == 1024


def test_an_empty_step_of_more_rows_than_a_request_has_positions() -> None:
    """As it is captured: `--context-length` may be below the rows of a step with many requests."""
    models = tiny_loaded(1, 3, method="EAGLE3")
    config = RingConfig(num_steps=3, num_slots=10, num_pages=401, max_len=1040)
    executor = build_executor(models, config.geometry(), torch.device("cpu"))
    shapes = captured_shapes(config.max_len, 1536, config.num_slots)
    assert shapes[-1].rows > config.max_len + 100
    GraphPrefiller(executor.prefill_step, executor.slots, shapes[-1:]).run_once()


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
    assert inputs.row_starts.tolist() == [0, 3, 4, 4, 7]


@pytest.mark.parametrize(("next_token", "length"), [(-1, 9), (0, 0), (7, 0)])
def test_a_slot_gets_its_length_when_its_prompt_is_complete(next_token: int, length: int) -> None:
    """Token 0 is a next token like another."""
    chunks = Chunks([ChunkWork(2, 6, pack([5, 6, 7]), next_token)])
    fields = fields_of(chunks.laid_out(chunks.shape, 9), chunks.shape)
    assert [field.tolist() for field in fields[4:8]] == [[2], [2 if next_token < 0 else 9], [2], [length]]
