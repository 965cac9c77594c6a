"""Kernels of the experts of one row in CUDA C++ in the emulator, and the room that they leave one another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from emulators.cuda import CudaEmulator, guarded
from overlap_spec_kernels import Norm, QuantizedStack, Routing
from overlap_spec_kernels.experts import quantized_streams as products, sum_of_experts as rows
from overlap_spec_kernels.experts.stacks import matrix_of
from overlap_spec_kernels.norm.normed import Normed, Unscaled, normalised_reference
from support.expert_sizes import Sizes, of_places, routing_of, stack_of
from support.quantized_cases import Case, weight_of
from torch import Tensor

BFLOAT = torch.bfloat16


@pytest.fixture
def one_row(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    yield from cuda_emulator.running(monkeypatch, rows, rows._gate_kernel, rows._down_kernel)


def stack_in_4_bits(experts: int, *shape: int) -> QuantizedStack:
    weights = [weight_of(Case(0, *shape, 4, 128, 1), torch.float32) for _ in range(experts)]
    stack = QuantizedStack.of([(weight.data, weight.packing) for weight in weights])
    stack.data.copy_(guarded(stack.data))
    return stack


@pytest.fixture
def both(one_row: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    """The kernels of one row in float8, and those of several."""
    for module in (rows, products):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 5)
    yield from one_row.running(monkeypatch, products, products._stream)


def repeated(routing: Routing) -> Routing:
    return Routing(*(each.expand(3, -1).contiguous() for each in routing))


# sizes, most warps of a tile, bytes of a program at most
IN_FLOAT8 = {
    "short chunks": (Sizes(1, 2, 2048, 96, scale_rows=32), 4, 140 << 10),
    "a ring, blocks that inner columns do not fill": (Sizes(1, 2, 2048, 96), 2, 100 << 10),
    "a stage for each chunk": (Sizes(1, 3, 2048, 64), 4, 222 << 10),
    "chunks of a block, blocks of 16 rows": (Sizes(1, 2, 1536, 48, scale_rows=16), 4, 222 << 10),
}
QUICK = list(IN_FLOAT8)[:2]  # the others, each of several libraries, show the same
FLOAT8_CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in IN_FLOAT8]


@pytest.mark.parametrize("name", FLOAT8_CASES)
def test_gate_and_up_of_one_row_in_float8(both: CudaEmulator, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It has the bits of several rows, whether it scales the row or not."""
    sizes, parts, most = IN_FLOAT8[name]
    monkeypatch.setitem(rows._GATE_PARTS, 8, parts)
    monkeypatch.setitem(rows._GATE_BYTES, 8, most)
    weight, routing = stack_of(sizes, 2 * sizes.inner, sizes.hidden), routing_of(sizes)
    weighted, squares = torch.randn(1, sizes.hidden).to(BFLOAT), torch.rand(9, 1) * sizes.hidden / 9
    normed = Normed(weighted, weighted, squares, 0.5)
    x = guarded(normalised_reference(normed, squares))
    expected = products.multiply_few(x.expand(3, -1), weight, repeated(routing).experts)[: sizes.top_k]
    assert rows.takes_gate(x, weight, routing.experts)
    for seed in range(2):
        both.seed, both.written_before = seed, [x, routing.experts]
        assert torch.equal(rows.gate_row(x, weight, routing.experts), expected)
        both.written_before = [routing.experts]
        unscaled = Unscaled(normed, guarded(torch.full_like(x, torch.nan)))
        assert torch.equal(rows.gate_row(unscaled, weight, routing.experts), expected)


# (sizes, bits of a value, multiprocessors)
GATES = {
    "16 bits, through a ring": (Sizes(1, 2, 2048, 64), 16, 3),
    "16 bits, programs with fewer tiles": (Sizes(1, 3, 512, 40), 16, 4),
    "4 bits, two chunks of a warp": (Sizes(1, 2, 1024, 128), 4, 7),
    "4 bits, warps that share tiles": (Sizes(1, 2, 3072, 64), 4, 2),
}


