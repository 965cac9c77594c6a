"""The kernels of mixtures of experts under the interpreter: the router's choice, and the experts' weighted sum."""

import pytest
import torch
from overlap_spec_kernels.experts.experts_mlp import (
    Biases,
    Clamp,
    _experts_mlp_triton,
    _group_kernel,
    experts_mlp_reference,
)
from overlap_spec_kernels.experts.route import _route_triton, route_reference
from overlap_spec_kernels.experts.sum_of_experts import Routing, expert_rows
from torch import Tensor

# (rows, experts, experts of a row, H, I): sizes that fill no tile, one row, more rows of an expert than a tile has
SIZES = [(5, 6, 2, 40, 24), (1, 8, 8, 32, 16), (70, 5, 3, 33, 20), (19, 16, 4, 160, 136)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * shape[-1] ** -0.5).to(dtype)


def routing_of(num_rows: int, num_experts: int, top_k: int) -> Routing:
    """Experts of each row, the first of them chosen by all, the last by none."""
    random = torch.Generator().manual_seed(num_rows)
    others = torch.stack([torch.randperm(max(num_experts - 2, 1), generator=random) + 1 for _ in range(num_rows)])
    experts = torch.cat((torch.zeros(num_rows, 1, dtype=torch.int64), others), dim=1)[:, :top_k]
    if top_k == num_experts:
        experts = torch.stack([torch.randperm(num_experts, generator=random) for _ in range(num_rows)])
    return Routing(experts.contiguous(), torch.rand(experts.shape, generator=random).sort(descending=True).values)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_sum(sizes: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    num_rows, num_experts, top_k, size, inner = sizes
    x = 4 * drawn(num_rows, size, dtype=dtype)
    gate_up, down = drawn(num_experts, 2 * inner, size, dtype=dtype), drawn(num_experts, size, inner, dtype=dtype)
    routing = routing_of(num_rows, num_experts, top_k)
    found = _experts_mlp_triton(x, gate_up, down, routing)
    expected = experts_mlp_reference(x, gate_up, down, routing)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("clamp", [None, Clamp(1.702, 0.6)])
def test_the_sum_with_biases(clamp: Clamp | None) -> None:
    num_rows, num_experts, top_k, size, inner = SIZES[2]
    x = 4 * drawn(num_rows, size, dtype=torch.float32)
    gate_up, down = (drawn(num_experts, *shape, dtype=torch.float32) for shape in ((2 * inner, size), (size, inner)))
    biases = Biases(
        3 * drawn(num_experts, 2 * inner, dtype=torch.float32), drawn(num_experts, size, dtype=torch.float32)
    )
    routing = routing_of(num_rows, num_experts, top_k)
    found, expected = (
        run(x, gate_up, down, routing, biases, clamp) for run in (_experts_mlp_triton, experts_mlp_reference)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_groups_of_more_places_than_a_program_looks_at_together() -> None:
    routing = routing_of(700, 5, 2)
    counts, places = torch.zeros(5, dtype=torch.int32), torch.zeros((5, 700), dtype=torch.int32)
    _group_kernel[(5,)](routing.experts, counts, places, 700, 1400, BLOCK=512)
    expected = dict(expert_rows(routing.experts, 5))
    assert counts.tolist() == [len(expected.get(expert, ())) for expert in range(5)] and counts[4] == 0
    for expert, rows in expected.items():
        assert torch.equal(places[expert, : len(rows)].long(), rows)


def test_many_rows_of_an_expert_are_in_large_tiles() -> None:
    sizes, routing = (130, 3, 2, 32, 16), routing_of(130, 3, 2)
    num_rows, num_experts, _, size, inner = sizes
    x, half = 4 * drawn(num_rows, size, dtype=torch.float16), torch.float16
    gate_up, down = drawn(num_experts, 2 * inner, size, dtype=half), drawn(num_experts, size, inner, dtype=half)
    found = _experts_mlp_triton(x, gate_up, down, routing)
    torch.testing.assert_close(found, experts_mlp_reference(x, gate_up, down, routing), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("num_rows", "num_experts", "top_k", "size"), [(1, 8, 2, 32), (19, 20, 5, 40), (3, 4, 4, 160)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_choice(num_rows: int, num_experts: int, top_k: int, size: int, normalised: bool, biased: bool) -> None:
    x, weight = 20 * drawn(num_rows, size, dtype=torch.float32), drawn(num_experts, size, dtype=torch.float32)
    bias = 3 * drawn(num_experts, dtype=torch.float32) if biased else None
    found, expected = (run(x, weight, top_k, normalised, bias) for run in (_route_triton, route_reference))
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-6)


def test_of_equal_experts_the_lower_ones_are_chosen_and_of_nan_the_first() -> None:
    weight = drawn(3, 32, dtype=torch.float32).repeat(5, 1)
    x = 20 * drawn(7, 32, dtype=torch.float32)
    x[3] = torch.nan
    found, expected = _route_triton(x, weight, 6, True), route_reference(x, weight, 6, True)
    assert torch.equal(found.experts, expected.experts) and found.experts[3].tolist() == list(range(6))
    torch.testing.assert_close(found.weights, expected.weights, equal_nan=True)
