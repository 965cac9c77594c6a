"""Windows of Gated DeltaNet, delta_window.cu, in the emulator against the reference in float32."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulators.cuda import CudaEmulator, EmulatorError, guarded
from overlap_spec_kernels.recurrent import delta_window as module
from overlap_spec_kernels.recurrent.delta_window import Windows, takes
from overlap_spec_kernels.recurrent.gated_delta import (
    DeltaRows,
    DeltaState,
    DeltaWeights,
    gated_delta,
    gated_delta_reference,
)
from torch import Tensor

HEADS, KEY_HEADS, DIM, KERNEL, MOST, SLOTS, START = 4, 2, 128, 4, 3, 4, 20
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
SYNC = "        __syncthreads();\n"
ASK = """        if (asks && has_next) {
            expect(&arrived, STATE);
            copy_bytes_once(shared(ahead), place.state(work), STATE, shared(&arrived));
        }
"""
FAULTS = {
    "a key head is written before all have read it": ("        wait_cluster();  // all have read\n", ""),
    "rows are read before the wait": ("    wait_for_kernels_before();\n", ""),
    "a token is read before it is there": (f"    {SYNC}            state.step<false>", "state.step<false>"),
    "the count is read before it is there": (f"{SYNC}        if (asks", "        if (asks"),
    "tokens share a place": ("state.step<true>(tokens[turn % 2]", "state.step<true>(tokens[(turn + 1) % 2]"),
    "what was found is read before it is there": (f"{SYNC}        for (; row", "        for (; row"),
    "the first program writes the position": ("HEADS - 1) == HEADS - 1", "HEADS - 1) == 0"),
    "the state does not go on": ("        if (accepted > 0) state.write();\n", ""),
    "the next state is read before it is there": ("wait(&arrived,", "if (false) wait(&arrived,"),
    "the next state is written over this one": (SYNC + ASK, ASK + SYNC),
}


@pytest.fixture
def emulator(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 3)
    yield from cuda_emulator.running(monkeypatch, module, module._kernel)


def check(emulator: CudaEmulator, accepted: list[int], width: int, stored: torch.dtype, apart: bool, seed: int) -> None:
    """Requests of which so many columns were accepted, in slots from the last one on."""
    draw = torch.Generator().manual_seed(seed)

    def drawn(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return guarded(torch.randn(*size, generator=draw).to(dtype))

    exact = torch.float32
    norm = guarded(0.5 + torch.rand(DIM, generator=draw))
    of_heads = drawn(HEADS, dtype=exact).abs(), drawn(HEADS, dtype=exact)
    weights = DeltaWeights(drawn(CHANNELS, KERNEL), *of_heads, norm, 0.5, KEY_HEADS)
    memory, inputs = drawn(SLOTS, HEADS, DIM, DIM, dtype=exact) / 4, drawn(SLOTS, KERNEL - 1, CHANNELS)
    window, position = drawn(SLOTS, MOST, CHANNELS + 2 * HEADS), torch.full((SLOTS,), START)
    slots = torch.arange(SLOTS - 1, SLOTS - 1 - len(accepted), -1)
    for slot, count in zip(slots.tolist(), accepted, strict=True):
        window[slot, count:] = torch.nan
    state = DeltaState(guarded(memory.to(stored)), inputs, window, guarded(position))
    expected = DeltaState(memory.to(stored), inputs.float(), window.float(), position.clone())
    starts = START + torch.tensor(accepted)[:, None] + torch.arange(width)
    mixed, gates, z = (drawn(len(accepted) * width, size) for size in (CHANNELS, 2 * HEADS, HEADS * DIM))
    rows = DeltaRows(torch.cat((mixed, gates, z), 1).float(), slots, starts.flatten(), None)
    out = gated_delta_reference(expected, weights._replace(conv=weights.conv.float()), rows)
    rows = DeltaRows(
        guarded(torch.cat((mixed, gates, z), 1).bfloat16()), guarded(slots), guarded(starts.flatten()), None
    )
    if apart:
        rows = rows._replace(projected=guarded(torch.cat((mixed, z), 1)), gates=guarded(gates))
    emulator.seed = seed
    emulator.written_before = [rows.projected, *(() if rows.gates is None else (rows.gates,))]
    found = gated_delta(state, weights, rows)
    close = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found.float(), out, **close)
    of_state = {"rtol": 1e-4, "atol": 1e-4} if stored == exact else close
    torch.testing.assert_close(state.memory, expected.memory, **of_state)
    torch.testing.assert_close(state.inputs.float(), expected.inputs, rtol=0, atol=0)
    torch.testing.assert_close(state.window.float(), expected.window, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(state.position, expected.position) and not module._counters(found.device).any()


CASES = [([1], 1, True), ([1, 0], 2, True), ([0, 3, 2], 3, False), ([1, 1, 1, 1], 1, False)]


@pytest.mark.parametrize("multiprocessors", [1, 3])
def test_heads_one_after_another(emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch, multiprocessors: int) -> None:
    """A program has eight of them, or two and three. The next state arrives while one goes on."""
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: multiprocessors)
    for seed, stored in enumerate((torch.float32, torch.bfloat16)):
        check(emulator, [2, 0, 1, 3], 2, stored, apart=True, seed=seed)


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("accepted", "width", "apart"), CASES, ids=str)
def test_windows(emulator: CudaEmulator, accepted: list[int], width: int, apart: bool, stored: torch.dtype) -> None:
    for seed in range(2):
        check(emulator, accepted, width, stored, apart, seed)


def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests with two rows of Qwen3-Next, and what differs from them in one size or type."""
    monkeypatch.setattr(module, "runs_hopper", lambda device: True)
    sizes = {"C": 8192, "K": 4, "N": 32, "M": 16, "DK": 128, "DV": 128, "G": 2}
    narrow, exact = (torch.empty(2 * 32 + 1, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.float32))
    rows, places = narrow[:4], torch.empty(2, dtype=torch.int64, device="meta")
    given = Windows(rows, rows, places, places, exact, narrow, narrow, places, narrow, *[exact] * 3)
    assert takes(given, sizes) and takes(given._replace(memory=narrow), sizes)
    assert takes(given._replace(projected=narrow[:64]), sizes) and not takes(given._replace(projected=narrow), sizes)
    assert takes(given, sizes | {"M": 4}) and not takes(given, sizes | {"M": 2}), "programs of a cluster"
    assert not any(takes(given, sizes | {name: 64}) for name in ("K", "DK", "DV")) and not takes(
        given, sizes | {"G": 1}
    )
    for name in ("projected", "gates", "inputs", "window", "conv"):
        assert not takes(given._replace(**{name: exact[:4]}), sizes), name
    for name in ("steepness", "offset", "norm"):
        assert not takes(given._replace(**{name: narrow}), sizes), name
    assert not takes(given._replace(memory=narrow.half()), sizes) and not takes(
        given._replace(projected=rows[:0]), sizes
    )
    many = torch.empty(module._MOST_REQUESTS + 1, dtype=torch.int64, device="meta")
    assert takes(given._replace(slots=many[1:]), sizes) and not takes(given._replace(slots=many), sizes)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(emulator: CudaEmulator, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one of a few orders of events."""
    right, wrong = FAULTS[fault]
    shutil.copy(module.SOURCE, tmp_path)
    source = tmp_path / module.SOURCE.name
    assert source.read_text().count(right) == 1
    source.write_text(source.read_text().replace(right, wrong))
    monkeypatch.setattr(module, "SOURCE", source)
    with pytest.raises((AssertionError, EmulatorError)):
        for seed in range(12):
            check(emulator, [2, 0], 2, torch.float32, apart=True, seed=seed)
