"""Recurrences under the interpreter: prompts, windows, and the bits of windows of one token.

Gated DeltaNet's has two gates a head, Mamba-2's one.
"""

import pytest
import torch
from overlap_spec_kernels.recurrent import gated_delta as module, prompt_chunks
from overlap_spec_kernels.recurrent.gated_delta import (
    DeltaRows,
    DeltaState,
    DeltaWeights,
    gated_delta,
    gated_delta_reference,
)
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, StateRows
from overlap_spec.models.layers.recurrent import (
    DeltaShape,
    GatedHeadNorm,
    GatedRowNorm,
    Mamba2Shape,
    RecurrentShape,
    recurred,
)
from overlap_spec.models.recurrent_state import LayerState

HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM, KERNEL, WIDTH, SLOTS = 4, 2, 7, 5, 4, 4, 5
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
DELTA, MAMBA = 2, 1  # gates of a head
BOTH = pytest.mark.parametrize("gates", [DELTA, MAMBA], ids=["gated delta", "mamba 2"])
EACH = pytest.mark.slow_but_every(1)  # both are quick
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


@pytest.fixture(autouse=True)
def _several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolve a prompt, with heads as small as these."""
    monkeypatch.setattr(prompt_chunks, "_NUMBERS", 64)


def some_weights(gates: int = DELTA) -> DeltaWeights:
    draw = torch.Generator().manual_seed(1)
    conv, steepness = torch.randn(CHANNELS, KERNEL, generator=draw), torch.rand(HEADS, generator=draw)
    offset, norm = torch.randn(HEADS, generator=draw), 0.5 + torch.rand(VALUE_DIM, generator=draw)
    if gates == DELTA:
        return DeltaWeights(conv, steepness, offset, norm, 1e-5, KEY_HEADS)
    bias, skip = torch.randn(CHANNELS, generator=draw), torch.randn(HEADS, generator=draw)
    norm = 0.5 + torch.rand(HEADS * VALUE_DIM, generator=draw)
    return DeltaWeights(conv / 2, steepness, offset, norm, 1e-5, KEY_HEADS, bias, skip)


def some_state(gates: int = DELTA, stored: torch.dtype = torch.float32) -> DeltaState:
    """As a predecessor may have left it: full of NaN."""
    memory = torch.full((SLOTS, HEADS, KEY_DIM, VALUE_DIM), torch.nan, dtype=stored)
    inputs = torch.full((SLOTS, KERNEL - 1, CHANNELS), torch.nan)
    window = torch.full((SLOTS, WIDTH, CHANNELS + gates * HEADS), torch.nan)
    return DeltaState(memory, inputs, window, torch.zeros(SLOTS, dtype=torch.int64))


def rows_of(seed: int, count: int, gates: int = DELTA) -> Tensor:
    size = CHANNELS + (gates + VALUE_DIM) * HEADS
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def prompts(rows: Tensor, starts: list[int], counts: list[int], slots: list[int]) -> DeltaRows:
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    return DeltaRows(rows, torch.tensor(slots), positions, torch.tensor([0, *counts]).cumsum(0).int(), max(counts))


def with_output(rows: DeltaRows, count: int, padding: int = 0) -> DeltaRows:
    """The last rows of one request are its output. `padding`: rows of no request."""
    end = len(rows.projected) - padding
    edges = torch.tensor([0, end - count, end])
    return rows._replace(row_starts=edges[:2].int(), drawn=edges[1:])


def windows(rows: Tensor, starts: list[int], slots: list[int]) -> DeltaRows:
    width = len(rows) // len(slots)
    return DeltaRows(rows, torch.tensor(slots), (torch.tensor(starts)[:, None] + torch.arange(width)).flatten(), None)


def apart(rows: DeltaRows, gates: int) -> DeltaRows:
    """Rows whose rates and decays are from a linear of their own."""
    mixed, own, z = rows.projected.split((CHANNELS, gates * HEADS, VALUE_DIM * HEADS), dim=1)
    return rows._replace(projected=torch.cat((mixed, z), dim=1), gates=own.contiguous())


def forwards(gates: int) -> list[DeltaRows]:
    """Of two requests, one beside which none is: prompts, the second in two chunks, then windows.

    0 to 4 columns of these are accepted, some slots left out.
    """
    return [
        prompts(rows_of(2, 9, gates), [0, 0, 0], [6, 0, 3], [1, 0, 4]),
        prompts(rows_of(3, 3, gates), [3], [3], [4]),
        windows(rows_of(4, 8, gates), [6, 6], [4, 1]),
        windows(rows_of(5, 4, gates), [7, 10], [1, 4]),
        windows(rows_of(6, 3, gates), [7], [1]),
        windows(rows_of(7, 2, gates), [9, 11], [1, 4]),
    ]


@EACH
@BOTH
@pytest.mark.parametrize("stored", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_prompts_and_windows(stored: torch.dtype, gates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs move a request's rows, one after another: none reads what another one has written."""
    monkeypatch.setattr(module, "_CHANNELS", 32)
    expected, found, other = (some_state(gates, stored) for _ in range(3))
    weights = some_weights(gates)
    close = CLOSE
    if stored != torch.float32:  # heads that found little are not made larger
        close, weights = {"rtol": 4e-2, "atol": 2e-2}, weights._replace(eps=1.0)
    for forward in forwards(gates):
        out = gated_delta(found, weights, forward)
        assert torch.equal(gated_delta(other, weights, apart(forward, gates)), out)
        torch.testing.assert_close(out, gated_delta_reference(expected, weights, apart(forward, gates)), **close)
        for one, same, exact in zip(found, other, expected, strict=True):
            torch.testing.assert_close(one, exact, equal_nan=True, **close)
            torch.testing.assert_close(same, one, equal_nan=True, rtol=0, atol=0)


