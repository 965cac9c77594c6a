"""The router of benchmarks under the interpreter: the drawn experts, in the order of their logits."""

import pytest
import torch
from mixture_routers import Routers
from overlap_spec_kernels.experts.route import Common


@pytest.mark.parametrize(("num_rows", "num_experts", "top_k"), [(7, 20, 3), (2, 16, 4)])
def test_the_choice(num_rows: int, num_experts: int, top_k: int) -> None:
    """Rows beyond those of the table have the experts of later steps."""
    torch.manual_seed(num_rows)
    choice = Routers(2, num_experts, top_k, 3, torch.device("cpu")).choices[0]
    choice.step.fill_(63)
    x, weight = torch.randn(num_rows, 40), torch.randn(num_experts, 40)
    common = Common(num_experts, torch.randn(1, 40))
    found, last = choice._choose_triton(x, weight, common), choice.last.clone()
    choice.last.zero_()
    expected = choice._choose(x, weight, common)
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights, expected.weights)
    assert torch.equal(last, choice.last)
