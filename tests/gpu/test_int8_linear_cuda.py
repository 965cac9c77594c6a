"""The kernel of int8 weights on a GPU against float64 products of the same values, and as a dependent launch."""

import pytest
import torch
from overlap_spec_kernels import Int8Weight, fused_linear, linear_logits
from torch import Tensor

ERROR = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}  # of a norm over a norm


def weight_of(size_n: int, size_k: int, dtype: torch.dtype) -> Int8Weight:
    values = torch.randint(-127, 128, (size_n, size_k), dtype=torch.int8, device="cuda")
    return Int8Weight(values, torch.rand(size_n, device="cuda") / (64 * size_k**0.5), dtype)


def assert_near(actual: Tensor, x: Tensor, weight: Int8Weight, error: float) -> None:
    expected = x.double() @ (weight.values.double() * weight.scales.double()[:, None]).t()
    assert actual.shape == expected.shape
    assert float((actual.double() - expected).norm() / expected.norm()) < error


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("rows", [1, 4, 16, 17, 64, 65, 700])
@pytest.mark.parametrize(("size_n", "size_k"), [(960, 576), (576, 1536), (130, 100), (4096, 4096)])
def test_products(rows: int, size_n: int, size_k: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, size_k, device="cuda").to(dtype), weight_of(size_n, size_k, dtype)
    assert_near(fused_linear(x, weight), x, weight, ERROR[dtype])
    assert_near(linear_logits(x, weight), x, weight, ERROR[torch.float32])


@pytest.mark.parametrize("dtype", ERROR)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, weight = torch.randn(8, 576, device="cuda").to(dtype), weight_of(960, 576, dtype)
    together = fused_linear(x, weight)
    for row in range(8):
        mixed = torch.randn(8, 576, device="cuda").to(dtype)
        mixed[row] = x[row]
        assert torch.equal(fused_linear(mixed, weight)[row], together[row])


def test_back_to_back_in_a_graph_it_follows_its_inputs() -> None:
    """Forty linears: each may begin before the one before it has ended, and must not read too early."""
    dtype = torch.bfloat16
    x, weights = torch.randn(4, 576, device="cuda").to(dtype), [weight_of(576, 576, dtype) for _ in range(40)]

    def forward() -> Tensor:
        y = x
        for weight in weights:
            y = fused_linear(y, weight)
        return y

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = forward()
    for _ in range(10):
        x.normal_()
        graph.replay()
        y = x
        for weight in weights:
            y = fused_linear(y, weight)
            torch.cuda.synchronize()
        assert torch.equal(result, y)
