"""The recurrence of Gated DeltaNet: chunks against tokens, windows against plain decoding, and whose state is whose."""

import random
from dataclasses import replace

import pytest
import torch
from support.recurrent_rows import SLOTS, WIDTH, decoded, prompts, rows_of, state_of, windows

from overlap_spec.models.interfaces import RowsRead
from overlap_spec.models.layers.recurrent import (
    CHUNK,
    DeltaShape,
    GatedHeadNorm,
    TokenRows,
    halved_sum,
    recur,
    recurred,
)
from overlap_spec.models.recurrent_state import RecurrentState, StateShape

F64, CPU = torch.float64, torch.device("cpu")
HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM, KERNEL = 6, 3, 7, 5, 4
CONV_DIM = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
SIZES = StateShape(1, CONV_DIM, KERNEL, HEADS, KEY_DIM, VALUE_DIM)


def shape_of(dtype: torch.dtype = torch.float32, stored: torch.dtype | None = None) -> DeltaShape:
    draw = torch.Generator().manual_seed(1)
    sizes = replace(SIZES, dtype=stored).sizes
    wide = torch.promote_types(dtype, torch.float32)
    return DeltaShape(
        1,
        *sizes,
        num_key_heads=KEY_HEADS,
        conv=torch.randn(CONV_DIM, KERNEL, generator=draw).to(dtype),
        steepness=torch.rand(HEADS, generator=draw).to(wide),
        offset=torch.randn(HEADS, generator=draw).to(wide),
    )


def some_tokens(count: int) -> TokenRows:
    shape = shape_of(F64)
    history = torch.randn(1, KERNEL - 1 + count, CONV_DIM, dtype=F64, generator=torch.Generator().manual_seed(4))
    return shape.rows(history, rows_of(shape, 5, count, F64)[None, :, CONV_DIM:]).at(0)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 12, 128])
def test_a_sum_in_halves_is_the_sum(size: int) -> None:
    x = torch.randn(3, size, 5, dtype=F64, generator=torch.Generator().manual_seed(size))
    torch.testing.assert_close(halved_sum(x, 1), x.sum(1), atol=1e-13, rtol=0)


def test_queries_and_keys_have_their_lengths() -> None:
    tokens = some_tokens(9)
    torch.testing.assert_close(tokens.k.norm(dim=-1), torch.ones(9, HEADS, dtype=F64), atol=1e-4, rtol=0)
    lengths = torch.full((9, HEADS), KEY_DIM**-0.5, dtype=F64)
    torch.testing.assert_close(tokens.q.norm(dim=-1), lengths, atol=1e-4, rtol=0)
    assert torch.equal(tokens.k[:, 0], tokens.k[:, 1]) and not torch.equal(tokens.k[:, 1], tokens.k[:, 2])


@pytest.mark.parametrize("count", [1, 5, CHUNK])
def test_a_chunk_is_its_tokens_one_after_another(count: int) -> None:
    memory = torch.randn(HEADS, KEY_DIM, VALUE_DIM, dtype=F64, generator=torch.Generator().manual_seed(2))
    tokens, found = some_tokens(count), []
    shape = shape_of(F64)
    after, out = shape.run_chunk(memory, tokens)
    one = memory[None]
    for index in range(count):
        token = tokens.at(slice(index, index + 1))
        one = shape.advance(one, token)
        found.append(shape.read(one, token)[0])
    torch.testing.assert_close(after, one[0], atol=1e-11, rtol=0)
    torch.testing.assert_close(out, torch.stack(found), atol=1e-11, rtol=0)


@pytest.mark.parametrize("cuts", [(64,), (128, 64), (64, 64, 64, 8)])
def test_a_prompt_that_is_cut_at_chunks_keeps_its_bits(cuts: tuple[int, ...]) -> None:
    shape, count = shape_of(), 200
    whole, parts = state_of(shape), state_of(shape)
    rows = rows_of(SIZES, 3, count)
    expected, found, start = recur(shape, whole, rows, prompts([0], [count], [1])), [], 0
    for size in (*cuts, *([count - sum(cuts)] if sum(cuts) < count else [])):
        found.append(recur(shape, parts, rows[start : start + size], prompts([start], [size], [1])))
        start += size
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(parts.memory[1], whole.memory[1]) and torch.equal(parts.inputs[1], whole.inputs[1])


def test_chunks_end_at_multiples_wherever_a_prompt_was_cut_before() -> None:
    shape, rows = shape_of(), rows_of(SIZES, 3, 200)
    found = []
    for edges in ((0, 37, 200), (0, 37, 128, 200), (0, 37, 64, 192, 200)):
        state = state_of(shape)
        for start, end in zip(edges, edges[1:], strict=False):
            recur(shape, state, rows[start:end], prompts([start], [end - start], [1]))
        found.append(state.memory[1])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("cut", [1, 2, 37, 100])
def test_a_prompt_that_is_cut_anywhere_means_the_same(cut: int) -> None:
    shape, rows = shape_of(F64), rows_of(SIZES, 3, 120, F64)
    whole, parts = state_of(shape, F64), state_of(shape, F64)
    expected = recur(shape, whole, rows, prompts([0], [120], [2]))
    found = [
        recur(shape, parts, rows[:cut], prompts([0], [cut], [2])),
        recur(shape, parts, rows[cut:], prompts([cut], [120 - cut], [2])),
    ]
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-11, rtol=0)
    torch.testing.assert_close(parts.memory[2], whole.memory[2], atol=1e-11, rtol=0)


