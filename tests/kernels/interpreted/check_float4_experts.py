"""Experts of 4-bit floats under the interpreter: their weighted sum, and rows that are on their own."""

import pytest
import torch
from overlap_spec_kernels import Biases, Clamp, Float4Matrices, Routing
from overlap_spec_kernels.experts.experts_mlp import _experts_mlp_triton, experts_mlp_reference
from support.dots_in_order import dots_in_order
from support.float4_weights import FORMATS, random_float4
from torch import Tensor

FLOAT, HALF = torch.float32, torch.float16
EXPERTS, TOP_K, SIZE, INNER = 4, 2, 160, 96
Weights = tuple[Float4Matrices, Float4Matrices, Biases]


def weights_of(group: int, dtype: torch.dtype) -> Weights:
    """Gate and up, down, and biases."""

    def stack(rows: int, columns: int, parts: int) -> Float4Matrices:
        every = (random_float4(rows, columns, group, seed=seed) for seed in range(EXPERTS))
        return Float4Matrices.stacked([Float4Matrices.packed(*each, parts, dtype) for each in every])

    random = torch.Generator().manual_seed(7)
    biases = (torch.randn(EXPERTS, size, generator=random).to(dtype) for size in (2 * INNER, SIZE))
    return stack(2 * INNER, SIZE, 2), stack(SIZE, INNER, 1), Biases(*biases)


def routing_of(num_rows: int) -> Routing:
    """The last expert is chosen by none, the first by most."""
    random = torch.Generator().manual_seed(num_rows)
    experts = torch.stack([torch.randperm(EXPERTS - 1, generator=random)[:TOP_K] for _ in range(num_rows)])
    experts[::2, 0], experts[::2, 1] = 0, 2
    return Routing(experts, torch.rand(experts.shape, generator=random).sort(descending=True).values)


def rows_of(num_rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, SIZE, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.full_but_every(6)
@pytest.mark.slow_but_every(11)
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("clamp", [None, Clamp(1.702, 0.6)])
@pytest.mark.parametrize("group", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 5, 33, 100])
def test_the_sum(num_rows: int, group: int, clamp: Clamp | None, dtype: torch.dtype) -> None:
    """Of few rows, of tiles of listed places, and of large ones."""
    gate_up, down, biases = weights_of(group, dtype)
    given = rows_of(num_rows, dtype), gate_up, down, routing_of(num_rows), biases, clamp
    found, expected = _experts_mlp_triton(*given), experts_mlp_reference(*given)
    bound = 1e-5 if dtype == FLOAT else 5e-3
    assert float((found - expected).double().norm() / expected.double().norm()) < bound


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("group", FORMATS)
def test_a_row_does_not_depend_on_its_neighbours(group: int) -> None:
    gate_up, down, biases = weights_of(group, FLOAT)
    x, routing = rows_of(256, FLOAT), routing_of(256)
    with dots_in_order():
        whole = _experts_mlp_triton(x, gate_up, down, routing, biases)
        for num_rows in (1, 2, 16, 17, 60):
            order = torch.randperm(256, generator=torch.Generator().manual_seed(num_rows))[:num_rows]
            some = Routing(*(each[order] for each in routing))
            assert torch.equal(_experts_mlp_triton(x[order], gate_up, down, some, biases), whole[order]), num_rows
