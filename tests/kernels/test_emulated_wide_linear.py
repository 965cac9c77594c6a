"""The kernel of many rows, wide_linear.cu, in the emulator against float32 products of the same values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest
import torch
from emulators.cuda import CudaEmulator, guarded
from overlap_spec_kernels import silu_mul
from overlap_spec_kernels.linear import wide_linear as wide
from overlap_spec_kernels.linear.call import Call
from torch import Tensor

BFLOAT, HALF = torch.bfloat16, torch.float16
ERROR = {BFLOAT: 4e-3, HALF: 6e-4}
# (rows of x, rows of W, K): several rounds of tiles in two bands, of which x's last has none beside it, and more chunks
# than stages; fewer chunks, tiles hardly begun; no tile of x without another, so that each is copied at once
SIZES = [(596, 464, 320), (20, 240, 128), (200, 240, 192)]


@pytest.fixture
def emulator(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    """In place of a GPU of two clusters."""
    wide._kernel.cache_clear()
    monkeypatch.setattr(wide, "num_multiprocessors", lambda device: 4)
    monkeypatch.setattr(wide, "_BAND", 1)
    cuda_emulator.install(monkeypatch, wide)
    yield cuda_emulator
    wide._kernel.cache_clear()


def gated(x: Tensor, weight: Tensor, cut: wide.Wide) -> Tensor:
    out = guarded(torch.full((x.shape[0], weight.shape[0] // 2), torch.nan, dtype=x.dtype))
    cut.run(Call(x, weight, None, 0.0, True, out), cut.num_programs(weight, True))
    return out


def argmax(x: Tensor, weight: Tensor, cut: wide.Wide) -> Tensor:
    programs = cut.num_programs(weight, False)
    best = guarded(torch.full((x.shape[0], programs), torch.nan)).t()
    best_at = guarded(torch.full((x.shape[0], programs), -1, dtype=torch.int32)).t()
    cut.run(Call(x, weight, None, 0.0, False, best=best, best_at=best_at), programs)
    return best_at.gather(0, best.max(0).indices[None])[0].long()


def drawn(rows: int, size_n: int, size_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = torch.randn(size_n, size_k) * size_k**-0.5
    return guarded(torch.randn(rows, size_k).to(dtype)), guarded(weight.to(dtype))


CASES = [(0, SIZES[0], HALF), *((seed, SIZES[seed % 3], BFLOAT) for seed in range(6))]


@pytest.mark.full_but_every(3)
@pytest.mark.slow
@pytest.mark.parametrize(("seed", "size", "dtype"), CASES)
def test_gates(emulator: CudaEmulator, seed: int, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight = drawn(*size, dtype)
    expected = silu_mul(x.float() @ weight.float().t())
    emulator.seed, emulator.written_before = seed, [x]
    actual = gated(x, weight, wide.GATES[seed % len(wide.GATES)])
    assert float((actual.float() - expected).norm() / expected.norm()) < ERROR[dtype]


@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(
    ("wide_cut", "wanted", "size"),
    [*zip(wide.PLAIN, cycle((BFLOAT, torch.float32, HALF)), cycle((SIZES[0], SIZES[2])))],
)
def test_products_with_scales_of_rows(
    emulator: CudaEmulator, wide_cut: wide.Wide, wanted: torch.dtype, size: tuple[int, int, int], is_gated: bool
) -> None:
    dtype = BFLOAT if wanted == torch.float32 else wanted
    (x, weight), cut = drawn(*size, dtype), wide.GATED if is_gated else wide_cut
    scales, columns = guarded(torch.rand(len(weight)) + 0.5), len(weight) // (2 if is_gated else 1)
    expected = x.float() @ weight.float().t()
    out = guarded(torch.full((len(x), columns), torch.nan, dtype=wanted))
    emulator.seed, emulator.written_before = 7, [x]
    for factor, given in ((scales, scales), (1.0, None)):
        cut.run(Call(x, weight, None, 0.0, is_gated, out), cut.num_programs(weight, is_gated), given)
        result = silu_mul(expected * factor) if is_gated else expected * factor
        assert float((out.float() - result).norm() / result.norm()) < ERROR.get(wanted, 1e-6)


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize(("dtype", "wanted"), [(BFLOAT, torch.float32), (HALF, HALF)])
def test_a_bias_is_added_to_sums(emulator: CudaEmulator, dtype: torch.dtype, wanted: torch.dtype) -> None:
    """Before they are rounded: to the last bit what few rows add."""
    (x, weight), bias = drawn(200, 240, 128, dtype), guarded(torch.randn(240).to(dtype))
    emulator.seed, emulator.written_before, cut = 7, [x], wide.PLAIN[0]
    found = []
    for given, kind in ((None, torch.float32), (bias, wanted)):
        out = guarded(torch.full((200, 240), torch.nan, dtype=kind))
        cut.run(Call(x, weight, None, 0.0, False, out, bias=given), cut.num_programs(weight, False))
        found.append(out)
    assert torch.equal(found[1], (found[0] + bias.float()).to(wanted))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "size", "dtype"), CASES[1:4])
def test_argmax(emulator: CudaEmulator, seed: int, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight = drawn(*size, dtype)
    logits = x.float() @ weight.float().t()
    emulator.seed, emulator.written_before = seed, [x]
    chosen = logits.gather(1, argmax(x, weight, wide.ARGMAX[seed % 2])[:, None])[:, 0]
    best = logits.max(1).values
    assert torch.all(best - chosen <= 1e-4 * best.abs())  # a near-tie may go either way
