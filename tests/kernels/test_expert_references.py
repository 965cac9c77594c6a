"""The references of mixtures of experts, against their definitions written out in float64, and what they refuse."""

import pytest
import torch
from overlap_spec_kernels import Biases, Clamp, Routing, experts_mlp, route
from torch import Tensor

F64 = torch.float64
ROWS, EXPERTS, TOP_K, SIZE, INNER = 9, 6, 3, 20, 8


def weights() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, router, gate and up, down."""
    random = torch.Generator().manual_seed(3)
    shapes = (ROWS, SIZE), (EXPERTS, SIZE), (EXPERTS, 2 * INNER, SIZE), (EXPERTS, SIZE, INNER)
    x, router, gate_up, down = (torch.randn(shape, generator=random, dtype=F64) for shape in shapes)
    return x, router, gate_up, down


@pytest.mark.parametrize("normalised", [False, True])
def test_a_mixture_written_out(normalised: bool) -> None:
    x, router, gate_up, down = weights()
    routing = route(x, router, TOP_K, normalised)
    found = experts_mlp(x, gate_up, down, routing)
    for row, values in enumerate(x):
        probabilities = (router @ values).exp() / (router @ values).exp().sum()
        best = sorted(range(EXPERTS), key=lambda expert: -float(probabilities[expert]))[:TOP_K]
        total = sum(probabilities[expert] for expert in best) if normalised else 1.0
        expected = torch.zeros(SIZE, dtype=F64)
        for expert in best:
            gate, up = gate_up[expert, :INNER] @ values, gate_up[expert, INNER:] @ values
            expected += probabilities[expert] / total * (down[expert] @ (gate * torch.sigmoid(gate) * up))
        assert routing.experts[row].tolist() == best
        torch.testing.assert_close(found[row], expected)


def test_biases_and_a_clamped_product_written_out() -> None:
    x, router, gate_up, down = weights()
    random, limit = torch.Generator().manual_seed(4), 1.5
    shapes = (EXPERTS,), (EXPERTS, 2 * INNER), (EXPERTS, SIZE)
    of_router, of_gate_up, of_down = (torch.randn(shape, generator=random, dtype=F64) for shape in shapes)
    routing = route(x, router, TOP_K, True, of_router)
    found = experts_mlp(x, gate_up, down, routing, Biases(of_gate_up, of_down), Clamp(1.7, limit))
    low, high = torch.zeros(2), torch.zeros(2)  # gate, up
    for row, values in enumerate(x):
        best = (router @ values + of_router).topk(TOP_K)
        expected = torch.zeros(SIZE, dtype=F64)
        for expert, weight in zip(best.indices.tolist(), best.values.softmax(0), strict=True):
            both = gate_up[expert] @ values + of_gate_up[expert]
            low, high = torch.minimum(low, both.view(2, -1).amin(1)), torch.maximum(high, both.view(2, -1).amax(1))
            gate, up = both[:INNER].clamp(max=limit), both[INNER:].clamp(-limit, limit)
            expected += weight * (down[expert] @ (gate * torch.sigmoid(1.7 * gate) * (up + 1)) + of_down[expert])
        assert routing.experts[row].tolist() == best.indices.tolist()
        torch.testing.assert_close(found[row], expected)
    assert (low < -limit).all() and (high > limit).all(), "every bound is reached"


def test_arguments_that_do_not_fit() -> None:
    x, router, gate_up, down = weights()
    routing = route(x, router, TOP_K, True)
    for message, arguments in {
        "weight: expected": (x, router[:, :-1].contiguous(), 2),
        "weight: expected the dtype": (x, router.float(), 2),
        "top_k: expected": (x, router, EXPERTS + 1),
        "x: expected": (x[0], router, 2),
    }.items():
        with pytest.raises(ValueError, match=message):
            route(*arguments, False)  # type: ignore[arg-type]  # all cases together
    with pytest.raises(ValueError, match="bias: expected"):
        route(x, router, 2, False, router[0])
    short = Routing(routing.experts[:-1].contiguous(), routing.weights[:-1].contiguous())
    for message, given in {
        "gate_up: expected": (x, gate_up[:, 1:].contiguous(), down, routing),
        "down: expected": (x, gate_up, down[1:], routing),
        "x: expected": (x, gate_up, down.float(), routing),
        "routing: expected": (x, gate_up, down, short),
    }.items():
        with pytest.raises(ValueError, match=message):
            experts_mlp(*given)
    of_gate_up, of_down = gate_up[..., 0].contiguous(), down[..., 0].contiguous()
    for wrong in (
        Biases(of_gate_up[:, 1:], of_down),
        Biases(of_gate_up, of_down[1:]),
        Biases(of_gate_up, down[..., 0]),
    ):
        with pytest.raises(ValueError, match="biases: expected"):
            experts_mlp(x, gate_up, down, routing, wrong)
