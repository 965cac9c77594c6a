"""Fragment order against its definition: what each lane of a warp takes from a tile, word by word."""

from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import fused_linear
from overlap_spec_kernels.linear import quantized
from overlap_spec_kernels.linear.fragments import fits_tiles, fragments_of, tiled, untiled, values_of
from overlap_spec_kernels.linear.packing import Order, dequantised, fits_fragments, in_fragments, in_rows
from support.quantized_cases import Case, weight_of
from torch import Tensor

SIZE_N, SIZE_K = 48, 192


def drawn(bits: int) -> Tensor:
    return torch.randint(0, 1 << bits, (SIZE_N, SIZE_K), dtype=torch.uint8)


def operands(data: Tensor, tile: tuple[int, int], lane: int, bits: int) -> Tensor:
    """As a kernel takes them. Shapes: -> [slice, a_i, low and high column]."""
    size = 16 * 64 * bits // 8
    tiles = data.flatten().view(SIZE_N // 16, SIZE_K // 64, size)[tile]
    found = torch.empty(4, 4, 2, dtype=torch.uint8)
    for s in range(4):
        if bits == 4:
            word = int.from_bytes(bytes(tiles[16 * lane + 4 * s :][:4].tolist()), "little")
            for i in range(4):
                pair = word >> 4 * i & 0x000F000F
                found[s, i] = torch.tensor([pair & 15, pair >> 16])
        else:
            for j in range(2):
                mine = tiles[512 * (s // 2) + 16 * lane + 8 * (s % 2) + 4 * j :][:4]
                word = int.from_bytes(bytes(mine.tolist()), "little")
                other = word << 4 & 0x80F080F0 | word >> 4 & 0x07000700
                found[s, 2 * j], found[s, 2 * j + 1] = of_bfloat16(word & 0x87F087F0), of_bfloat16(other)
    return found


def of_bfloat16(pair: int) -> Tensor:
    """The bits of two values in float8 e4m3, from those of bfloat16 that is 2^120 times too small."""
    return torch.tensor([half >> 8 & 0x80 | half >> 4 & 0x7F for half in (pair & 0xFFFF, pair >> 16)])


@pytest.mark.parametrize("bits", [4, 8])
def test_each_lane_finds_its_operands(bits: int) -> None:
    values = drawn(bits)
    data = fragments_of(values, bits)
    assert data.shape == (SIZE_N, SIZE_K * bits // 8) and data.is_contiguous()
    for tile in ((0, 0), (2, 1), (1, 2)):
        for lane in range(32):
            g, t = lane // 4, lane % 4
            for s, found in enumerate(operands(data, tile, lane, bits)):
                row, column = 16 * tile[0] + g, 64 * tile[1] + 16 * s + 2 * t
                places = [(row, column), (row + 8, column), (row, column + 8), (row + 8, column + 8)]
                assert [pair.tolist() for pair in found] == [values[n, k : k + 2].tolist() for n, k in places]


@pytest.mark.parametrize("bits", [4, 8])
def test_values_come_back(bits: int) -> None:
    values = drawn(bits)
    assert torch.equal(values_of(fragments_of(values, bits), bits), values)


def test_rows_g_and_g_plus_8_of_a_group_lie_side_by_side() -> None:
    scales = torch.rand(3, SIZE_N)
    stored = tiled(scales)
    assert stored.shape == (SIZE_N // 16, 3, 8, 2) and stored.is_contiguous()
    assert stored[1, 2, 5].tolist() == [scales[2, 16 + 5], scales[2, 16 + 13]]
    assert torch.equal(untiled(stored), scales)


def test_what_tiles_cover() -> None:
    assert fits_tiles(16, 64) and not fits_tiles(24, 64) and not fits_tiles(16, 96)


KINDS = {
    "fp8, rows": Case(1, 48, 192, 8),
    "fp8, groups": Case(1, 32, 256, 8, 128),
    "fp8, blocks": Case(1, 160, 256, 8, 128, 128),
    "int4": Case(1, 48, 256, 4, 128),
    "int4, groups of 64, zero points": Case(1, 32, 384, 4, 64, has_zeros=True),
    "int4, groups of 32, zero points": Case(1, 32, 192, 4, 32, has_zeros=True),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_weight_in_fragment_order_has_the_same_values(name: str) -> None:
    weight = weight_of(KINDS[name], torch.float64)
    assert fits_fragments(weight.shape, weight.packing)
    expected = dequantised(weight.data, weight.packing, torch.float64)
    data, packing = in_fragments(weight.data, weight.packing)
    assert torch.equal(dequantised(data, packing, torch.float64), expected)
    assert torch.equal(dequantised(*in_rows(data, packing), torch.float64), expected)
    assert data.shape == weight.data.shape and not torch.equal(data, weight.data)


def test_what_cannot_lie_in_fragment_order() -> None:
    weight = weight_of(KINDS["fp8, blocks"], torch.float64)
    assert not fits_fragments((168, 256), weight.packing) and not fits_fragments((160, 192), weight.packing)
    assert not fits_fragments(weight.shape, replace(weight.packing, scale_rows=8))


@pytest.mark.parametrize("name", KINDS)
def test_a_weight_in_fragment_order_computes_the_same(name: str) -> None:
    """By its reference; rows of it stay in fragment order where they fit it."""
    weight, x = weight_of(KINDS[name], torch.float64), torch.randn(3, KINDS[name].size_k, dtype=torch.float64)
    tiles = weight.in_fragments()
    assert tiles.shape == weight.shape
    assert torch.equal(fused_linear(x, tiles), fused_linear(x, weight))
    assert torch.equal(fused_linear(x, tiles, gated=True), fused_linear(x, weight, gated=True))
    for ids, order in ((slice(16, 32), Order.FRAGMENTS), (torch.tensor([3, 1, 30]), Order.ROWS)):
        some = tiles.rows(ids)
        assert some.packing.order is order
        # A BLAS may add in another order where there are fewer columns.
        torch.testing.assert_close(fused_linear(x, some), fused_linear(x, weight)[:, ids], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_order_of_a_loaded_weight(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fragment order on Hopper where the type and the shape allow it, else row order."""
    made = weight_of(KINDS[name])
    packing = made.packing
    zeros = None if packing.zeros is None else packing.zeros.to(device)
    there = replace(packing, scales=packing.scales.to(device), zeros=zeros)
    weight = replace(made, data=made.data.to(device), packing=there)
    monkeypatch.setattr(quantized, "runs_hopper", lambda device: True)
    found, expected = weight.in_order_of_device(), made.in_fragments()
    assert found.packing.order is Order.FRAGMENTS and found.num_bytes == expected.num_bytes
    assert found.packing.scales.shape == expected.packing.scales.shape
    assert replace(weight, dtype=torch.float32).in_order_of_device().packing.order is Order.ROWS
    assert weight.rows(slice(0, 8)).in_order_of_device().packing.order is Order.ROWS
    monkeypatch.setattr(quantized, "runs_hopper", lambda device: False)
    assert weight.in_order_of_device() is weight