@pytest.mark.parametrize("stored", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_windows_have_the_bits_of_plain_decoding(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    """Of any widths, with any number of guesses accepted, beside other requests that accept others."""
    shape = shape_of(dtype, stored)
    plain = decoded(shape, state_of(shape, dtype), dtype, None, 1)
    assert len(plain[0]) == 40 and all(each.isfinite().all() for each in plain)
    for seed, batch in enumerate((1, 3, 5)):
        found = decoded(shape, state_of(shape, dtype), dtype, random.Random(seed), batch)
        for one, other in zip(found, plain, strict=True):
            assert torch.equal(one, other)


def test_rejected_guesses_leave_no_trace_in_what_is_copied() -> None:
    shape = shape_of()
    state = RecurrentState((state_of(shape), state_of(shape)))
    layer, slot = state.layers[1], torch.tensor([3])
    recur(shape, layer, rows_of(SIZES, 1, 10), prompts([0], [10], [3]))
    before = state.snapshot(slot)
    recur(shape, layer, rows_of(SIZES, 2, WIDTH), windows([10], WIDTH, [3]))
    after = state.snapshot(slot)
    for one, other in zip(before[1:], after[1:], strict=True):
        assert torch.equal(one.memory, other.memory) and torch.equal(one.inputs, other.inputs)
        assert one.position.tolist() == other.position.tolist() == [10] and not one.window.numel()


def test_a_restored_state_goes_on_as_the_first() -> None:
    shape = shape_of()
    state = RecurrentState((state_of(shape),))
    (layer,) = state.layers
    recur(shape, layer, rows_of(SIZES, 1, 64), prompts([0], [64], [3]))
    copies = state.snapshot(torch.tensor([3]))
    recur(shape, layer, rows_of(SIZES, 8, 5), prompts([0], [5], [3]))  # another request takes the slot
    state.restore(torch.tensor([0]), copies)
    whole = state_of(shape)
    more = rows_of(SIZES, 6, 40)
    expected = recur(shape, whole, torch.cat((rows_of(SIZES, 1, 64), more)), prompts([0], [104], [2]))[64:]
    assert torch.equal(recur(shape, layer, more, prompts([64], [40], [0])), expected)


def test_only_slots_of_the_step_are_written() -> None:
    shape, state = shape_of(), state_of(shape_of())
    for tensor in (state.memory, state.inputs, state.window):
        tensor.copy_(torch.arange(SLOTS).view(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor))
    recur(shape, state, rows_of(SIZES, 1, 9), prompts([0, 0], [6, 3], [1, 4]))
    recur(shape, state, rows_of(SIZES, 2, 4), windows([6, 3], 2, [1, 4]))
    for slot in (0, 2, 3):
        assert all((tensor[slot] == slot).all() for tensor in (state.memory, state.inputs, state.window))
        assert int(state.position[slot]) == 0


def test_a_chunk_without_rows_is_no_request() -> None:
    shape, state = shape_of(), state_of(shape_of())
    recur(shape, state, rows_of(SIZES, 1, 6), prompts([0, 0], [6, 0], [1, 1]))
    assert int(state.position[1]) == 6 and state.memory[1].isfinite().all()


def test_of_a_last_layer_the_rows_that_are_read() -> None:
    shape = replace(shape_of(), norm=GatedHeadNorm(torch.rand(VALUE_DIM), 1e-6))
    rows = torch.cat((rows_of(SIZES, 1, 9), torch.randn(9, HEADS * VALUE_DIM)), dim=1)
    batch = prompts([0, 0], [6, 3], [1, 4])
    whole = recurred(shape, state_of(shape), rows, batch)
    state = state_of(shape)
    found = recurred(shape, state, rows, replace(batch, read=RowsRead(torch.tensor([5, 8]), None)))
    assert torch.equal(found, whole[[5, 8]]) and state.position.tolist() == [0, 6, 0, 0, 3]


def test_the_bytes_of_a_state() -> None:
    """Of Qwen3-Next-80B-A3B: 36 layers; float32 states of 2 MiB each, and three rows of the convolution's inputs."""
    shape = StateShape(36, 8192, 4, 32, 128, 128)
    assert shape.bytes_per_state(torch.bfloat16) == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert shape.bytes_per_column(torch.bfloat16) == 36 * (8192 + 64) * 2
    whole = shape.bytes_per_slot(4, torch.bfloat16)
    assert whole == shape.bytes_per_state(torch.bfloat16) + 4 * shape.bytes_per_column(torch.bfloat16)
    held = RecurrentState.allocate(replace(shape, num_layers=2, conv_dim=64), 3, 4, torch.bfloat16, CPU)
    small = replace(shape, num_layers=2, conv_dim=64)
    tensors = [tensor for layer in held.layers for tensor in (layer.memory, layer.inputs, layer.window)]
    assert sum(tensor.nbytes for tensor in tensors) == 3 * small.bytes_per_slot(4, torch.bfloat16)
    assert replace(shape, dtype=torch.bfloat16).state_dtype(torch.float32) == torch.bfloat16
