"""Kernels of experts in CUDA C++ for few rows in the emulator: products, against float64 products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from emulators.cuda import CudaEmulator, guarded
from overlap_spec_kernels import Norm, QuantizedStack, Routing
from overlap_spec_kernels.experts import (
    experts_mlp,
    quantized_products,
    quantized_streams as products,
)
from overlap_spec_kernels.experts.experts_mlp import _experts_add_triton, experts_add_reference
from overlap_spec_kernels.experts.products import Places
from overlap_spec_kernels.norm.normed import Normed
from support.expert_sizes import Sizes, of_places, routing_of, stack_of
from torch import Tensor

BFLOAT = torch.bfloat16


CASES = {
    "one row": Sizes(1, 4, 512, 256),
    "an expert of all rows, eleven of them": Sizes(11, 3, 1024, 128),
    "three rows": Sizes(3, 2, 2048, 128, scale_rows=16),
    "32 rows, experts of many warps": Sizes(32, 2, 512, 128, experts=200),
    "two rows in 4 bits": Sizes(2, 3, 1024, 256, 1, bits=4),
    "eleven rows in 4 bits, experts of several eights": Sizes(11, 3, 256, 512, 1, experts=4, bits=4),
}


@pytest.fixture
def emulator(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    monkeypatch.setattr(products, "num_multiprocessors", lambda device: 5)
    yield from cuda_emulator.running(monkeypatch, products, products._stream, products._ring, products._sum_ring)


@pytest.mark.parametrize("name", CASES)
def test_gate_and_up(emulator: CudaEmulator, name: str) -> None:
    """Which begins before x is there, and with many rows before experts are chosen."""
    sizes = CASES[name]
    weight, routing = stack_of(sizes, 2 * sizes.inner, sizes.hidden), routing_of(sizes)
    wide = guarded(torch.randn(sizes.rows, sizes.hidden + 8).to(BFLOAT))
    x = wide[:, : sizes.hidden]
    gate, up = of_places(x.repeat_interleave(sizes.top_k, dim=0), weight, routing.experts).chunk(2, dim=1)
    expected = F.silu(gate) * up
    assert products.streams_gate(x, weight, routing.experts)
    emulator.seed = list(CASES).index(name)
    for written in ([wide], [wide, routing.experts]) if sizes.rows == 11 else ([wide],):
        emulator.written_before = written
        found = products.multiply_few(x, weight, routing.experts)
        torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_the_sum_of_down(emulator: CudaEmulator, name: str) -> None:
    """With what is added to it, and what the norm after it needs."""
    sizes = CASES[name]
    hidden = sizes.hidden // 4
    weight, routing = stack_of(sizes, hidden, sizes.inner), routing_of(sizes)
    x = guarded(torch.randn(sizes.rows * sizes.top_k, sizes.inner).to(BFLOAT))
    residual = torch.randn(sizes.rows, hidden + 8).to(BFLOAT)[:, :hidden]
    by_place = of_places(x, weight, routing.experts).view(sizes.rows, sizes.top_k, hidden)
    expected = residual.double() + (routing.weights.double()[:, :, None] * by_place).sum(1)
    assert products.streams_sum(x, weight, routing.experts)
    seed = list(CASES).index(name)
    has_shared = seed % 2  # each is a library of its own, and half a second of a compiler
    shared = torch.randn(sizes.rows, hidden).to(BFLOAT) if has_shared else None
    emulator.seed, emulator.written_before = seed, [x]
    norm = Norm(torch.rand(hidden) if shared is None else torch.rand(hidden).to(BFLOAT), 0.1)
    found = products.sum_down(x, weight, routing, residual, norm, shared)
    wanted = expected if shared is None else expected + shared.double()
    close = 2**-7 * float(wanted.abs().max())
    torch.testing.assert_close(found.values.double(), wanted, rtol=2**-7, atol=close)
    squares = found.values.float().square().unflatten(1, (-1, 16)).sum(2).t()
    assert found.squares is not None
    torch.testing.assert_close(found.squares, squares)
    assert torch.equal(found.weighted, (found.values.float() * norm.weight.float()).to(BFLOAT))


# sizes, most stages of the ring, whether a shared expert's row is added
SUMS = {
    "experts of several eights, a ring that fills again": (Sizes(32, 3, 128, 384, experts=9), 2, [True]),
    "scales of 16 rows, one expert of all": (Sizes(17, 4, 96, 512, scale_rows=16, experts=40), 3, [True]),
    "one expert": (Sizes(8, 1, 64, 256), 7, [False]),
}


@pytest.mark.parametrize("name", SUMS)
def test_experts_that_are_read_once(emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The sum has the bits that it has where each row reads its own."""
    sizes, stages, adds = SUMS[name]
    weight, routing = stack_of(sizes, sizes.hidden, sizes.inner), routing_of(sizes)
    x = guarded(torch.randn(sizes.rows * sizes.top_k, sizes.inner).to(BFLOAT))
    residual, shared = (torch.randn(sizes.rows, sizes.hidden).to(BFLOAT) for _ in range(2))
    norm = Norm(torch.rand(sizes.hidden).to(BFLOAT), 0.1)
    monkeypatch.setitem(products._SUM_STAGES, 8, stages)
    for is_added in adds:
        emulator.seed, emulator.written_before = int(is_added), [x]
        beside, found = shared if is_added else None, {}
        for least in (1, 33):
            monkeypatch.setattr(products, "_LEAST_IN_RING", least)
            found[least] = products.sum_down(x, weight, routing, residual, norm, beside)
        once, often = found[1], found[33]
        assert once.squares is not None and often.squares is not None
        assert torch.equal(once.values, often.values) and torch.equal(once.squares, often.squares)
        assert torch.equal(once.weighted, often.weighted)


