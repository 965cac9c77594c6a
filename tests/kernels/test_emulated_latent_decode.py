"""Latent attention of windows of decode, latent_decode.cu and latent_pieces.cu, in the emulator against the reference.

Cache rows that no request owns hold NaN, as does memory of pieces, and there is no memory behind any tensor.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from emulators.cuda import CudaEmulator, EmulatorError, guarded
from kernel_cases.inputs import HeadShape, attention_inputs
from overlap_spec_kernels.attention import latent_decode as module
from overlap_spec_kernels.attention.latent_attention import latent_attention_reference
from overlap_spec_kernels.attention.latent_decode import Pieces, Windows
from support.attention_cases import BFLOAT, CLOSE
from torch import Tensor

RANK, ROPE, SCALE = 512, 64, 0.06


class Case(NamedTuple):
    """Heads, rows of each request, cached keys, page size; pieces that there is memory for; programs."""

    heads: int
    width: int
    lengths: list[int]
    page_size: int
    slots: int = 64
    programs: int = 2


CASES = [
    Case(4, 2, [2303, 1], 16, programs=3),  # from a piece into the next; pieces of three lengths
    Case(4, 2, [150, 1], 16, programs=1),
    Case(20, 1, [150], 16),
    Case(20, 4, [150], 64),  # pairs are divided between the warpgroups
    Case(16, 1, [0, 63, 64, 127], 16, programs=3),
    Case(20, 3, [100, 30], 16, slots=2, programs=1),  # programs take whole requests
    Case(8, 1, [70, 5, 300], 1, slots=3),
    Case(1, 1, [7 * i for i in range(34)], 16, slots=100, programs=5),  # more requests than lanes
]
DIVIDED = [  # pairs of a piece among programs
    Case(20, 4, [150], 64, programs=15),
    Case(20, 3, [1100], 16, programs=72),
    Case(20, 1, [150, 70], 16, programs=15),
]
FAULTS = {  # by file and what is wrong
    ("blocks.cuh", "keys are used before they arrive"): ("wait(&common.full[box.box], box.parity);", ""),
    ("blocks.cuh", "weights are used before they are there"): (
        "if (SPLIT || !is_own()) wait(&common.ready[slot], phase());", "",
    ),
    ("blocks.cuh", "the last block of a piece is left out"): ("if (is_late) add_late();\n    }", "}"),
    ("blocks.cuh", "a row sees the next one"): ("if (key > position) scores", "if (key > position + 1) scores"),
    ("copies.cuh", "boxes are filled while they are read"): ("wait(&common.empty[place.box], place.parity ^ 1);", ""),
    ("copies.cuh", "rotated columns come last"): ("box == 0 ? RANK : (box - 1) * 64", "box * 64"),
}  # fmt: skip


@pytest.fixture
def emulator(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    yield from cuda_emulator.running(monkeypatch, module, module._attention, module._addition)


def attended(emulator: CudaEmulator, case: Case, seed: int) -> tuple[Tensor, Tensor]:
    """What the kernels find, and the reference."""
    requests = [(length, case.width) for length in case.lengths]
    inputs = attention_inputs(HeadShape(case.heads, 1, RANK + ROPE), requests, case.page_size, BFLOAT)
    windows = Windows(*map(guarded, (inputs.q, inputs.k_cache, inputs.page_table, inputs.positions)))
    widened = (inputs.q.float(), inputs.k_cache.float(), RANK, inputs.page_table, None, inputs.positions)
    sizes = (case.slots * windows.padded * size for size in (RANK, 2))
    pieces = Pieces(64, *(guarded(torch.full((size,), torch.nan)) for size in sizes))
    assert module.takes(windows, RANK, pieces)
    read_before_wait = seed == 0
    emulator.seed = seed
    emulator.written_before = [windows.q] if read_before_wait else [windows.q, windows.positions]
    found = module.attend(windows, SCALE, pieces, case.programs, read_before_wait)
    return found.float(), latent_attention_reference(*widened, SCALE)


def check(emulator: CudaEmulator, case: Case, seed: int) -> None:
    torch.testing.assert_close(*attended(emulator, case, seed), **CLOSE[BFLOAT])


@pytest.mark.full_but_every(4)
@pytest.mark.slow_but_every(2 * len(CASES))
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_attention(emulator: CudaEmulator, seed: int, case: Case) -> None:
    check(emulator, case, seed)


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(len(DIVIDED))
@pytest.mark.parametrize("case", DIVIDED, ids=str)
def test_divided_pairs_have_the_same_bits(emulator: CudaEmulator, case: Case) -> None:
    found = []
    for programs in (case.programs, 2):
        torch.manual_seed(0)
        found.append(attended(emulator, case._replace(programs=programs), programs % 2))
    (divided, expected), (whole, _) = found
    torch.testing.assert_close(divided, expected, **CLOSE[BFLOAT])
    assert torch.equal(divided, whole)


@pytest.mark.full_but_every(7)
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_faults_are_found(
    emulator: CudaEmulator, fault: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of a few orders of events."""
    right, wrong = FAULTS[fault]
    for path in module.SOURCE.parent.glob("latent_*"):
        shutil.copy(path, tmp_path)
    header = tmp_path / f"latent_decode_{fault[0]}"
    assert header.read_text().count(right) == 1
    header.write_text(header.read_text().replace(right, wrong))
    monkeypatch.setattr(module, "SOURCE", tmp_path / module.SOURCE.name)
    with pytest.raises((AssertionError, EmulatorError)):
        for seed in range(8):
            check(emulator, Case(2, 1, [1500, 390], 16, programs=1, slots=32), seed)
            check(emulator, CASES[1], seed)
