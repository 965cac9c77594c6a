"""The kernel of one order for weights of few bits, under the interpreter: the bits of the dequantised matrix."""

import pytest
import torch
from overlap_spec_kernels.linear.ordered import multiply_in_order
from overlap_spec_kernels.linear.ordered_quantized import OrderedQuantizedWeight, multiply_few_bits, scales_rows
from overlap_spec_kernels.linear.packing import dequantised
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
