"""The products of experts in float8 for many rows, expert_tiles.cu, in the emulator against float64 products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from emulators.cuda import CudaEmulator, guarded
from overlap_spec_kernels import QuantizedStack
from overlap_spec_kernels.experts import products as lists, quantized_products as products
from overlap_spec_kernels.experts.products import Places
from support.quantized_cases import Case, weight_of
from torch import Tensor

BFLOAT = torch.bfloat16
HIDDEN, INNER, EXPERTS = 512, 128, 64


@pytest.fixture
def emulator(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    products._tiles.cache_clear()
    cuda_emulator.install(monkeypatch, products)
    monkeypatch.setattr(products, "runs_hopper", lambda device: True)
    monkeypatch.setattr(products, "_TILED", 4)
    monkeypatch.setattr(products, "num_multiprocessors", lambda device: 5)
    monkeypatch.setattr(products, "rows_by_expert", lambda x, places: guarded(x[order_of(places) // 2]))
    yield cuda_emulator
    products._tiles.cache_clear()


def stack_of(rows: int, columns: int) -> QuantizedStack:
    case = Case(0, rows, columns, 8, 128, 128)
    weights = [weight_of(case, torch.float32) for _ in range(EXPERTS)]
    stack = QuantizedStack.of([(weight.data, weight.packing) for weight in weights])
    stack.data.copy_(guarded(stack.data))
    return stack


def places_of(num_rows: int) -> Places:
    """Expert 31 has few rows, 40 the others, the last one all, which are more than a tile."""
    experts = torch.full((num_rows, 2), 40)
    experts[::9, 0] = 31
    experts[:, 1] = EXPERTS - 1
    found = [(experts.flatten() == expert).nonzero()[:, 0] for expert in range(EXPERTS)]
    listed = torch.full((EXPERTS, num_rows), -(1 << 20), dtype=torch.int32)
    for row, each in zip(listed, found, strict=True):
        row[: len(each)] = each
    return Places(experts, torch.tensor([len(each) for each in found], dtype=torch.int32), listed)


def order_of(places: Places) -> Tensor:
    """All places, by expert."""
    return torch.cat([row[:count] for row, count in zip(places.listed, places.counts, strict=True)]).long()


@pytest.mark.parametrize("num_rows", [17, 64, 130])
def test_places_are_listed_and_rows_lie_by_expert(
    cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    lists._lists.cache_clear()
    cuda_emulator.install(monkeypatch, lists)
    monkeypatch.setattr(lists, "runs_hopper", lambda device: True)
    experts = guarded(torch.stack([torch.randperm(99)[:3] for _ in range(num_rows)]))
    wide = guarded(torch.randn(num_rows, 1104).to(BFLOAT))
    cuda_emulator.written_before = [experts, wide]
    found, x = lists.places_of(experts, 100), wide[:, :1096]
    for expert, count in enumerate(found.counts.tolist()):
        expected = (experts.flatten() == expert).nonzero()[:, 0]
        assert found.listed[expert, :count].tolist() == expected.tolist()
    assert torch.equal(lists.rows_by_expert(x, found), x[order_of(found) // 3])
    lists._lists.cache_clear()


def of_places(x: Tensor, weight: QuantizedStack, experts: Tensor) -> Tensor:
    """Shapes: x [T * k, I] -> [T * k, O], float64."""
    matrices = [weight.matrix(expert, torch.float64) for expert in range(EXPERTS)]
    return torch.stack([matrices[expert] @ row for expert, row in zip(experts.flatten(), x.double(), strict=True)])


@pytest.mark.parametrize(("seed", "num_rows"), [(0, 205), (1, 192)])
def test_both_products(emulator: CudaEmulator, seed: int, num_rows: int) -> None:
    """Of tiles of 64, 128, 176 and 184 rows, of which each program of a cluster brings a half."""
    weight, places = stack_of(2 * INNER, HIDDEN), places_of(num_rows)
    x = torch.randn(num_rows, HIDDEN).to(BFLOAT)
    rows = guarded(x[order_of(places) // 2])
    gate, up = of_places(x.repeat_interleave(2, dim=0), weight, places.experts).chunk(2, dim=1)
    emulator.seed, emulator.written_before = seed, [rows]
    by_expert = torch.full((2 * num_rows, INNER), torch.nan, dtype=BFLOAT)
    products._multiply_tiles(rows, weight, by_expert, places, True)
    hidden = torch.empty_like(by_expert).index_copy_(0, order_of(places), by_expert)
    error = (hidden - F.silu(gate) * up).abs().max() / gate.abs().max()
    assert error < 2**-7
    second = stack_of(HIDDEN, INNER)
    emulator.written_before = []
    assert products.takes_tiles(x, weight, second, places)
    actual = products.multiply_tiles(x, weight, second, places)
    expected = of_places(hidden, second, places.experts)
    assert ((actual - expected).abs() <= expected.abs() * 2**-8 + 1e-4 * expected.abs().max()).all()


def test_what_has_other_kernels(emulator: CudaEmulator) -> None:
    weight, second, places = stack_of(2 * INNER, HIDDEN), stack_of(HIDDEN, INNER), places_of(128)
    x = torch.zeros(128, HIDDEN, dtype=BFLOAT)
    assert products.takes_tiles(x, weight, second, places)
    by_row = QuantizedStack(weight.data, replace(weight.packing, group=0))
    others = [
        (x.half(), weight, second, places),
        (torch.zeros(128, HIDDEN + 4, dtype=BFLOAT)[:, :HIDDEN], weight, second, places),
        (x, by_row, second, places),
        (x, weight, QuantizedStack(second.data[..., :64], second.packing), places),
        (x, weight, second, places._replace(experts=places.experts[:127])),
        (x, weight, second, places._replace(experts=torch.zeros(16, 16, dtype=torch.int64))),
    ]
    assert not any(products.takes_tiles(*other) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.usefixtures("nvrtc")
def test_it_compiles(gated: bool) -> None:
    assert products.code_of_tiles(gated, 513, 2)._compile()
