"""What trains chains, under the interpreter: results and gradients of the references, which are autograd's."""

import pytest
import torch
from overlap_spec_kernels.attention import trained_chains
from overlap_spec_kernels.attention.trained_chains import (
    attend_own_keys,
    attend_own_keys_back,
    attend_own_keys_back_reference,
    attend_own_keys_reference,
    split_rotated,
    split_rotated_back,
    split_rotated_back_reference,
    split_rotated_reference,
)

COUNT, HEADS, KV_HEADS = 2, 6, 2


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_chains, "runs_triton", lambda tensor: True)


@pytest.mark.parametrize(("size", "kv_heads"), [(8, KV_HEADS), (12, KV_HEADS), (8, 0)])
def test_split_rotated(size: int, kv_heads: int) -> None:
    torch.manual_seed(size)
    qkv, cos_sin = torch.randn(COUNT, 5, (HEADS + 2 * kv_heads) * size), torch.randn(5, size)
    leaf = qkv.clone().requires_grad_()
    expected = split_rotated_reference(leaf, cos_sin, HEADS, kv_heads)
    grads = [torch.randn_like(each) for each in expected]
    torch.autograd.backward(expected, grads)
    torch.testing.assert_close(split_rotated(qkv, cos_sin, HEADS, kv_heads), tuple(each.detach() for each in expected))
    for back in (split_rotated_back, split_rotated_back_reference):
        torch.testing.assert_close(back(*grads, cos_sin), leaf.grad)


@pytest.mark.parametrize(("step", "length", "size"), [(1, 2, 8), (1, 6, 12), (3, 5, 8), (6, 9, 16)])
def test_attend_own_keys(step: int, length: int, size: int) -> None:
    """The logarithms are gradients' too: what reads the keys before the chain has its own."""
    torch.manual_seed(step)
    q = torch.randn(COUNT, length, HEADS, size)
    keys, values = (torch.randn(step, COUNT, length, KV_HEADS, size) for _ in range(2))
    found, logs = torch.randn(COUNT, length - step, HEADS, size), torch.randn(COUNT, HEADS, length - step)
    leaves = [each.clone().requires_grad_() for each in (q, keys, values)]
    whole, sums = attend_own_keys_reference(*leaves, found, logs)
    grad = torch.randn_like(whole)
    whole.backward(grad)
    given = q, keys, values
    torch.testing.assert_close(attend_own_keys(*given, found, logs), (whole.detach(), sums.detach()))
    added = torch.randn_like(found)
    assert leaves[0].grad is not None
    leaves[0].grad[:, step:] += added
    for back in (attend_own_keys_back, attend_own_keys_back_reference):
        result = back(grad, *given, whole.detach(), sums.detach(), added)
        torch.testing.assert_close(result, tuple(each.grad for each in leaves), rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_named() -> None:
    q, keys = torch.zeros(2, 4, 6, 8), torch.zeros(3, 2, 4, 2, 8)
    for name, given in {
        "q: ": (q.transpose(1, 2), keys, keys),
        "keys: ": (q, keys[:, :, :3], keys),
        "values: ": (q, keys, keys[:2]),
        "keys: expected 1 to 3": (q, keys.new_zeros(4, 2, 4, 2, 8), keys.new_zeros(4, 2, 4, 2, 8)),
    }.items():
        with pytest.raises(ValueError, match=name):
            attend_own_keys(*given, q, q)