@BOTH
def test_windows_have_the_bits_of_single_tokens(gates: int) -> None:
    weights, text = some_weights(gates), rows_of(8, 17, gates)
    plain, drafted = some_state(gates), some_state(gates)
    for state, slot in ((plain, 0), (drafted, 2)):
        gated_delta(state, weights, prompts(text[:5], [0], [5], [slot]))
    expected = torch.cat([gated_delta(plain, weights, windows(text[at : at + 1], [at], [0])) for at in range(5, 17)])
    at = 5
    for accepted, width in ((0, 3), (3, 4), (1, 2), (2, 4)):
        guessed = text[at : at + width].clone()
        guessed[accepted + 1 :] = 9.0
        other = text[: len(guessed)] if at % 2 else guessed
        out = gated_delta(drafted, weights, windows(torch.cat((guessed, other)), [at, at], [2, 3]))
        assert torch.equal(out[: accepted + 1], expected[at - 5 : at - 4 + accepted])
        at += accepted + 1
    while at < 17:
        gated_delta(drafted, weights, windows(text[at : at + 1], [at], [2]))
        at += 1
    assert torch.equal(plain.memory[0], drafted.memory[2]) and torch.equal(plain.inputs[0], drafted.inputs[2])
    assert int(plain.position[0]) == int(drafted.position[2]) == 16


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("gates", [MAMBA, DELTA], ids=["mamba 2", "gated delta"])
@pytest.mark.parametrize("gates_apart", [True, False])
def test_output_that_is_computed_again_has_the_bits_of_windows(gates: int, gates_apart: bool) -> None:
    """In one chunk or in two; windows go on from it."""
    weights, text = some_weights(gates), rows_of(8, 17, gates)
    plain, again = some_state(gates), some_state(gates)
    for state, slot in ((plain, 0), (again, 2)):
        gated_delta(state, weights, prompts(text[:5], [0], [5], [slot]))
    expected = [gated_delta(plain, weights, windows(text[at : at + 1], [at], [0])) for at in range(5, 17)]
    found = []
    for begin, end in ((5, 11), (11, 15)):
        rows = prompts(text[begin:end], [begin], [end - begin], [2])
        if gates_apart:
            own = apart(windows(text[begin:end], [begin], [2]), gates)
            rows = rows._replace(projected=own.projected, gates=own.gates)
        found.append(gated_delta(again, weights, with_output(rows, end - begin)))
        assert int(again.position[2]) == end
    found += [gated_delta(again, weights, windows(text[at : at + 1], [at], [2])) for at in (15, 16)]
    assert torch.equal(torch.cat(found), torch.cat(expected))
    assert torch.equal(plain.memory[0], again.memory[2]) and torch.equal(plain.inputs[0], again.inputs[2])