@pytest.mark.parametrize("name", GATES)
def test_gate_and_up_of_one_row(one_row: CudaEmulator, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Which begins before experts are chosen, and waits for them and for x."""
    sizes, bits, multiprocessors = GATES[name]
    monkeypatch.setattr(rows, "num_multiprocessors", lambda device: multiprocessors)
    routing, x, shape = (
        routing_of(sizes),
        guarded(torch.randn(1, sizes.hidden).to(BFLOAT)),
        (2 * sizes.inner, sizes.hidden),
    )
    weight: Tensor | QuantizedStack = guarded(torch.randn(sizes.experts, *shape).to(BFLOAT))
    if bits < 16:
        weight = stack_in_4_bits(sizes.experts, *shape)
    matrices = [matrix_of(weight, int(expert), torch.float64) for expert in routing.experts[0]]
    gate, up = torch.stack([matrix @ x[0].double() for matrix in matrices]).chunk(2, dim=1)
    expected = F.silu(gate) * up
    assert rows.takes_gate(x, weight, routing.experts)
    for seed in range(2):
        one_row.seed, one_row.written_before = seed, [x, routing.experts]
        found = rows.gate_row(x, weight, routing.experts)
        torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-7 * float(expected.abs().max()))


@pytest.mark.parametrize("parts", [128, 9])
def test_a_row_that_the_first_product_scales(
    one_row: CudaEmulator, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """In 4 bits, without the row that the router writes. Bits are those of that row."""
    monkeypatch.setattr(rows, "num_multiprocessors", lambda device: 4)
    sizes = Sizes(1, 2, 2048, 64)
    routing, weight = routing_of(sizes), stack_in_4_bits(sizes.experts, 2 * sizes.inner, sizes.hidden)
    weighted, squares = torch.randn(1, sizes.hidden).to(BFLOAT), torch.rand(parts, 1) * 8192 / parts
    normed = Normed(weighted, weighted, squares, 0.5)
    x = normalised_reference(normed, squares)
    for seed in range(2):
        one_row.seed, one_row.written_before = seed, [routing.experts]
        unscaled = Unscaled(normed, guarded(torch.full_like(x, torch.nan)))
        found = rows.gate_row(unscaled, weight, routing.experts)
        assert torch.equal(found, rows.gate_row(x, weight, routing.experts))


def test_which_rows_the_first_product_scales() -> None:
    """Not in 16 bits, nor where routers have more warps, or squares more parts."""
    weight = stack_in_4_bits(6, 128, 256)

    def scales(size: int, parts: int, of: Tensor | QuantizedStack = weight) -> bool:
        row = torch.zeros(1, size).to(BFLOAT)
        return rows._row_to_scale(Unscaled(Normed(row, row, torch.ones(parts, 1)), row.clone()), of)[1] is not None

    assert scales(2048, 128) and scales(1536, 96)
    assert not scales(4096, 128) and not scales(2048, 129) and not scales(2048, 128, torch.zeros(6, 128, 256))


@pytest.mark.parametrize(("hidden", "inner", "top_k", "shared"), [(512, 384, 2, True), (48, 256, 5, False)])
def test_the_sum_of_down_in_4_bits(one_row: CudaEmulator, hidden: int, inner: int, top_k: int, shared: bool) -> None:
    """Of one row. The choice, and what is added, are there before the gated product is."""
    weight, gated = stack_in_4_bits(6, hidden, inner), guarded(torch.randn(top_k, inner).to(BFLOAT))
    routing, residual = (
        Routing(torch.randperm(6)[None, :top_k].contiguous(), torch.rand(1, top_k)),
        torch.randn(1, hidden).to(BFLOAT),
    )
    beside = torch.randn(1, hidden).to(BFLOAT) if shared else None
    norm = Norm(torch.rand(hidden).to(torch.float32 if shared else BFLOAT), 0.1)
    expected = residual.double() + routing.weights.double() @ of_places(gated, weight, routing.experts)
    expected = expected if beside is None else expected + beside.double()
    assert rows.takes_down(residual, weight, routing.experts)
    for seed in range(2):
        one_row.seed, one_row.written_before = seed, [gated]
        found = rows.down_row(gated, weight, routing, residual, norm, beside)
        torch.testing.assert_close(
            found.values.double(), expected, rtol=2**-7, atol=2**-6 * float(expected.abs().max())
        )
        assert found.squares is not None
        torch.testing.assert_close(found.squares[:, 0], found.values.float().square().view(-1, 16).sum(1))
        assert torch.equal(found.weighted, (found.values.float() * norm.weight.float()).to(BFLOAT))


def test_which_products_of_one_row_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows, another type, other groups or scales, zero points, columns that fill no line, more tiles than run."""
    monkeypatch.setattr(rows, "runs_hopper", lambda device: True)
    monkeypatch.setattr(rows, "num_multiprocessors", lambda device: 64)
    gate_up, down = stack_in_4_bits(6, 512, 1024), stack_in_4_bits(6, 1024, 256)
    x, experts = torch.zeros(1, 1024).to(BFLOAT), torch.arange(4)[None]
    assert rows.takes_gate(x, gate_up, experts) and rows.takes_down(x, down, experts)
    assert not rows.takes_gate(x, gate_up, experts.view(2, 2)) and not rows.takes_down(x, down, experts.view(2, 2))
    assert not rows.takes_gate(x.float(), gate_up, experts) and not rows.takes_down(x.float(), down, experts)
    for takes, weight in ((rows.takes_gate, gate_up), (rows.takes_down, down)):
        zeros = replace(weight, packing=replace(weight.packing, zeros=weight.packing.scales + 128))
        of_32 = replace(weight, packing=replace(weight.packing, group=32, part=64))
        assert not takes(x, zeros, experts) and not takes(x, of_32, experts)
    for scale_rows, is_taken in ((128, True), (16, True), (8, False), (1, False)):
        weight = stack_of(Sizes(1, 4, 1024, 256, scale_rows), 512, 1024)
        assert rows.takes_gate(x, weight, experts) is is_taken and not rows.takes_down(x, weight, experts)
    assert not rows.takes_gate(x, torch.zeros(6, 512, 1024), experts)
    assert rows.takes_gate(x, torch.zeros(6, 512, 1024, dtype=BFLOAT), experts)
    assert not rows.takes_gate(x, torch.zeros(6, 512, 1056, dtype=BFLOAT), experts)
    assert [rows.GateSizes(4096, 2048, 4, 4096, warps).parts for warps in (16, 31)] == [2, 1]  # as there is room
    assert [rows.GateSizes(hidden, 768, 4, 768, 6).parts for hidden in (2048, 4096, 5120)] == [1, 2, 4]
    assert not rows.GateSizes(7168, 2048, 8, 2304, 18, 128).fits  # sums of too many blocks
    monkeypatch.setattr(rows, "num_multiprocessors", lambda device: 6)
    assert not rows.takes_gate(x, torch.zeros(6, 512, 1024, dtype=BFLOAT), experts)


def test_the_kernel_of_the_sum_has_room_beside_the_first_product() -> None:
    """In few bits, in the sizes of Qwen3-30B-A3B and Qwen3-Next. So its W is on its way while that one ends.

    A second program of the first product has no room, nor a third one of the sum.
    """
    one, own = 227 << 10, 2 << 10  # of a multiprocessor; of two programs at least
    for inner, top_k, tiles in ((768, 8, 768), (512, 11, 704)):
        gate = rows.GateSizes(2048, inner, 8, tiles, 6, 128)
        down = products._sum_shape(stack_of(Sizes(1, top_k, 2048, inner), 2048, inner), 1, top_k)
        assert gate.fits and gate.num_bytes + down.num_bytes <= one - own < 2 * gate.num_bytes
        assert 3 * down.num_bytes > one
        assert 32 * (gate.warps * gate.parts * 64 + down.warps * 72) <= 1 << 16  # registers
    gate = rows.GateSizes(2048, 768, 4, 768, 6)
    down_bytes = rows._down_bytes(768, 8)
    assert gate.fits and gate.num_bytes + down_bytes <= one - own < 2 * gate.num_bytes
    assert 3 * down_bytes > one


@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_one_row_compiles(bits: int) -> None:
    """For a real GPU, in the sizes of Qwen3-30B-A3B."""
    place, of_scale = torch.device("meta"), 128 if bits == 8 else 1
    sizes = rows.GateSizes(2048, 768, bits, 768, 6, of_scale)
    assert sizes.fits and sizes.num_bytes <= rows._GATE_BYTES[bits]
    assert rows._gate_kernel(sizes, place)._code._compile()
    if bits == 4:
        assert rows._down_kernel(2048, 768, 8, False, False, place)._code._compile()
