"""Mamba-2's recurrence: the paper's by hand, chunks against tokens, windows against plain decoding."""

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.recurrent_rows import decoded, prompts, rows_of, state_of, windows
from torch import Tensor

from overlap_spec.models.layers.recurrent import GatedRowNorm, Mamba2Shape, recur, recurred
from overlap_spec.models.recurrent_state import RecurrentState, StateShape

F64, CPU = torch.float64, torch.device("cpu")
HEADS, GROUPS, STATE, DIM, KERNEL = 6, 3, 7, 5, 4
CONV_DIM = 2 * GROUPS * STATE + HEADS * DIM
SIZES = StateShape(1, CONV_DIM, KERNEL, HEADS, STATE, DIM, num_gates=1)


def shape_of(dtype: torch.dtype = torch.float32, stored: torch.dtype | None = None) -> Mamba2Shape:
    draw = torch.Generator().manual_seed(1)
    wide = torch.promote_types(dtype, torch.float32)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw)

    return Mamba2Shape(
        *(1, *replace(SIZES, dtype=stored).sizes),
        num_key_heads=GROUPS,
        conv=drawn(CONV_DIM, KERNEL).to(dtype) / 2,
        steepness=torch.rand(HEADS, generator=draw).to(wide),
        offset=drawn(HEADS).to(wide),
        norm=GatedRowNorm(1 + 0.3 * drawn(HEADS * DIM).to(wide), 1e-3),
        bias=drawn(CONV_DIM).to(dtype),
        skip=drawn(HEADS).to(wide),
    )


def by_hand(shape: Mamba2Shape, rows: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """What rows of a prompt give, one head and one token after another, and the states [n, state, dim] after them."""
    states, found = torch.zeros(HEADS, STATE, DIM, dtype=F64), torch.zeros(len(rows), HEADS, DIM, dtype=F64)
    assert shape.bias is not None and shape.skip is not None
    for t in range(len(rows)):
        mixed = shape.bias.clone()
        for tap in range(KERNEL):
            if (source := t + tap - KERNEL + 1) >= 0:
                mixed += rows[source, :CONV_DIM] * shape.conv[:, tap]
        mixed = F.silu(mixed)
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            c = mixed[group * STATE :][:STATE]
            b = mixed[(GROUPS + group) * STATE :][:STATE]
            x = mixed[2 * GROUPS * STATE + head * DIM :][:DIM]
            step = F.softplus(rows[t, CONV_DIM + head] + shape.offset[head])
            states[head] = torch.exp(-shape.steepness[head] * step) * states[head] + torch.outer(b, step * x)
            found[t, head] = states[head].t() @ c + shape.skip[head] * x
    gated = found.flatten(1) * F.silu(gate)
    normed = gated * (gated.pow(2).mean(1, keepdim=True) + shape.norm.eps).rsqrt()
    return normed * shape.norm.weight, states


@pytest.mark.parametrize("ends", [(90,), (64, 90), (1, 37, 90)], ids=str)
def test_a_prompt_is_the_papers_recurrence(ends: tuple[int, ...]) -> None:
    shape, gate = shape_of(F64), torch.randn(90, HEADS * DIM, dtype=F64, generator=torch.Generator().manual_seed(2))
    rows, state, parts, begin = rows_of(SIZES, 3, 90, F64), state_of(shape, F64), [], 0
    whole = torch.cat((rows, gate), dim=1)
    for end in ends:
        parts.append(recurred(shape, state, whole[begin:end], prompts([begin], [end - begin], [1])))
        begin = end
    expected, states = by_hand(shape, rows, gate)
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-11, rtol=0)
    torch.testing.assert_close(state.memory[1], states, atol=1e-11, rtol=0)


def test_a_window_is_the_papers_recurrence() -> None:
    shape, gate = shape_of(F64), torch.randn(9, HEADS * DIM, dtype=F64, generator=torch.Generator().manual_seed(2))
    rows, state = rows_of(SIZES, 3, 9, F64), state_of(shape, F64)
    whole = torch.cat((rows, gate), dim=1)
    recurred(shape, state, whole[:5], prompts([0], [5], [1]))
    found = recurred(shape, state, whole[5:], windows([5], 4, [1]))
    torch.testing.assert_close(found, by_hand(shape, rows, gate)[0][5:], atol=1e-12, rtol=0)


@pytest.mark.parametrize("cuts", [(64,), (128, 64), (64, 64, 64, 8)], ids=str)
def test_a_prompt_that_is_cut_at_chunks_keeps_its_bits(cuts: tuple[int, ...]) -> None:
    shape, count = shape_of(), 200
    whole, parts, rows = state_of(shape), state_of(shape), rows_of(SIZES, 3, 200)
    expected, found, start = recur(shape, whole, rows, prompts([0], [count], [1])), [], 0
    for size in (*cuts, *([count - sum(cuts)] if sum(cuts) < count else [])):
        found.append(recur(shape, parts, rows[start : start + size], prompts([start], [size], [1])))
        start += size
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(parts.memory[1], whole.memory[1]) and torch.equal(parts.inputs[1], whole.inputs[1])


@pytest.mark.slow_but_every(3)
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


def test_the_bytes_of_a_state() -> None:
    """Of Granite-4.0-H-Small: 36 layers; float32 states of 4 MiB each, and three rows of the convolution's inputs."""
    shape = StateShape(36, 8448, 4, 128, 128, 64, num_gates=1)
    assert shape.bytes_per_state(torch.bfloat16) == 36 * (128 * 128 * 64 * 4 + 3 * 8448 * 2)
    assert shape.bytes_per_column(torch.bfloat16) == 36 * (8448 + 128) * 2
    held = RecurrentState.allocate(replace(SIZES, num_layers=2), 3, 4, torch.bfloat16, CPU)
    tensors = [tensor for layer in held.layers for tensor in (layer.memory, layer.inputs, layer.window)]
    assert sum(tensor.nbytes for tensor in tensors) == 3 * replace(SIZES, num_layers=2).bytes_per_slot(
        4, torch.bfloat16
    )
