"""Values and gradients of EAGLE-3's own operations: those of loops, and autograd's."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec.train_draft.dflash import measure_tokens
from overlap_spec.train_draft.eagle3 import (
    _ChainAttention,
    chain_attention,
    chain_attention_reference,
    measure_distributions,
)
from overlap_spec.train_draft.head import guess_loss


def drawn(step: int, rows: int, dtype: torch.dtype, device: str = "cpu", heads: int = 3, dim: int = 8) -> list[Tensor]:
    """Queries, keys of each step, values of each step, as leaves."""
    random = torch.Generator().manual_seed(step)
    shapes = [(2, rows, heads, dim)] + [(2, rows, 1, dim)] * (2 * step + 2)
    found = [torch.randn(*shape, generator=random, dtype=torch.float64) for shape in shapes]
    return [each.to(device, dtype).requires_grad_() for each in found]


def by_rows(q: Tensor, *kept: Tensor) -> Tensor:
    """Row i reads rows 0 .. i - j of step 0, and row i - (j - m) of each step m."""
    step = len(kept) // 2 - 1
    q, *rows = (each.transpose(1, 2) for each in (q, *kept))
    keys, values, found = rows[: step + 1], rows[step + 1 :], list[Tensor]()
    for i in range(step, q.shape[2]):
        own = [torch.cat([part[m][:, :, i - step + m, None] for m in range(1, step + 1)], 2) for part in (keys, values)]
        k, v = (
            torch.cat((part[0][:, :, : i - step + 1], mine), 2) for part, mine in zip((keys, values), own, strict=True)
        )
        found.append(((q[:, :, i, None] @ k.mT) * q.shape[3] ** -0.5).softmax(-1) @ v)
    return torch.cat([torch.zeros_like(q[:, :, :step]), *found], 2).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("step", "rows"), [(1, 2), (1, 9), (3, 4), (6, 20)])
def test_a_chains_attention_is_a_loop_over_rows(step: int, rows: int, dtype: torch.dtype) -> None:
    """Values and gradients of the fused operation and of its reference."""
    weights = torch.randn(2, rows, 3, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)
    found = []
    for run in (
        by_rows,
        lambda q, *kept: chain_attention_reference(q, kept[: step + 1], kept[step + 1 :]),
        chain_attention,
    ):
        leaves = drawn(step, rows, dtype)
        out = run(*leaves)
        (out * weights).sum().backward()
        found.append([out.detach(), *(each.grad for each in leaves)])
    for each in found[1:]:
        for one, other in zip(each, found[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=1e-6)


@pytest.mark.parametrize("step", [1, 6])
def test_a_gpus_attention_takes_what_it_is_given(step: int) -> None:
    """Without one: shapes, types and order of what PyTorch's kernels take and give, on a device without numbers."""
    context = Kept()
    heads = [9] + [3] * (2 * step + 2)
    q, *kept = (torch.empty(2, 20, count, 64, device="meta", dtype=torch.bfloat16) for count in heads)
    with torch.no_grad():
        out = _ChainAttention.forward(context, q, *kept)
        gradients = _ChainAttention.backward(context, torch.empty_like(out))
    assert len(gradients) == len(kept) + 1
    assert all(each.shape == of.shape for each, of in zip((out, *gradients), (q, q, *kept), strict=True))
    assert {each.dtype for each in (out, *gradients)} == {torch.bfloat16}


class Kept:
    """What a forward keeps for its backward."""

    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def test_a_guesss_loss_and_its_gradients_are_those_of_kept_logits() -> None:
    """Rows without a share count nowhere; a loss that is scaled has scaled gradients."""
    random, found = torch.Generator().manual_seed(3), []
    rows, head, logits = (torch.randn(*shape, generator=random) for shape in ((7, 8), (40, 8), (7, 40)))
    probs, shares = (3 * logits).softmax(1), torch.rand(7, generator=random) * (torch.arange(7) != 2)
    for fused in (True, False):
        leaves = [each.clone().requires_grad_() for each in (rows, head)]
        if fused:
            loss, losses = guess_loss(leaves[0], leaves[1], leaves[1], partial(measure_distributions, probs, shares))
            assert not losses.requires_grad and float(losses.sum()) == pytest.approx(float(loss.detach()))
        else:
            loss = (F.cross_entropy(leaves[0] @ leaves[1].T, probs, reduction="none") * shares).sum()
        (3 * loss).backward()
        found.append([loss.detach(), *(each.grad for each in leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_target", [True, False])
def test_a_blocks_losses_and_their_gradients_are_those_of_kept_logits(with_target: bool) -> None:
    """The bias has the head's last columns; the distance is told, and has no gradient of its own."""
    random, found = torch.Generator().manual_seed(3), list[list[Any]]()
    sizes = (7, 8), (40, 3), (40, 5), (7, 40)
    inputs, bias, frozen, target = (torch.randn(*size, generator=random, dtype=torch.float64) for size in sizes)
    tokens, share = torch.randint(40, (7,), generator=random), 0.9 * with_target
    shares = torch.rand(7, generator=random) * (torch.arange(7) != 2)
    for fused in (True, False):
        leaves = [each.clone().requires_grad_() for each in (inputs, bias)]
        head = torch.cat((frozen, leaves[1]), 1)
        if fused:
            measure = partial(measure_tokens, tokens, shares, target if with_target else None, share)
            loss, distances = guess_loss(leaves[0], head.detach(), leaves[1], measure)
        else:
            logits = leaves[0] @ head.T
            distances = (logits.softmax(1) - target.softmax(1)).abs().sum(1) * with_target
            errors = (1 - share) * F.cross_entropy(logits, tokens, reduction="none") + share * distances
            loss = (errors * shares).sum()
        (3 * loss).backward()
        found.append([loss.detach(), distances.detach(), *(each.grad for each in leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
