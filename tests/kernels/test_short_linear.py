"""The kernel of small weights in one order for few rows, short_linear.cu, in the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from emulators.cuda import CudaEmulator, guarded
from overlap_spec_kernels import Norm, Normed, OrderedWeight
from overlap_spec_kernels.launch import assuming
from overlap_spec_kernels.linear import ordered, short_linear as short
from overlap_spec_kernels.linear.call import Addition, call_of
from overlap_spec_kernels.linear.short_linear import RowLinear, Short, row_linear_for, short_for
from torch import Tensor

BFLOAT = torch.bfloat16


@pytest.fixture
def emulator(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    short._kernel.cache_clear()
    cuda_emulator.install(monkeypatch, short)
    yield cuda_emulator
    short._kernel.cache_clear()


class Case(NamedTuple):
    rows: int
    size_n: int
    size_k: int
    piece: int


# Columns that do not fill the last program; pieces of both widths; more of W than waits in registers.
CASES = [Case(13, 56, 576, 32), Case(1, 56, 192, 32), Case(7, 40, 256, 64), Case(8, 24, 1536, 64)]


def ran(
    cut: Short,
    x: Tensor | Normed,
    weight: Tensor,
    gated: bool,
    dtype: torch.dtype,
    add: Addition | None = None,
    bias: Tensor | None = None,
) -> Normed:
    call = call_of(x, weight, gated, add, dtype, cut.block_n, bias)
    for tensor in (call.out, call.weighted, call.sums):
        if tensor is not None:
            tensor.fill_(torch.nan)
    cut.run(call, cut.num_programs(weight, gated))
    assert call.out is not None
    return Normed(call.out, call.out if call.weighted is None else call.weighted, call.sums, add.norm.eps if add else 0)


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(BFLOAT)


@pytest.mark.slow_but_every(len(CASES))
@pytest.mark.parametrize("case", CASES)
def test_sums(emulator: CudaEmulator, case: Case) -> None:
    """In 32 bits, and with a residual: what the norm after it needs, squares by halves."""
    cut, weight = (
        Short(case.piece, 8 if case.rows <= 8 else 16),
        drawn(case.size_n, case.size_k, scale=case.size_k**-0.5),
    )
    x, wide = drawn(case.rows, case.size_k), drawn(case.rows, case.size_n + 8)
    residual, norm = wide[:, :-8], Norm(drawn(case.size_n) + 1, 1e-5)
    emulator.written_before = [x, wide]
    expected = x.double() @ weight.double().t()
    sums = ran(cut, x, weight, False, torch.float32).values
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-5)
    added = ran(cut, x, weight, False, BFLOAT, Addition(residual, norm))
    assert torch.equal(added.values, (sums + residual.float()).to(BFLOAT))
    assert torch.equal(added.weighted, (added.values.float() * norm.weight.float()).to(BFLOAT))
    bias = drawn(case.size_n)
    biased = ran(cut, x, weight, False, BFLOAT, Addition(residual, norm), bias).values
    assert torch.equal(biased, (sums + bias.float() + residual.float()).to(BFLOAT))
    squares = F.pad(added.values.float().square(), (0, -case.size_n % 16)).unflatten(1, (-1, 16))
    while squares.shape[2] > 1:
        squares = squares[:, :, : squares.shape[2] // 2] + squares[:, :, squares.shape[2] // 2 :]
    assert added.squares is not None and torch.equal(added.squares, squares[:, :, 0].t())


@pytest.mark.slow_but_every(len(CASES))
@pytest.mark.parametrize("case", CASES)
def test_gates_of_scaled_rows(emulator: CudaEmulator, case: Case) -> None:
    cut = Short(case.piece, 8 if case.rows <= 8 else 16)
    weight, x = drawn(case.size_n, case.size_k, scale=case.size_k**-0.5), drawn(case.rows, case.size_k)
    parts = x.float().square().unflatten(1, (-1, 16)).sum(2).t().contiguous()
    emulator.written_before = [x, parts]
    scaled = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 0.1)
    gate, up = (scaled @ weight.double().t()).chunk(2, dim=1)
    found = ran(cut, Normed(x, x, parts, 0.1), weight, True, torch.float32).values
    torch.testing.assert_close(found.double(), F.silu(gate) * up, rtol=1e-5, atol=1e-5)
    bias = drawn(case.size_n)
    plain, biased = (
        ran(cut, Normed(x, x, parts, 0.1), weight, False, torch.float32, bias=b).values for b in (None, bias)
    )
    assert torch.equal(biased, plain + bias.float())


def test_each_sum_has_every_other_piece(emulator: CudaEmulator) -> None:
    """One sum is too large for what the other one holds, which is lost if they are not added at the end."""
    for piece, size_k in ((32, 192), (64, 256)):
        x, weight = torch.zeros(1, size_k, dtype=BFLOAT), torch.ones(16, size_k, dtype=BFLOAT)
        first = torch.arange(size_k) // piece % 2 == 0
        x[0, first] = torch.tensor([2.0**24, 0.0] * (piece // 2)).repeat(int(first.sum()) // piece).to(BFLOAT)
        x[0, torch.nonzero(first)[-1]] = -(2.0**24) * int(first.sum()) / 2
        x[0, ~first] = 1.0
        found = ran(Short(piece, 8), x, weight, False, torch.float32).values
        assert torch.equal(found, torch.full_like(found, float((~first).sum())))


def test_a_scale_adds_up_squares_as_tiles_do(emulator: CudaEmulator) -> None:
    """The eight sums by fours: others of their orders lose ones beside what is large."""
    x, weight = torch.ones(1, 192, dtype=BFLOAT), torch.ones(16, 192, dtype=BFLOAT)
    squares = torch.tensor([2.0**25, 1, -(2.0**25), 1, 1, 1, 1, 1, 0, 0, 0, 0])[:, None].contiguous()
    found = ran(Short(32, 8), Normed(x, x, squares, 0.25), weight, False, torch.float32).values
    torch.testing.assert_close(found, torch.full_like(found, 192 * (6 / 192 + 0.25) ** -0.5), rtol=1e-6, atol=0)


def test_which_linears_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "runs_triton", lambda x: True)

    def chosen(rows: int, size_k: int, gated: bool = False, dtype: torch.dtype = BFLOAT) -> Short | None:
        weight = torch.empty(960, size_k, dtype=dtype, device="meta")
        x = torch.empty(rows, size_k, dtype=dtype, device="meta")
        return short_for(x, weight, gated, OrderedWeight(weight).piece)

    with assuming((9, 0)):
        assert chosen(1, 576) == chosen(8, 576, gated=True) == Short(32, 8)
        assert chosen(9, 1536) == Short(64, 16) and chosen(17, 1536) is None
        assert chosen(1, 64) is None, "one sum"
        assert chosen(1, 576, dtype=torch.float16) is None
        assert chosen(16, 2048, gated=True) == Short(64, 16) and chosen(16, 4096) is None
    with assuming((10, 0)):
        assert chosen(1, 576) is None


@pytest.mark.parametrize("wide", [False, True])
def test_one_row_and_its_residual(emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch, wide: bool) -> None:
    """W is on its way before x is there, and what the norm after it needs is written."""
    short._row_kernel.cache_clear()
    monkeypatch.setattr(short, "_LEAST_ROW_BYTES", 0)
    monkeypatch.setattr(short, "runs_hopper", lambda device: True)
    monkeypatch.setattr(short, "num_multiprocessors", lambda device: 3)
    weight, x, residual = guarded(drawn(48, 512, scale=512**-0.5)), guarded(drawn(1, 512)), drawn(1, 48)
    norm = Norm((1 + torch.rand(48)).to(torch.float32 if wide else BFLOAT), 1e-5)
    cut = row_linear_for(x, weight, Addition(residual, norm))
    assert cut is not None
    for seed in range(3):
        emulator.seed, emulator.written_before = seed, [x, residual]
        found = ran(cut, x, weight, False, BFLOAT, Addition(residual, norm))
        torch.testing.assert_close(
            found.values.double(), residual + x.double() @ weight.double().t(), rtol=2**-7, atol=2**-7
        )
        assert torch.equal(found.weighted, (found.values.float() * norm.weight.float()).to(BFLOAT))
        assert found.squares is not None
        torch.testing.assert_close(found.squares[:, 0], found.values.float().square().view(-1, 16).sum(1))


def test_which_linears_of_one_row_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others: several rows, without a residual, of another type, with more programs than run at once, small or long."""
    monkeypatch.setattr(short, "runs_hopper", lambda device: True)
    monkeypatch.setattr(short, "num_multiprocessors", lambda device: 132)

    def fits(rows: int = 1, size_n: int = 2048, size_k: int = 4096, dtype: torch.dtype = BFLOAT) -> bool:
        x, weight = torch.zeros(rows, size_k, dtype=dtype), torch.zeros(size_n, size_k, dtype=dtype)
        add = Addition(torch.zeros(rows, size_n, dtype=dtype), Norm(torch.zeros(size_n, dtype=dtype), 1e-5))
        assert row_linear_for(x, weight, None) is None and row_linear_for(x, weight, add, weight[:, 0]) is None
        return row_linear_for(x, weight, add) is not None

    assert fits()
    assert not fits(rows=2) and not fits(dtype=torch.float16) and not fits(size_n=2128) and not fits(size_n=2040)
    assert not fits(size_n=512) and not fits(size_k=4352) and not fits(size_k=4224)


@pytest.mark.usefixtures("nvrtc")
def test_one_row_compiles() -> None:
    assert short._row_kernel(RowLinear(4096, False), torch.device("meta"))._code._compile()
