"""Linears of 4-bit floats under the interpreter: products, every value and scale, rows that are on their own."""

import pytest
import torch
from overlap_spec_kernels import Float4Matrices
from overlap_spec_kernels.linear.float4 import float4_linear
from support.dots_in_order import dots_in_order
from support.float4_weights import FORMATS, float4_matrix, meaning_of, random_float4
from torch import Tensor

FLOAT, HALF = torch.float32, torch.float16
CLOSE = {FLOAT: 1e-6, HALF: 1e-3}


def error_of(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("group", FORMATS)
@pytest.mark.parametrize(("num_rows", "shape"), [(1, (96, 96)), (3, (70, 320)), (17, (33, 64)), (40, (130, 288))])
def test_products(num_rows: int, shape: tuple[int, int], group: int, dtype: torch.dtype) -> None:
    stored = random_float4(*shape, group)
    x = torch.randn(num_rows, shape[1]).to(dtype)
    expected = x.double() @ meaning_of(*stored).t()
    weight = Float4Matrices.packed(*stored, 1, dtype)
    assert error_of(float4_linear(x, weight, FLOAT), expected) < CLOSE[FLOAT]
    assert error_of(float4_linear(x, weight, dtype), expected) < CLOSE[dtype]


@pytest.mark.parametrize("group", FORMATS)
def test_every_value_with_every_scale_that_kernels_take(group: int) -> None:
    """Each by itself: a row of x is a column of the unit matrix."""
    scales = torch.arange(129 if group == 32 else 127, dtype=torch.uint8)
    values = torch.arange(16, dtype=torch.uint8).repeat(len(scales), 2 * group // 16)
    factors = None if group == 32 else torch.linspace(0.5, 2.0, len(scales))
    stored = values, scales[:, None].repeat(1, 2), factors
    found = float4_linear(torch.eye(2 * group), Float4Matrices.packed(*stored, 1, FLOAT), FLOAT)
    expected = meaning_of(*stored).float()
    assert torch.equal(found, expected.t()) if factors is None else error_of(found.t(), expected.double()) < 1e-7


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize("group", FORMATS)
@pytest.mark.parametrize("dtype", CLOSE)
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype, group: int) -> None:
    weight = float4_matrix(64, 160, group, dtype)
    x = torch.randn(256, 160).to(dtype)
    with dots_in_order():
        alone = torch.cat([float4_linear(row[None], weight, FLOAT) for row in x[:32]])
        for num_rows in (1, 2, 15, 16, 17, 33, 100, 256):
            order = torch.randperm(256, generator=torch.Generator().manual_seed(num_rows))[:num_rows]
            order[-1] = num_rows % 32
            found = float4_linear(x[order], weight, FLOAT)
            known = order < 32
            assert known.any() and torch.equal(found[known], alone[order[known]]), num_rows
