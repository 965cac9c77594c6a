"""Output that is computed again, by interpreted kernels that Hopper has for it, against the reference in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from overlap_spec_kernels.recurrent import gated_delta as op
from overlap_spec_kernels.recurrent.gated_delta import DeltaRows, DeltaState, DeltaWeights
from overlap_spec_kernels.recurrent.row import ADDS_UP
from torch import Tensor

if TYPE_CHECKING:
    from emulators.gluon.launch import Hopper

HEADS, KEY_HEADS, KEY_DIM, DIM, SLOTS, START = 4, 2, 64, 16, 3, 5
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * DIM
DELTA, MAMBA = 2, 1  # gates of a head
KERNELS = ["_prepare_kernel", "_replay_kernel", "_finish_kernel"]


@pytest.fixture(autouse=True)
def _no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are `interpreted/check_gated_delta.py`'s; a step without one launches them, too."""

    def no_rows(places: tuple[Tensor, ...], *_: Any) -> None:
        places[8].zero_()

    monkeypatch.setattr(op, "recur_over_prompts", no_rows)


def some_weights(gates: int, kernel: int) -> DeltaWeights:
    draw = torch.Generator().manual_seed(1)
    conv, steepness = torch.randn(CHANNELS, kernel, generator=draw), torch.rand(HEADS, generator=draw)
    offset, norm = torch.randn(HEADS, generator=draw), 0.5 + torch.rand(HEADS * DIM, generator=draw)
    if gates == DELTA:
        return DeltaWeights(conv, steepness, offset, norm[:DIM], 1e-5, KEY_HEADS)
    more = torch.randn(CHANNELS, generator=draw), torch.randn(HEADS, generator=draw)
    return DeltaWeights(conv / 2, steepness, offset, norm, 1e-5, KEY_HEADS, *more)


def some_state(gates: int, kernel: int, stored: torch.dtype) -> DeltaState:
    draw = torch.Generator().manual_seed(2)
    memory = torch.randn(SLOTS, HEADS, KEY_DIM, DIM, generator=draw).to(stored)
    inputs = torch.randn(SLOTS, kernel - 1, CHANNELS, generator=draw)
    window = torch.full((SLOTS, 4, CHANNELS + gates * HEADS), torch.nan)
    return DeltaState(memory, inputs, window, torch.full((SLOTS,), START))


def output(gates: int, begin: int, count: int, padding: int = 2) -> DeltaRows:
    """Rows of slot 1 from row `begin` on, between rows of no request."""
    draw, rows = torch.Generator().manual_seed(3), begin + count + padding
    own, z, other = (torch.randn(rows, columns, generator=draw) for columns in (CHANNELS, HEADS * DIM, gates * HEADS))
    positions = START - begin + torch.arange(rows)
    drawn, none = torch.tensor([begin, begin + count]), torch.full((2,), begin, dtype=torch.int32)
    return DeltaRows(torch.cat((own, other, z), 1), torch.tensor([1]), positions, none, 0, None, drawn)


def apart(rows: DeltaRows, gates: int) -> DeltaRows:
    """Rows whose rates and decays are from a linear of their own."""
    mixed, own, z = rows.projected.split((CHANNELS, gates * HEADS, HEADS * DIM), dim=1)
    return rows._replace(projected=torch.cat((mixed, z), 1), gates=own.contiguous())


def reference(state: DeltaState, weights: DeltaWeights, rows: DeltaRows) -> Tensor:
    """All rows are the request's, and none is its output's."""
    assert rows.drawn is not None
    return op.gated_delta_reference(state, weights, rows._replace(row_starts=rows.drawn.int(), drawn=None))


@pytest.mark.slow_but_every(7)  # of each kind a quick one, and of each type
@pytest.mark.parametrize("kernel", [4, 2])
@pytest.mark.parametrize("gates", [DELTA, MAMBA], ids=["gated delta", "mamba 2"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_output_goes_on_from_a_state(gpu: Hopper, gates: int, stored: torch.dtype, kernel: int) -> None:
    """Behind a prompt of three rows, whose own are as they were, and from the first row on."""
    weights, close = some_weights(gates, kernel), {"rtol": 1e-4, "atol": 1e-5}
    if stored != torch.float32:  # each row's state is rounded, here and there from another sum
        weights, close = weights._replace(eps=1.0), {"rtol": 4e-2, "atol": 2e-2}
    for begin, count in ((3, 6), (0, 1)):
        found, other, expected = (some_state(gates, kernel, stored) for _ in range(3))
        rows = output(gates, begin, count, padding=min(begin, 2))
        out, own = op.gated_delta(found, weights, rows), slice(begin, begin + count)
        assert gpu.kernels[-3:] == KERNELS
        assert all(launch.options == ADDS_UP for launch in gpu.launches[-3:-1])
        torch.testing.assert_close(out[own], reference(expected, weights, rows)[own], **close)
        assert torch.equal(op.gated_delta(other, weights, apart(rows, gates))[own], out[own])
        for part, name in ((found.memory, "memory"), (found.inputs, "inputs"), (found.position, "position")):
            torch.testing.assert_close(part, getattr(expected, name), **close)
        assert torch.equal(other.memory, found.memory)


def test_no_output_changes_nothing(gpu: Hopper) -> None:
    """Not even where it would begin behind the last row."""
    found, before = (some_state(DELTA, 4, torch.float32) for _ in range(2))
    op.gated_delta(found, some_weights(DELTA, 4), output(DELTA, 5, 0, padding=0))
    assert gpu.kernels[-3:] == KERNELS
    assert torch.equal(found.memory, before.memory) and torch.equal(found.inputs, before.inputs)


@pytest.mark.parametrize(("stored", "threads"), [(torch.float32, 8), (torch.bfloat16, 16)], ids=str)
def test_states_are_divided_as_windows_divide_them(gpu: Hopper, stored: torch.dtype, threads: int) -> None:
    """`test_recurrent_kernels_compile.py` compiles both so."""
    op.gated_delta(some_state(DELTA, 4, stored), some_weights(DELTA, 4), output(DELTA, 0, 1))
    prepared, replayed = (launch.constants for launch in gpu.launches[-3:-1])
    assert prepared["THREADS"] == replayed["THREADS"] == threads and replayed["VALUES"] == 32 // threads


@pytest.mark.usefixtures("gpu")
def test_other_states_are_replayed_as_windows_are() -> None:
    """A thread of a window's program has the same rows only of whole blocks."""
    takes = {(64, 16): True, (128, 128): True, (96, 128): False, (128, 24): False, (32, 16): False}
    for sizes, expected in takes.items():
        assert op.replays(torch.empty(1, 1, *sizes)) == expected
