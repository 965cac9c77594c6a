"""The kernel of a layer from its attention on, packed_chain.cu, in the emulator: the bits of packed_products.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from emulators.cuda import CudaEmulator
from overlap_spec_kernels import Norm, Normed, OrderedQuantizedWeight
from overlap_spec_kernels.launch import assuming
from overlap_spec_kernels.linear import ordered_quantized, packed_chain as chain, packed_products as products
from overlap_spec_kernels.linear.call import Addition, call_of
from overlap_spec_kernels.linear.packed_chain import Chain, Layer, Weight, chain_for
from overlap_spec_kernels.linear.packed_products import PackedProducts, products_in_one_order
from overlap_spec_kernels.linear.packing import Order, Packing
from test_packed_products import COMPILER, weight_of
from torch import Tensor

BFLOAT = torch.bfloat16
HIDDEN, INNER, HEADS = 256, 768, 512


@pytest.fixture
def emulator(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    """In place of a GPU of six multiprocessors."""
    for module in (chain, products):
        module._kernel.cache_clear()
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 6)
        monkeypatch.setattr(module, "_LARGE", 1 << 15)
        cuda_emulator.install(monkeypatch, module)
    cuda_emulator.multiprocessors = 6
    yield cuda_emulator
    for module in (chain, products):
        module._kernel.cache_clear()


def layer_of(seed: int) -> Layer:
    torch.manual_seed(seed)
    shapes = (HIDDEN, HEADS), (2 * INNER, HIDDEN), (HIDDEN, INNER)
    output, gate_up, down = (Weight(*weight_of("fp8, rows", *shape)[:2]) for shape in shapes)
    norm, after = (Norm((torch.rand(HIDDEN) + 0.5).to(BFLOAT), eps) for eps in (1e-5, 0.1))
    return Layer(output, norm, gate_up, down, after)


def product(weight: Weight, x: Tensor | Normed, gated: bool, splits: int, add: Addition | None = None) -> Normed:
    cut = PackedProducts(16, 1, 3, splits, by_warps=True, few=True)
    call = call_of(x, weight.data, gated, add, BFLOAT, cut.block_n)
    cut.run(call, cut.num_programs(weight.data, gated), weight.packing)
    assert call.out is not None
    return Normed(call.out, call.out if call.weighted is None else call.weighted, call.sums, add.norm.eps if add else 0)


def one_after_another(x: Tensor, residual: Tensor, layer: Layer, splits: int) -> Normed:
    middle = product(layer.output, x, False, splits, Addition(residual, layer.norm))
    gates = product(layer.gate_up, middle, True, 1).values
    return product(layer.down, gates, False, splits, Addition(middle.values, layer.next_norm))


def assert_equal(found: Normed, expected: Normed) -> None:
    assert found.squares is not None and expected.squares is not None
    for name in ("values", "weighted", "squares"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize(
    ("rows", "splits", "multiprocessors", "cut"),
    [  # with 5, a program has two items of gate and up; with 7, their last item has fewer tiles
        (5, 3, 5, Chain(8, 768, 128, stages=3, ahead=256, pieces=4)),
        (3, 2, 7, Chain(4, 768, 128, stages=2, pieces=3)),
        (8, 2, 5, Chain(8, 768, 128, warps=4, tiles=2, stages=12, pieces=4)),
        (1, 1, 7, Chain(1, 768, 256, stages=2, ahead=256)),
    ],
)
def test_a_layer_has_the_bits_of_its_linears(
    emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch, rows: int, splits: int, multiprocessors: int, cut: Chain
) -> None:
    """With rings that are filled many times, and counters that are left at zero."""
    emulator.multiprocessors = multiprocessors
    for module in (chain, products):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: multiprocessors)
        monkeypatch.setattr(module, "parts_in_one_order", lambda size_n, size_k, gated: 1 if gated else splits)
    layer = layer_of(rows)
    x = torch.randn(rows, HEADS).to(BFLOAT)
    # The sum is what 16 bits hide of the product.
    residual = -product(layer.output, x, False, splits, Addition(x.new_zeros(rows, HIDDEN), layer.norm)).values
    expected = one_after_another(x, residual, layer, splits)
    emulator.written_before = [x, residual]
    for seed in (1, 2, 3):
        emulator.seed = seed
        assert_equal(cut.run(x, residual, layer), expected)
        assert not chain._counters(x.device).any()


@pytest.mark.slow_but_every(1)
def test_the_op_is_its_linears(emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ordered_quantized, products):
        monkeypatch.setattr(module, "_LARGE", 1 << 15)
    monkeypatch.setattr(ordered_quantized, "runs_triton", lambda x: True)
    monkeypatch.setattr(chain, "runs_hopper", lambda device: True)
    layer = layer_of(7)
    weights = layer.output, layer.gate_up, layer.down
    output, gate_up, down = (OrderedQuantizedWeight(*weight, BFLOAT) for weight in weights)
    x, residual = torch.randn(1, HEADS).to(BFLOAT), torch.randn(1, HIDDEN).to(BFLOAT)
    found = output.add_mlp(x, residual, layer.norm, gate_up, down, layer.next_norm)
    middle = output.add(x, residual, layer.norm)
    assert found is not None
    assert_equal(found, down.add(gate_up.gated(middle), middle.values, layer.next_norm))


def meta(size_n: int, size_k: int, **other: object) -> Weight:
    packing = Packing(torch.empty(1, size_n, device="meta"), None, 8, 128, 0, 1, Order.FRAGMENTS)
    return Weight(torch.empty(size_n, size_k, dtype=torch.uint8, device="meta"), replace(packing, **other))


def test_which_layers_it_takes() -> None:
    norm = Norm(torch.empty(4096, dtype=BFLOAT, device="meta"), 1e-5)
    layer = Layer(meta(4096, 4096), norm, meta(28672, 4096), meta(4096, 14336), norm)
    x = torch.empty(1, 4096, dtype=BFLOAT, device="meta")
    with assuming((9, 0)):
        assert chain_for(x, layer) == Chain(1, 4096).with_stages()
        for rows, pieces in ((2, 1), (3, 4), (8, 4)):
            cut = chain_for(torch.empty(rows, 4096, dtype=BFLOAT, device="meta"), layer)
            assert cut == Chain(max(rows, 4) if rows > 2 else rows, 4096, pieces=pieces).with_stages()
        assert chain_for(torch.empty(9, 4096, dtype=BFLOAT, device="meta"), layer) is None
        assert chain_for(x.float(), layer) is None
        for changed in (
            {"output": meta(4096, 4096, order=Order.ROWS)},
            {"down": meta(4096, 14336, group=128)},
            {"norm": norm._replace(weight=norm.weight.float())},
            {"gate_up": meta(512, 4096), "down": meta(4096, 256)},  # which multiplies scaled rows
        ):
            assert chain_for(x, layer._replace(**changed)) is None, changed
        small = Layer(meta(4096, 4352), norm, meta(28672, 4096), meta(4096, 14336), norm)
        assert chain_for(x, small) == Chain(1, 4096, 128).with_stages(), (
            "stages of 256 columns would divide K elsewhere"
        )
    with assuming((10, 0)):
        assert chain_for(x, layer) is None


def test_parts_are_those_of_packed_products() -> None:
    for size_n, size_k, parts in ((4096, 4096, 4), (4096, 14336, 4), (6144, 4096, 1)):
        weight, x = meta(size_n, size_k), torch.empty(1, size_k, dtype=BFLOAT, device="meta")
        cut = products_in_one_order(x, weight.data, False, weight.packing)
        assert cut is not None and cut.splits == chain._splits(weight) == parts


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("cut", [Chain(8, 4096, 256, pieces=4), Chain(1, 4096), Chain(8, 4096, 128)])
def test_it_compiles(cut: Chain) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason=COMPILER)
    whole = cut.with_stages()
    assert whole.stages > 3 and chain.CudaCode(chain.SOURCE, whole.defines()).compiled().startswith(b"\x7fELF")
