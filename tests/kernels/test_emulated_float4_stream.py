"""The products of one row's experts in 4-bit floats in the emulator, to the bit: all sums in their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from emulators.cuda import CudaEmulator, guarded
from overlap_spec_kernels import Biases, Clamp, Float4Matrices, Norm, Routing
from overlap_spec_kernels.experts import float4_streams as streams
from overlap_spec_kernels.experts.experts_mlp import _experts_add_triton, clamped_mul, experts_add_reference
from overlap_spec_kernels.norm.normed import Normed, Unscaled
from overlap_spec_kernels.norm.silu_mul import silu_mul_reference
from support.float4_weights import random_float4
from torch import Tensor

BFLOAT, ORDER = torch.bfloat16, (0, 4, 1, 5, 2, 6, 3, 7)  # of runs in a tile
EXPERTS, CLAMP = 5, Clamp(1.702, 0.6)


class Case(NamedTuple):
    """Of a product of one row: whether results have biases and gates bounds, and stages at most."""

    group: int
    top_k: int
    size_k: int
    size_n: int
    ends: bool
    stages: int


GATES = {
    "mxfp4, a tile that columns do not fill": Case(32, 3, 352, 80, True, 9),
    "nvfp4, a ring": Case(16, 2, 912, 24, False, 2),
    "mxfp4, a ring": Case(32, 2, 1152, 40, False, 3),
    "nvfp4, biases": Case(16, 1, 128, 16, True, 9),
}
DOWNS = {
    "mxfp4, a ring": Case(32, 3, 992, 48, True, 2),
    "nvfp4, all at once": Case(16, 2, 304, 32, True, 9),
    "nvfp4, no biases": Case(16, 2, 144, 16, False, 9),
    "mxfp4, no biases": Case(32, 1, 768, 16, False, 3),
}
QUICK = 2  # the others, each of a library of its own, show the same


def cases(of: dict[str, Case]) -> list[object]:
    return [pytest.param(of[name], marks=() if i < QUICK else pytest.mark.slow, id=name) for i, name in enumerate(of)]


@pytest.fixture
def emulator(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    monkeypatch.setattr(streams, "num_multiprocessors", lambda device: 4)
    yield from cuda_emulator.running(monkeypatch, streams, streams._kernel)


def stack_of(group: int, rows: int, columns: int, parts: int) -> Float4Matrices:
    """With scales so different that sums are rounded, and with memory that nothing follows."""
    every = []
    for seed in range(EXPERTS):
        values, scales, factors = random_float4(rows, columns, group, seed=seed)
        if group == 32:
            scales = torch.randint(96, 128, scales.shape, dtype=torch.uint8)
        every.append(Float4Matrices.packed(values, scales, factors, parts, BFLOAT))
    stack = Float4Matrices.stacked(every)
    return replace(stack, words=guarded(stack.words), scales=guarded(stack.scales))


def row_of(*shape: int) -> Tensor:
    """Small integers: the sum of 16 products is not rounded."""
    return guarded(torch.randint(-40, 41, shape).to(BFLOAT))


def product(x: Tensor, weight: Float4Matrices, bias: Tensor | None, expert: int) -> Tensor:
    """In float32, run by run. Shapes: x [I], bias [E, O] -> [O]."""
    size_k = weight.columns
    matrix = replace(weight, factors=None if weight.factors is None else torch.ones_like(weight.factors))
    terms = F.pad(matrix.matrix(expert, torch.float64) * x.double(), (0, -size_k % 128))
    total = torch.zeros(weight.rows)
    for tile in terms.unflatten(1, (-1, 8, 16)).sum(3).float().unbind(1):
        for run in ORDER:
            total += tile[:, run]
    ended = total.double()
    if weight.factors is not None:
        ended = ended * weight.factors[expert].double()
    return (ended if bias is None else ended + bias[expert].double()).float()


@pytest.mark.parametrize("case", cases(GATES))
def test_gate_and_up(emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """The kernel starts before the router has chosen experts, and before x is written."""
    weight, x = stack_of(case.group, 2 * case.size_n, case.size_k, 2), row_of(1, case.size_k)
    experts = torch.randperm(EXPERTS)[None, : case.top_k].contiguous()
    bias = torch.randn(EXPERTS, 2 * case.size_n).to(BFLOAT) if case.ends else None
    monkeypatch.setattr(streams, "_GATE_STAGES", case.stages)
    expected = torch.stack([product(x[0], weight, bias, int(expert)) for expert in experts[0]])
    expected = clamped_mul(expected, CLAMP) if case.ends else silu_mul_reference(expected)
    assert streams.takes_float4_gate(x, weight, experts)
    for seed in range(2):
        emulator.seed, emulator.written_before = seed, [x, experts]
        found = streams.float4_gate(x, weight, bias, experts, CLAMP if case.ends else None)
        torch.testing.assert_close(found, expected.to(BFLOAT), rtol=2**-8, atol=0)


@pytest.mark.parametrize("case", cases(DOWNS))
def test_down_and_its_sum(emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """The choice, and what is added, are there before the gated product is."""
    weight, gated = stack_of(case.group, case.size_n, case.size_k, 1), row_of(case.top_k, case.size_k)
    routing = Routing(torch.randperm(EXPERTS)[None, : case.top_k].contiguous(), torch.rand(1, case.top_k))
    residual = torch.randn(1, case.size_n).to(BFLOAT)
    bias, shared = (torch.randn(EXPERTS, case.size_n).to(BFLOAT), row_of(1, case.size_n)) if case.ends else (None, None)
    norm = Norm(torch.rand(case.size_n).to(torch.float32 if case.ends else BFLOAT), 0.1)
    monkeypatch.setattr(streams, "_DOWN_STAGES", case.stages)
    total = torch.zeros(case.size_n)
    for place, expert in enumerate(routing.experts[0]):
        result = product(gated[place], weight, bias, int(expert)).to(BFLOAT)
        total = (total.double() + routing.weights[0, place].double() * result.double()).float()
    added = total.to(BFLOAT) if shared is None else total.to(BFLOAT) + shared[0]
    values = residual + added
    assert streams.takes_float4_down(residual, weight, routing.experts)
    for seed in range(2):
        emulator.seed, emulator.written_before = seed, [gated]
        found = streams.float4_down(gated, weight, bias, routing, residual, norm, shared)
        assert torch.equal(found.values, values) and found.squares is not None
        assert torch.equal(found.weighted, (values.float() * norm.weight.float()).to(BFLOAT))
        torch.testing.assert_close(found.squares[:, 0], values.float().square().view(-1, 16).sum(1))


def test_sums_are_added_in_one_order(emulator: CudaEmulator) -> None:
    """Biases leave of each sum what bfloat16 would not show of it."""
    weight, gated, experts = stack_of(32, 192, 1152, 1), row_of(1, 1152), torch.tensor([[2]])
    sums = product(gated[0], weight, None, 2)
    bias = -sums.to(BFLOAT).expand(EXPERTS, -1).contiguous()
    zeros, norm = torch.zeros(1, 192).to(BFLOAT), Norm(torch.ones(192).to(BFLOAT), 0.1)
    found = streams.float4_down(gated, weight, bias, Routing(experts, torch.ones(1, 1)), zeros, norm, None)
    assert torch.equal(found.values[0], (sums + bias[2].float()).to(BFLOAT))


def test_experts_of_a_row(emulator: CudaEmulator) -> None:
    """Both products, of a row that the router writes scaled."""
    gate_up, down = stack_of(32, 192, 352, 2), stack_of(32, 352, 96, 1)
    x, residual = torch.randn(1, 352).to(BFLOAT), torch.randn(1, 352).to(BFLOAT)
    routing, norm = Routing(torch.tensor([[4, 1, 2]]), torch.rand(1, 3)), Norm(torch.rand(352).to(BFLOAT), 0.1)
    biases = Biases(torch.randn(EXPERTS, 192).to(BFLOAT), torch.randn(EXPERTS, 352).to(BFLOAT))
    rows = Unscaled(Normed(x, torch.full_like(x, torch.nan), torch.ones(22, 1)), x)
    found = _experts_add_triton(rows, gate_up, down, routing, residual, norm, biases, CLAMP, None)
    expected = experts_add_reference(x, gate_up, down, routing, residual, norm, biases, CLAMP)
    bound = 2**-6 * float(expected.values.abs().max())
    torch.testing.assert_close(found.values, expected.values, rtol=2**-6, atol=bound)


def test_which_products_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows, another type, columns of the result that fill no tile, more tiles than run, more experts than fit."""
    monkeypatch.setattr(streams, "runs_hopper", lambda device: True)
    monkeypatch.setattr(streams, "num_multiprocessors", lambda device: 4)
    gate_up, down = stack_of(32, 192, 352, 2), stack_of(32, 352, 96, 1)
    x, experts = torch.zeros(1, 352).to(BFLOAT), torch.arange(3)[None]
    assert streams.takes_float4_gate(x, gate_up, experts) and streams.takes_float4_down(x, down, experts)
    for takes, weight in ((streams.takes_float4_gate, gate_up), (streams.takes_float4_down, down)):
        assert not takes(x, weight, torch.zeros(2, 3, dtype=torch.int64))
        assert not takes(x.half(), replace(weight, dtype=torch.float16), experts)
        assert not takes(x.half(), weight, experts)
    assert not streams.takes_float4_gate(x, stack_of(32, 168, 352, 2), experts)
    assert not streams.takes_float4_gate(torch.zeros(353).to(BFLOAT)[None, 1:], gate_up, experts)
    assert not streams.takes_float4_gate(x, gate_up, torch.zeros(1, 7, dtype=torch.int64))
    assert not streams.takes_float4_down(x, stack_of(32, 360, 96, 1), experts)
    assert not streams.takes_float4_down(x, down, torch.zeros(1, 17, dtype=torch.int64))
    assert not streams._down_sizes(replace(down, columns=65536), 3).fits


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("words", [1, 2])
def test_it_compiles(words: int) -> None:
    """For a real GPU, in the sizes of gpt-oss."""
    gate = streams.Sizes(2880, words, 11, 4, 1, streams._GATE_BYTES, 4, 1, 1)
    down = streams.Sizes(2880, words, 4, 4, 4, streams._DOWN_BYTES, 8, 1)
    for name, sizes in (("float4_gate", gate), ("float4_down", down)):
        assert sizes.fits and sizes.num_bytes <= sizes.most_bytes
        assert streams._kernel(name, sizes, torch.device("meta"))._code._compile()
