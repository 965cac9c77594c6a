"""The router of few rows in CUDA C++ in the emulator: its choice has the bits of Triton's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from emulators.cuda import CudaEmulator, guarded
from mixture_routers import Routers, _few_code
from overlap_spec_kernels.experts import route
from overlap_spec_kernels.norm.normed import Normed, Unscaled, normalised_reference

BFLOAT = torch.bfloat16


@pytest.fixture
def router(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    yield from cuda_emulator.running(monkeypatch, route, route._few_kernel, route.row_parts)


def unscaled(count: int = 1) -> Unscaled:
    values, factors = torch.randn(count, 2048).to(BFLOAT), torch.rand(2048).to(BFLOAT)
    squares = values.float().square().view(count, -1, 16).sum(2).t().contiguous()
    return Unscaled(
        Normed(values, guarded(values * factors), guarded(squares), 1e-6), torch.full_like(values, torch.nan)
    )


def assert_no_logits(experts: int) -> None:
    """For the launch after this one."""
    assert (route.row_parts(experts, torch.device("cpu")).view(torch.int32) == -1).all()


# experts, those of a row, whether weights are normalised, a bias, an expert of all rows, its share of x
ROUTERS = {
    "128": (128, 8, True, False, False, False),
    "128, biased, one that all rows have": (128, 6, False, True, True, False),
    "512, of which a row has 16": (512, 16, True, False, False, False),
    "512, one that all rows have, with a weight": (512, 10, True, False, True, True),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.endswith("16") else ()) for name in ROUTERS]
)
def test_the_router_of_one_row(router: CudaEmulator, name: str) -> None:
    """It scales the row and writes it. Of equal experts the lower ones are chosen; of a row that is NaN the first."""
    experts, top_k, normalised, biased, has_common, has_share = ROUTERS[name]
    share = torch.randn(1, 2048).to(BFLOAT) / 40 if has_share else None
    common, bias = route.Common(experts, share) if has_common else None, torch.randn(experts).to(BFLOAT)
    for seed in range(2 if biased else 1):
        x = unscaled()
        of = x.of
        assert of.squares is not None
        scaled, weight = normalised_reference(of, of.squares), torch.randn(experts, 2048) / 40
        weight[[3, 7, 90]] = scaled.float() / 200
        if seed == 1:
            of.weighted[0, 1000] = torch.nan
        given = guarded(weight.to(BFLOAT)), top_k, normalised
        router.seed, router.written_before = seed, [of.weighted, of.squares]
        assert route.takes_few(x, experts, top_k)
        found = route._route_triton(x, *given, bias if biased else None, common)
        expected = route.route_reference(x.rows, *given, bias if biased else None, common)
        assert torch.equal(found.experts, expected.experts)
        torch.testing.assert_close(found.weights, expected.weights, equal_nan=True)
        assert torch.equal(x.rows.nan_to_num(), normalised_reference(of, of.squares).nan_to_num())
        assert_no_logits(experts)


# rows, experts, those of a row, a bias, an expert of all rows, its share of x
SEVERAL = {
    "3 rows of 128, biased": (3, 128, 8, True, False, False),
    "6 rows of 512, one that all rows have, with a weight": (6, 512, 10, False, True, True),
    "11 rows of 128, one that all rows have, with a weight": (11, 128, 6, False, True, True),
    "18 rows of 128, one that all rows have": (18, 128, 8, False, True, False),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "512" in name else ()) for name in SEVERAL]
)
def test_the_router_of_several_rows(router: CudaEmulator, name: str) -> None:
    """It scales up to 8. Of equal experts the lower ones are chosen; of a row that is NaN the first."""
    count, experts, top_k, biased, has_common, has_share = SEVERAL[name]
    share = torch.randn(1, 2048).to(BFLOAT) / 40 if has_share else None
    common, bias = route.Common(experts, share) if has_common else None, torch.randn(experts).to(BFLOAT)
    of, weight = unscaled(count).of, torch.randn(experts, 2048) / 40
    assert of.squares is not None
    weight[[3, 7, 90]] = normalised_reference(of, of.squares)[0].float() / 200
    of.weighted[1, 1000] = torch.nan
    scaled, given = normalised_reference(of, of.squares), (guarded(weight.to(BFLOAT)), top_k, True)
    rows = route.rows_to_route(of, experts)
    assert isinstance(rows, Unscaled) is (count <= 8) and route.takes_few(rows, experts, top_k)
    router.seed, router.written_before = count, [of.weighted, of.squares] if count <= 8 else [route.written(rows)]
    found = route._route_triton(rows, *given, bias if biased else None, common)
    expected = route.route_reference(scaled, *given, bias if biased else None, common)
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights, expected.weights, equal_nan=True)
    assert torch.equal(route.written(rows).nan_to_num(), scaled.nan_to_num())
    assert_no_logits(experts)


@pytest.mark.parametrize("count", [1, pytest.param(7, marks=pytest.mark.slow)])
def test_rows_whose_experts_were_drawn(router: CudaEmulator, count: int) -> None:
    """By the router of benchmarks, in the order of their logits. Others than those of the table have later steps'."""
    x, weight, common = unscaled(count), (torch.randn(128, 2048) / 40).to(BFLOAT), route.Common(128)
    choice = Routers(2, 128, 8, 3, torch.device("cpu")).choices[1]
    choice.step.fill_(69)
    found, last = choice._choose_triton(x, weight, common), choice.last.clone()
    choice.last.zero_()
    expected = choice._choose(x.rows, weight, common)
    assert torch.equal(found.experts, expected.experts) and torch.equal(last, choice.last)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-3, atol=1e-6)


@pytest.mark.usefixtures("router")
def test_which_routers_of_few_rows_are_others() -> None:
    """A row that is scaled already, more rows, another type, other sizes, more experts of a row."""
    x, rows = unscaled(), torch.zeros(40, 2056, dtype=BFLOAT)
    of, whole = x.of, rows[:, :2048].contiguous()
    assert of.squares is not None and route.takes_few(x, 128, 16) and route.takes_few(whole[:32], 512, 16)
    short = Unscaled(of._replace(weighted=of.weighted[:, :1024], squares=of.squares[:64]), x.rows[:, :1024])
    for given, experts, top_k in (
        (x.rows, 128, 8),
        (whole[:33], 128, 8),
        (unscaled(9), 128, 8),
        (rows[:8, :2048], 128, 8),
        (short, 128, 8),
        (x._replace(of=of._replace(squares=of.squares[:64])), 128, 8),
        (x._replace(of=of._replace(weighted=of.weighted.half())), 128, 8),
        (x, 120, 8),
        (x, 256, 8),
        (x, 128, 17),
    ):
        assert not route.takes_few(given, experts, top_k)
    assert torch.equal(route.written(route.rows_to_route(of._replace(squares=None), 128)), of.weighted)


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("experts", "rows"), [(128, 1), (512, 1), (512, 32)])
def test_the_router_of_few_rows_compiles(experts: int, rows: int) -> None:
    """For a real GPU, and that of benchmarks."""
    names = {"HIDDEN": 2048, "EXPERTS": experts, "TOP_K": 8, "SHARED": True, "ROWS": rows, "NORMALISED": True}
    names["BIASED"] = False
    for code in (route.CudaCode(route.FEW_SOURCE), _few_code()):
        assert route._few_kernel(code, tuple(names.items()), torch.device("meta"))._code._compile()
