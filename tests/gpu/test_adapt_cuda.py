"""A draft that learns on a GPU: tokens of captured steps while heads change, and no order that waits for the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.random_schedules import run_seeds
from support.swapped_heads import swap_all_the_time
from support.train_batches import batch, head
from test_ring_cuda import PLACE

from overlap_spec.config import AdaptSettings
from overlap_spec.features.adapt_draft import worker
from overlap_spec.features.adapt_draft.learner import Learner
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.train_draft.steps import BatchSteps, Steps


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


def test_a_graph_of_a_step_teaches_what_the_step_does(caplog: pytest.LogCaptureFixture) -> None:
    """Of batches in several shapes, in turns; the first of each shape runs operation by operation."""
    found, losses = list[dict[str, torch.Tensor]](), list[list[float]]()
    for captures in (True, False):
        made = head("cuda")
        steps = Steps(made.tensors)
        taken = BatchSteps(made, steps, 64, torch.device("cuda"))
        taken._replays._captures = captures
        losses.append([])
        for seed, (count, length) in enumerate([(3, 20), (4, 16), (3, 20), (2, 20), (4, 16), (3, 20), (3, 16)] * 2):
            steps.set_rate(1e-3 * (1 + seed % 3))
            losses[-1].append(float(taken.take(batch(seed % 5, count, length, "cuda"))))
        assert bool(taken._replays._graphs) == captures
        found.append({name: tensor.detach() for name, tensor in made.tensors.items()})
    assert "operation by operation" not in caplog.text
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0][5] < losses[0][0]
    begun = head("cuda").tensors
    for name, tensor in found[0].items():
        moved = (found[1][name] - begun[name].detach()).norm()
        assert moved > 0 and (tensor - found[1][name]).norm() < 0.02 * moved, name


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        with synchronization_is_an_error():
            return function(*given)

    return call
