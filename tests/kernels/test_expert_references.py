"""The references of mixtures of experts, against their definitions written out in float64, and what they refuse."""

import pytest
import torch
from overlap_spec_kernels import Routing, experts_mlp, route
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
    short = Routing(routing.experts[:-1].contiguous(), routing.weights[:-1].contiguous())
    for message, given in {
        "gate_up: expected": (x, gate_up[:, 1:].contiguous(), down, routing),
        "down: expected": (x, gate_up, down[1:], routing),
        "x: expected": (x, gate_up, down.float(), routing),
        "routing: expected": (x, gate_up, down, short),
    }.items():
        with pytest.raises(ValueError, match=message):
            experts_mlp(*given)
