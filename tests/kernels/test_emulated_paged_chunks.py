"""The kernel of prompt chunks, paged_chunks.cu, in the emulator against the reference in float32 on the same values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from emulators.cuda import CudaEmulator, guarded
from kernel_cases.inputs import HeadShape, attention_inputs
from overlap_spec_kernels.attention import paged_chunks as module
from overlap_spec_kernels.attention.paged_attention import paged_attention_reference
from overlap_spec_kernels.attention.paged_chunks import Chunks, Cut, Division, Sums
from torch import Tensor

BFLOAT, HALF = torch.bfloat16, torch.float16
ERROR = {BFLOAT: 4e-3, HALF: 5e-4}
LLAMA, SMOL, ALONE = HeadShape(8, 2, 128), HeadShape(6, 2, 64), HeadShape(1, 1, 128)


class Case(NamedTuple):
    """Requests are pairs of first position and rows."""

    heads: HeadShape
    requests: list[tuple[int, int]]
    page_size: int
    cut: Cut
    dtype: torch.dtype = BFLOAT
    stages: int = 2  # in which warps wait most


CASES = [
    Case(LLAMA, [(300, 70)], 16, Cut(2, Division(1)), stages=6),  # a cluster's second program without rows
    Case(LLAMA, [(0, 100), (40, 0), (130, 3)], 64, Cut(1, Division(2))),  # empty requests, splits without keys
    Case(SMOL, [(5, 0), (700, 90), (9, 0)], 64, Cut(2, Division(3))),  # a group that does not divide a tile
    Case(SMOL, [(0, 1), (1000, 40)], 16, Cut(2, Division(1)), HALF),  # more tiles of keys than stages
    Case(ALONE, [(128, 128), (900, 20)], 128, Cut(1, Division(1))),  # whole tiles, a page of one
    Case(ALONE, [(0, 129), (390, 2)], 16, Cut(2, Division(8))),  # most splits have no keys
    Case(LLAMA, [(127, 65)], 48, Cut(2, Division(2))),  # pages that do not divide a tile
    Case(LLAMA, [(300, 90), (20, 64)], 16, Cut(2, Division(3, 380))),  # a request with divided tiles and whole ones
]


@pytest.fixture
def emulator(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    module._kernel.cache_clear()
    cuda_emulator.install(monkeypatch, module)
    monkeypatch.setattr(module, "_num_multiprocessors", lambda device: cuda_emulator.multiprocessors)
    yield cuda_emulator
    module._kernel.cache_clear()


def combined(out: Tensor, sums: Sums | None) -> Tensor:
    """As `_combine_kernel`."""
    if sums is None:
        return out.float()
    highest, weight = sums.stats.unbind(-1)
    share = torch.exp2(highest - highest.amax(-1, keepdim=True))
    with_keys = torch.where((weight > 0)[..., None], sums.sums, 0.0)  # nothing is written without keys
    of_splits = (with_keys * share[..., None]).sum(-2) / (weight * share).sum(-1, keepdim=True)
    return torch.where(weight[..., :1] < 0, out.float(), of_splits)


@pytest.mark.full_but_every(8)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_chunks(emulator: CudaEmulator, case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache rows of others hold NaN, and there is no memory behind any tensor."""
    monkeypatch.setattr(module, "_STAGES", case.stages)
    inputs = attention_inputs(case.heads, case.requests, case.page_size, case.dtype)
    chunks = Chunks(*(guarded(tensor) for tensor in inputs[:6]), inputs.max_rows)
    emulator.seed = seed
    emulator.written_before = [chunks.q, chunks.positions] if seed else []
    wide = (tensor.float() for tensor in inputs[:3])
    expected = paged_attention_reference(*wide, *inputs[3:6], inputs.scale)
    actual = combined(*case.cut.attend(chunks, inputs.scale))
    assert float((actual - expected).norm() / expected.norm()) < ERROR[case.dtype]


def growing(dtype: torch.dtype = BFLOAT) -> tuple[Chunks, float]:
    """Scores grow along the keys by more than weights may, up to e^30 in a tile, of some rows."""
    given = attention_inputs(LLAMA, [(250, 70)], 16, dtype)
    places = torch.arange(320)
    rows = given.page_table[0, places // 16].long(), places % 16
    given.k_cache[rows] = (given.k_cache[rows] * 0.2 + (places / 40)[:, None, None]).to(dtype)
    given.q[:10] = given.q[:10].abs()
    given.q[10:] = given.q[10:] * 0.1
    return Chunks(*(guarded(tensor) for tensor in given[:6]), given.max_rows), given.scale


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
def test_scores_beyond_what_weights_are_relative_to(dtype: torch.dtype) -> None:
    chunks, scale = growing(dtype)
    wide = (tensor.float() for tensor in chunks[:3])
    expected = paged_attention_reference(*wide, *chunks[3:6], scale)
    actual, _ = Cut(2, Division(1)).attend(chunks, scale)
    assert float((actual - expected).norm() / expected.norm()) < ERROR[dtype]


@pytest.mark.usefixtures("emulator")
def test_a_row_has_its_bits_whatever_scores_are_beside_it() -> None:
    """Scores of a tile are multiplied again for some rows alone."""
    chunks, scale = growing()
    beside, _ = Cut(2, Division(1)).attend(chunks, scale)
    chunks.q[:10] = chunks.q[10:20]
    others, _ = Cut(2, Division(1)).attend(chunks, scale)
    assert torch.equal(beside[10:], others[10:])