@pytest.mark.slow_but_every(4)  # the kind that is not quick above
@BOTH
@pytest.mark.parametrize("gates_apart", [False, True])
def test_a_prompt_and_output_share_a_step(gates: int, gates_apart: bool) -> None:
    """A prompt that goes on at its fourth token, the output after it, and two rows of no request."""
    weights, text = some_weights(gates), rows_of(8, 12, gates)
    plain, again = some_state(gates), some_state(gates)
    for state in (plain, again):
        gated_delta(state, weights, prompts(text[:3], [0], [3], [2]))
    expected = [gated_delta(plain, weights, prompts(text[3:5], [3], [2], [2]))]
    expected += [gated_delta(plain, weights, windows(text[at : at + 1], [at], [2])) for at in range(5, 12)]
    padded = torch.cat((text[3:11], text[:2]))
    rows = prompts(padded, [3], [10], [2])
    if gates_apart:
        own = apart(windows(padded, [3], [2]), gates)
        rows = rows._replace(projected=own.projected, gates=own.gates)
    out = gated_delta(again, weights, with_output(rows, 6, padding=2))
    assert out.isfinite().all() and int(again.position[2]) == 11
    found = [out[:8]]
    found.append(gated_delta(again, weights, windows(text[11:], [11], [2])))
    assert torch.equal(torch.cat(found), torch.cat(expected))
    assert all(torch.equal(one[2], other[2]) for one, other in zip(plain[:2], again[:2], strict=True))


@BOTH
@pytest.mark.slow
def test_windows_are_those_of_a_cpu(gates: int) -> None:
    weights = some_weights(gates)
    found, own = some_state(gates), some_state(gates)
    made: type[RecurrentShape] = DeltaShape if gates == DELTA else Mamba2Shape
    norm = GatedHeadNorm if gates == DELTA else GatedRowNorm
    shape = made(
        1,
        *(CHANNELS, KERNEL, HEADS, KEY_DIM, VALUE_DIM, None, gates),
        num_key_heads=KEY_HEADS,
        conv=weights.conv,
        steepness=weights.steepness,
        offset=weights.offset,
        norm=norm(weights.norm, weights.eps),
        bias=weights.bias,
        skip=weights.skip,
    )
    for forward in forwards(gates)[:2]:
        gated_delta(found, weights, forward)
    for one, other in zip(own, found, strict=True):
        one.copy_(other)
    for forward in forwards(gates)[2:]:
        width = len(forward.projected) // len(forward.slots)
        table, places = torch.zeros(len(forward.slots), 1), StateRows(forward.slots, are_final=False)
        batch = RowBatch(forward.positions, None, table, None, width, True, state=places)
        expected = recurred(shape, LayerState(*own), forward.projected, batch)
        torch.testing.assert_close(gated_delta(found, weights, forward), expected, **CLOSE)


def test_a_token_again_and_again_is_known() -> None:
    """All keys of a chunk are one, so each token leaves the most to the next ones."""
    weights, expected, found = some_weights(), some_state(), some_state()
    forward = prompts(rows_of(13, 1).expand(100, -1).contiguous(), [0], [100], [2])
    out = gated_delta(found, weights, forward)
    torch.testing.assert_close(out, gated_delta_reference(expected, weights, forward), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(found.memory[2], expected.memory[2], rtol=1e-4, atol=2e-5)


@pytest.mark.slow_but_every(2)
@BOTH
def test_a_prompt_by_chunks_is_its_tokens_one_after_another(gates: int) -> None:
    """Wherever it is cut; where it is cut at chunks it has the same bits."""
    weights, text, ends = some_weights(gates), rows_of(11, 100, gates), ((100,), (64, 100), (37, 100))
    expected = some_state(gates)
    out = gated_delta_reference(expected, weights, prompts(text, [0], [100], [3]))
    found = []
    for cuts in ends:
        state, parts, begin = some_state(gates), [], 0
        for end in cuts:
            parts.append(gated_delta(state, weights, prompts(text[begin:end], [begin], [end - begin], [3])))
            begin = end
        torch.testing.assert_close(torch.cat(parts), out, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(state.memory[3], expected.memory[3], rtol=1e-4, atol=2e-5)
        found.append((torch.cat(parts), state.memory[3]))
    assert all(torch.equal(one, other) for one, other in zip(found[0], found[1], strict=True))
    beside = some_state(gates)
    rows = prompts(torch.cat((rows_of(12, 60, gates), text[:64])), [0, 0], [60, 64], [1, 3])
    assert torch.equal(gated_delta(beside, weights, rows)[60:], found[1][0][:64])
