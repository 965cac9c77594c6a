"""Linear maps in every form that they take, against a plain product."""

import pytest
import torch
import torch.nn.functional as F

from overlap_spec.models.layers.linear import Linear, PackedLinear, linear_map
from overlap_spec.models.targets.llama import count_bytes


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 33])
@pytest.mark.parametrize("width", [64, 1536, 1031])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-3)])
def test_a_map_is_a_product(rows: int, width: int, biased: bool, dtype: torch.dtype, tolerance: float) -> None:
    random = torch.Generator().manual_seed(rows * width)
    weight = torch.randn(48, width, generator=random, dtype=dtype)
    bias = torch.randn(48, generator=random, dtype=dtype) if biased else None
    x = torch.randn(rows, width, generator=random, dtype=dtype)
    y = linear_map(weight, bias)(x)
    torch.testing.assert_close(y, F.linear(x, weight, bias), atol=tolerance, rtol=0)
    assert y.is_contiguous()


def test_weights_are_packed_in_float32_on_a_cpu_only() -> None:
    packed = linear_map(torch.zeros(8, 1536))
    assert isinstance(packed, PackedLinear)
    assert count_bytes((packed, packed)) == 8 * 1536 * 4, "shared memory counts once"
    assert isinstance(linear_map(torch.zeros(8, 1536, dtype=torch.float64)), Linear)
    assert isinstance(linear_map(torch.zeros(8, 1536, dtype=torch.bfloat16)), Linear)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_map_leaves_its_input_alone(rows: int) -> None:
    x = torch.randn(rows, 2048)
    before = x.clone()
    linear_map(torch.randn(8, 2048))(x)
    assert torch.equal(x, before)


def test_a_row_does_not_depend_on_its_company() -> None:
    x = torch.randn(7, 576)
    for form in (linear_map(torch.randn(96, 576)), Linear(torch.randn(96, 576))):
        together = form(x)
        for row in range(7):
            torch.testing.assert_close(form(x[row : row + 1])[0], together[row], atol=1e-4, rtol=0)