class SixteenBits(NamedTuple):
    """A second product in 16 bits, whose sums are whole numbers, and have the same bits in any order."""

    sizes: Sizes
    dtype: torch.dtype
    blocks: int  # of a slice, at most
    stages: int  # at most
    cluster: int
    shared: bool


SIXTEEN = {
    "two rows, one stage of each expert": SixteenBits(Sizes(2, 4, 80, 256, experts=20), BFLOAT, 2, 7, 1, False),
    "experts of several eights, two programs": SixteenBits(Sizes(32, 3, 96, 192, experts=9), BFLOAT, 1, 3, 2, True),
    "nine rows of an expert, in float16": SixteenBits(Sizes(9, 2, 48, 384, experts=40), torch.float16, 4, 3, 1, True),
    "one expert, no slices": SixteenBits(Sizes(7, 1, 64, 64, experts=1), torch.float16, 4, 5, 1, False),
    "four rows of one long expert, three stages": SixteenBits(Sizes(4, 2, 32, 1536, experts=3), BFLOAT, 4, 5, 1, True),
    "three rounds of rows": SixteenBits(Sizes(31, 5, 32, 128, experts=70), BFLOAT, 1, 4, 1, True),
}


def whole_numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return guarded(torch.randint(-8, 9, shape).to(dtype))


