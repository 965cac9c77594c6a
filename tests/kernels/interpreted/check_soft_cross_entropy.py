"""`soft_cross_entropy` under the interpreter: losses and gradients of the reference, which are autograd's."""

import pytest
import torch
import torch.nn.functional as F
from overlap_spec_kernels.logits.soft_cross_entropy import _soft_cross_entropy_triton, soft_cross_entropy_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "size"), [(3, 300), (2, 4096), (2, 17001)])
def test_soft_cross_entropy(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    logits, probs = (torch.randn(rows, size) * 6).to(dtype), (torch.randn(rows, size) * 3).softmax(1)
    weights = torch.rand(2 * rows)[::2]
    weights[1] = 0.0
    leaf = logits.float().requires_grad_()
    expected = F.cross_entropy(leaf, probs, reduction="none") * weights
    expected.sum().backward()
    assert leaf.grad is not None
    for run in (_soft_cross_entropy_triton, soft_cross_entropy_reference):
        given = logits.clone()
        torch.testing.assert_close(run(given, probs, weights), expected.detach(), rtol=1e-5, atol=1e-5)
        # Softmax minus a probability: rounding is that of the larger of both, and the interpreter's cuts off.
        atol = 1e-7 if dtype == torch.float32 else 8e-3 * float(leaf.grad.abs().max())
        torch.testing.assert_close(given.float(), leaf.grad, rtol=1e-5, atol=atol)
