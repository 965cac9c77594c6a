"""Linear maps in every form that they take, against a plain product."""

import pytest
import torch
import torch.nn.functional as F

from overlap_spec.models.layers import Linear, WideLinear, linear_map


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("width", [64, 1536, 2048, 1031])
@pytest.mark.parametrize("biased", [False, True])
def test_a_map_is_a_product(rows: int, width: int, biased: bool) -> None:
    random = torch.Generator().manual_seed(rows * width)
    weight = torch.randn(48, width, generator=random, dtype=torch.float64)
    bias = torch.randn(48, generator=random, dtype=torch.float64) if biased else None
    x = torch.randn(rows, width, generator=random, dtype=torch.float64)
    y = linear_map(weight, bias)(x)
    torch.testing.assert_close(y, F.linear(x, weight, bias), atol=1e-11, rtol=0)
    assert y.is_contiguous()


def test_wide_maps_are_cut_on_a_cpu_only_where_blas_gains() -> None:
    assert isinstance(linear_map(torch.zeros(8, 1536)), WideLinear)
    assert isinstance(linear_map(torch.zeros(8, 576)), Linear)
    assert isinstance(linear_map(torch.zeros(8, 1031)), Linear), "no even blocks"
    assert isinstance(linear_map(torch.zeros(8, 1536, dtype=torch.bfloat16)), Linear)


def test_a_map_leaves_its_input_alone() -> None:
    x = torch.randn(1, 2048)
    before = x.clone()
    linear_map(torch.randn(8, 2048))(x)
    assert torch.equal(x, before)