def sum_in_order(by_place: Tensor, routing: Routing, residual: Tensor, norm: Norm, shared: Tensor | None) -> Normed:
    """As `sum_kernel` of a GPU adds up: an operation for a product and its sum. Shapes: by_place [T, k, O] f32."""
    dtype, total = residual.dtype, torch.zeros(residual.shape)
    for place in range(by_place.shape[1]):
        result = by_place[:, place].to(dtype).double()
        total = (routing.weights[:, place, None].double() * result + total.double()).float()
    if shared is not None:
        total = (total.to(dtype).float() + shared.float()).to(dtype).float()
    values = (total.to(dtype).float() + residual.float()).to(dtype)
    squares = values.float().square().unflatten(1, (-1, 16))
    for _ in range(4):
        squares = squares[..., : squares.shape[2] // 2] + squares[..., squares.shape[2] // 2 :]
    return Normed(values, (values.float() * norm.weight.float()).to(dtype), squares[..., 0].t(), norm.eps)


@pytest.mark.parametrize("name", SIXTEEN)
def test_the_sum_of_down_in_16_bits(emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Bits are those of the product and of `sum_kernel`."""
    sizes, dtype, blocks, stages, cluster, has_shared = SIXTEEN[name]
    limits = {"_SUM_BLOCKS": blocks, "_SUM_STAGES": stages, "_SUM_CLUSTER": cluster}
    for limit, value in limits.items():
        monkeypatch.setitem(getattr(products, limit), 16, value)
    weight = whole_numbers(sizes.experts, sizes.hidden, sizes.inner, dtype=dtype)
    x, routing = whole_numbers(sizes.rows * sizes.top_k, sizes.inner, dtype=dtype), routing_of(sizes)
    residual = torch.randn(sizes.rows, sizes.hidden + 8).to(dtype)[:, : sizes.hidden]
    shared = torch.randn(sizes.rows, sizes.hidden).to(dtype) if has_shared else None
    matrices = (weight[int(expert)].float() for expert in routing.experts.flatten())
    by_place = torch.stack([matrix @ row for matrix, row in zip(matrices, x.float(), strict=True)])
    assert products.streams_sum(residual, weight, routing.experts)
    monkeypatch.setattr(experts_mlp, "_places", lambda *given: None)
    monkeypatch.setattr(experts_mlp, "_gated", lambda *given: x)
    for seed in range(2):
        emulator.seed, emulator.written_before = seed, [x]
        norm = Norm(torch.rand(sizes.hidden).to(dtype if has_shared else torch.float32), 0.1)
        found = experts_mlp._experts_add_triton(residual, weight, weight, routing, residual, norm, shared=shared)
        wanted = sum_in_order(by_place.view(sizes.rows, sizes.top_k, -1), routing, residual, norm, shared)
        assert found.squares is not None and wanted.squares is not None
        assert torch.equal(found.values, wanted.values) and torch.equal(found.weighted, wanted.weighted)
        assert torch.equal(found.squares, wanted.squares)


def test_which_sums_in_16_bits_are_others(emulator: CudaEmulator) -> None:
    """Of one row or more than 32, in float32, of lines that K does not fill, of W of which no three stages fit.

    Up to four rows have smaller stages.
    """
    weight, experts = torch.zeros(6, 32, 768, dtype=BFLOAT), torch.zeros(33, 8, dtype=torch.int64)
    x = torch.zeros(33, 32, dtype=BFLOAT)

    def takes(weight: Tensor, experts: Tensor) -> bool:
        return products.streams_sum(x, weight, experts)

    assert takes(weight, experts[:2]) and takes(weight, experts[:32]) and takes(weight.half(), experts[:2])
    assert not takes(weight, experts[:1]) and not takes(weight, experts) and not takes(weight.float(), experts[:2])
    assert not takes(weight[:, :, :736].contiguous(), experts[:2]) and not takes(weight[:, :24].clone(), experts[:2])
    assert takes(weight.repeat(1, 1, 2)[..., :1024].clone(), experts[:2])
    assert takes(weight.repeat(1, 1, 2), experts[:4]) and not takes(weight.repeat(1, 1, 2), experts[:5])
    assert not takes(weight.repeat(1, 1, 3), experts[:2])
    assert not takes(weight, experts[:2].repeat(1, 3)) and not takes(weight[:1].expand(1025, -1, -1), experts[:2])


def test_which_products_in_4_bits_are_others(emulator: CudaEmulator) -> None:
    """Of one row or more than 32, in float32, with zero points, a scale of 16 rows, half a line, or too many lines."""
    sizes = Sizes(33, 3, 256, 256, 1, bits=4)
    weight, experts, x = stack_of(sizes, 64, 256), routing_of(sizes).experts, torch.zeros(33, 256, dtype=BFLOAT)
    packing, two = weight.packing, experts[:2]

    def takes(x: Tensor, weight: QuantizedStack, experts: Tensor) -> tuple[bool, bool]:
        return products.streams_gate(x, weight, experts), products.streams_sum(x, weight, experts)

    assert takes(x, weight, two) == takes(x, weight, experts[:32]) == (True, True)
    zeros = replace(weight, packing=replace(packing, zeros=torch.zeros_like(packing.scales)))
    coarse = replace(weight, packing=replace(packing, scale_rows=16))
    for other in ((x, weight, experts[:1]), (x, weight, experts), (x.float(), weight, two), (x, zeros, two)):
        assert takes(*other) == (False, False)
    assert takes(x, coarse, two) == takes(x, stack_of(sizes, 64, 384), two) == (False, False)
    assert takes(x, stack_of(sizes, 64, 7 * 256), two) == (True, False)  # of W that registers hold


def test_both_are_one_operation(emulator: CudaEmulator) -> None:
    """Of more rows than tiles without lists take; no kernel lists places."""
    sizes = Sizes(20, 2, 256, 128)
    weights = stack_of(sizes, 2 * sizes.inner, sizes.hidden), stack_of(sizes, sizes.hidden, sizes.inner)
    x, residual = (torch.randn(sizes.rows, sizes.hidden).to(BFLOAT) for _ in range(2))
    given = x, *weights, routing_of(sizes), residual, Norm(torch.rand(sizes.hidden).to(BFLOAT), 0.1)
    found, expected = _experts_add_triton(*given), experts_add_reference(*given)
    close = 2**-6 * float(expected.values.abs().max())
    torch.testing.assert_close(found.values, expected.values, rtol=2**-6, atol=close)


def test_which_experts_are_read_once() -> None:
    """Of 8 rows, not of 7. Columns of two programs, W that registers hold, experts that lists have."""
    sizes = Sizes(8, 2, 0, 0, experts=3)
    weight, experts = stack_of(sizes, 32, 768), routing_of(sizes).experts
    assert products._sums_in_ring(weight, experts) and not products._sums_in_ring(weight, experts[:7])
    for other in (stack_of(sizes, 48, 768), stack_of(sizes, 32, 896), stack_of(sizes._replace(experts=1025), 32, 128)):
        assert not products._sums_in_ring(other, experts)


def test_what_has_other_kernels(emulator: CudaEmulator) -> None:
    """More rows, another type, scales of rows, a K of an odd number of blocks."""
    sizes = CASES["one row"]
    weight, experts, x = stack_of(sizes, 256, 512), routing_of(sizes).experts, torch.randn(1, 512).to(BFLOAT)
    assert products.streams_gate(x, weight, experts) and products.streams_sum(x, weight, experts)
    assert not products.streams_gate(x.float(), weight, experts)
    assert not products.streams_gate(x.expand(33, -1), weight, experts.expand(33, -1))
    of_rows, odd = stack_of(sizes._replace(scale_rows=1), 256, 512), stack_of(sizes, 256, 640)
    assert not products.streams_gate(x, of_rows, experts) and not products.streams_gate(x, odd, experts)


@pytest.mark.usefixtures("nvrtc")
def test_it_compiles() -> None:
    """For a real GPU, as the emulator runs it."""
    assert products._stream(
        "multiply_rows", products._Shape(1, 16, 8, 1, listed=1), 10, False, False, torch.device("meta")
    )._code._compile()


@pytest.mark.parametrize("gated", [True, False])
def test_tiles_of_listed_places(emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch, gated: bool) -> None:
    """Of 40 rows, which one launch lists: an expert of none, one of a few, one of all."""
    monkeypatch.setattr(products, "_LISTED", 16)
    sizes = Sizes(40, 2, 512, 128)
    weight = stack_of(sizes, 2 * sizes.inner, sizes.hidden)
    experts = torch.randint(1, sizes.experts - 1, (sizes.rows, 1))
    experts = torch.cat((experts, torch.full_like(experts, sizes.experts - 1)), dim=1)
    found = [(experts.flatten() == expert).nonzero()[:, 0] for expert in range(sizes.experts)]
    listed = torch.full((sizes.experts, sizes.rows), -(1 << 20), dtype=torch.int32)
    for row, each in zip(listed, found, strict=True):
        row[: len(each)] = each
    places = Places(experts, torch.tensor([len(each) for each in found], dtype=torch.int32), listed)
    x = guarded(torch.randn(sizes.rows, sizes.hidden).to(BFLOAT))
    expected = of_places(x.repeat_interleave(2, dim=0), weight, experts)
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    assert products.streams_listed(x, weight, places, gated)
    emulator.seed, emulator.written_before = int(gated), [x, places.counts]
    actual = quantized_products.multiply_quantized(x, weight, None, places, True, gated, None)
    torch.testing.assert_close(actual.double(), expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()))
