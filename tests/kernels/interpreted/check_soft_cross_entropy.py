"""Losses of guesses under the interpreter: values and gradients of the references, which are autograd's."""

import pytest
import torch
import torch.nn.functional as F
from overlap_spec_kernels.logits.soft_cross_entropy import (
    _soft_cross_entropy_triton,
    _token_losses_triton,
    soft_cross_entropy_reference,
    token_losses_reference,
)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "size", "share"), [(3, 300, 0.9), (2, 9001, 0.4), (2, 4096, 0.0)])
def test_token_losses(rows: int, size: int, share: float, dtype: torch.dtype) -> None:
    """With a share of 0 there is no target. A place where both distributions are alike pulls nowhere."""
    torch.manual_seed(size)
    logits, target = (torch.randn(rows, size) * 4).to(dtype), (torch.randn(rows, size) * 4).to(dtype)
    target[0] = logits[0]
    tokens, weights = torch.randint(size, (rows,)), torch.rand(2 * rows)[::2]
    weights[1] *= 0.0
    leaf = logits.float().requires_grad_()
    distances = (leaf.softmax(1) - target.float().softmax(1)).abs().sum(1)
    errors = F.cross_entropy(leaf, tokens, reduction="none")
    (((1 - share) * errors + share * distances) * weights).sum().backward()
    assert leaf.grad is not None
    for run in (_token_losses_triton, token_losses_reference):
        given = logits.clone()
        found = run(given, tokens, weights, target if share else None, share)
        torch.testing.assert_close(found[0], errors.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1], distances.detach() * bool(share), rtol=1e-5, atol=1e-5)
        atol = 1e-7 if dtype == torch.float32 else 8e-3 * float(leaf.grad.abs().max())
        torch.testing.assert_close(given.float(), leaf.grad, rtol=1e-4, atol=atol)
