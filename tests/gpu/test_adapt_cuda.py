"""A draft that learns on a GPU: tokens of captured steps while heads change, and no order that waits for the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from overlap_spec_kernels import soft_cross_entropy, token_losses
from overlap_spec_kernels.logits.soft_cross_entropy import soft_cross_entropy_reference, token_losses_reference
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.random_schedules import run_seeds
from support.swapped_heads import swap_all_the_time
from support.train_batches import batch, block_head, head
from test_ring_cuda import PLACE

from overlap_spec.config import AdaptSettings
from overlap_spec.features.adapt_draft import worker
from overlap_spec.features.adapt_draft.learner import Learner
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.train_draft.dflash import DFlash, DSpark
from overlap_spec.train_draft.eagle3 import Eagle3, chain_attention, chain_attention_reference
from overlap_spec.train_draft.head import Head
from overlap_spec.train_draft.steps import BatchSteps


@sync_mode_warns
@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4)], ids=["eager", "graphs"])
def test_tokens_are_plain_decodings_while_heads_change(
    codec: TextCodec, batch_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are written where captured graphs read them; training and judging ask the device for nothing."""
    monkeypatch.setattr(worker, "SEGMENTS", 32)
    monkeypatch.setattr(worker, "SEGMENT_ROWS", 40)
    swaps = swap_all_the_time(monkeypatch)
    for name in ("step", "judge", "take_over", "go_back", "start_again"):
        monkeypatch.setattr(Learner, name, watched(getattr(Learner, name)))
    engine = {"num_steps": 3, "topk": 1, "adapt": AdaptSettings(0.5), "dtype": torch.float32, "place": PLACE}
    run_seeds(range(8), codec, engine | {"graph_batch_sizes": batch_sizes})
    assert swaps.taken and swaps.trained, swaps


@pytest.mark.parametrize("kind", [Eagle3, DFlash, DSpark])
def test_a_graph_of_a_step_teaches_what_the_step_does(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Of batches in several shapes, in turns; the first of each shape runs operation by operation."""

    def made_head() -> Head:
        return head("cuda") if kind is Eagle3 else block_head(kind, "cuda")

    found, losses = list[dict[str, torch.Tensor]](), list[list[float]]()
    for captures in (True, False):
        made, random = made_head(), torch.Generator()
        taken = BatchSteps(made, 64)
        if not captures:
            taken._replays._recorder = None
        losses.append([])
        for seed, (count, length) in enumerate([(3, 20), (4, 16), (3, 20), (2, 20), (4, 16), (3, 20), (3, 16)] * 2):
            taken.set_rate(1e-3 * (1 + seed % 3))
            losses[-1].append(float(taken.learn(batch(seed % 5, count, length, "cuda"), random)))
        assert bool(taken._replays._graphs) == captures
        found.append({name: tensor.detach() for name, tensor in made.tensors.items()})
    assert "operation by operation" not in caplog.text
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0][5] < losses[0][0]
    begun = made_head().tensors
    for name, tensor in found[0].items():
        moved = (found[1][name] - begun[name].detach()).norm()
        assert moved > 0 and (tensor - found[1][name]).norm() < 0.02 * moved, name


@pytest.mark.parametrize(("step", "rows", "dim"), [(1, 2, 64), (1, 130, 64), (4, 384, 128), (6, 509, 64)])
def test_a_fused_chains_attention_is_its_reference(step: int, rows: int, dim: int) -> None:
    """In bfloat16 nearer to float64 than twice the reference's distance, with gradients."""
    random = torch.Generator().manual_seed(step)
    heads = [6] + [2] * (2 * step + 2) + [6]
    given = [torch.randn(2, rows, count, dim, generator=random) for count in heads]
    *leaves, weights = (each.bfloat16().double().cuda() for each in given)
    found = list[list[torch.Tensor]]()
    for dtype, fused in ((torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        q, *kept = (each.to(dtype, copy=True).requires_grad_() for each in leaves)
        parts = kept[: step + 1], kept[step + 1 :]
        out = chain_attention(q, *kept) if fused else chain_attention_reference(q, *parts)
        (out * weights.to(dtype)).sum().backward()
        found.append([each.detach().double() for each in (out, q.grad, *(one.grad for one in kept))])
    for exact, plain, fused_ in zip(*found, strict=True):
        assert (fused_ - exact).norm() <= 2 * (plain - exact).norm() + 1e-3 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "size"), [(3, 777), (300, 12288), (5, 32000)])
def test_a_losss_kernel_is_its_reference(rows: int, size: int, dtype: torch.dtype) -> None:
    random = torch.Generator("cuda").manual_seed(size)
    drawn = (torch.randn(rows, size, generator=random, device="cuda") for _ in range(2))
    logits, probs = next(drawn).mul(5).to(dtype), next(drawn).mul(3).softmax(1)
    weights, other = torch.rand(rows, device="cuda"), logits.clone()
    expected = soft_cross_entropy_reference(other, probs, weights)
    torch.testing.assert_close(soft_cross_entropy(logits, probs, weights), expected, rtol=1e-5, atol=1e-5)
    assert (logits.float() - other.float()).norm() <= 1e-3 * other.float().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "size", "share"), [(3, 777, 0.9), (300, 49152, 0.9), (5, 32000, 0.0)])
def test_a_tokens_losses_are_the_references(rows: int, size: int, share: float, dtype: torch.dtype) -> None:
    random = torch.Generator("cuda").manual_seed(size)
    logits, target = (torch.randn(rows, size, generator=random, device="cuda").mul(5).to(dtype) for _ in range(2))
    tokens, weights = torch.randint(size, (rows,), device="cuda"), torch.rand(rows, device="cuda")
    other, given = logits.clone(), (tokens, weights, target if share else None, share)
    expected = token_losses_reference(other, *given)
    torch.testing.assert_close(token_losses(logits, *given), expected, rtol=1e-5, atol=1e-5)
    assert (logits.float() - other.float()).norm() <= 1e-3 * other.float().norm()


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        with synchronization_is_an_error():
            return function(*given)

    return call
