"""The kernel of one order for weights of few bits, under the interpreter: the bits of the dequantised matrix."""

import pytest
import torch
from overlap_spec_kernels.linear.ordered import multiply_in_order
from overlap_spec_kernels.linear.ordered_quantized import (
    OrderedQuantizedWeight,
    add_in_parts,
    add_in_parts_reference,
    multiply_few_bits,
    scales_of_rows,
    scales_of_rows_reference,
    scales_rows,
)
from overlap_spec_kernels.linear.packing import dequantised
from overlap_spec_kernels.norm.normed import Norm, Normed
from support.dots_in_order import dots_in_order
from support.quantized_cases import Case, weight_of

CASES = {
    "fp8, rows": Case(1, 48, 192, 8),
    "fp8, blocks": Case(1, 160, 384, 8, 128, 128),
    "int4, groups of 32, zero points": Case(1, 32, 576, 4, 32, has_zeros=True, scales=torch.float16),
    "int4": Case(1, 32, 128, 4, 128),
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_bits_of_the_matrix(name: str, gated: bool) -> None:
    """For any number of rows, those that a matrix multiplies included. float32 rounds nothing to 16 bits here."""
    weight = OrderedQuantizedWeight.of(weight_of(CASES[name]))
    of_rows = weight.packing.scales[0] if scales_rows(weight.packing) else None
    matrix = dequantised(weight.data, weight.packing, torch.float32, scaled=of_rows is None)
    rows = torch.randn(70, weight.shape[1])
    with dots_in_order():
        expected = multiply_in_order(rows, matrix, gated, torch.float32, scales=of_rows)
        for count in (1, 17, 64):
            found = multiply_few_bits(rows[:count], weight.data, weight.packing, gated, torch.float32)
            assert torch.equal(found, expected[:count]), count


@pytest.mark.slow_but_every(1)
@pytest.mark.full_but_every(1)
@pytest.mark.parametrize("size", [64, 448])
def test_a_sum_and_its_scales_are_their_references_to_the_bit(size: int) -> None:
    y, residual = torch.randn(130, size), torch.randn(130, size + 8)[:, :-8]  # the interpreter rounds 16 bits down
    norm = Norm(torch.rand(size), 1e-5)
    found, expected = (run(y, residual, norm) for run in (add_in_parts, add_in_parts_reference))
    assert torch.equal(found.values, expected.values) and torch.equal(found.weighted, expected.weighted)
    assert found.squares is not None and expected.squares is not None and torch.equal(found.squares, expected.squares)
    squares = torch.rand(size // 8, 130)
    normed = Normed(residual, found.weighted, squares, 1e-5)
    torch.testing.assert_close(scales_of_rows(normed), scales_of_rows_reference(normed), rtol=2e-7, atol=0)
    torch.testing.assert_close(
        scales_of_rows_reference(normed), torch.rsqrt(squares.sum(0) / size + 1e-5), rtol=1e-6, atol=0
    )
