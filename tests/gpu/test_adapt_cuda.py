"""A draft that learns on a GPU: tokens of captured steps while heads change, and no order that waits for the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.random_schedules import run_schedules
from support.swapped_heads import swap_all_the_time
from test_ring_cuda import PLACE

from overlap_spec.config import AdaptSettings
from overlap_spec.features.adapt_draft import worker
from overlap_spec.features.adapt_draft.learner import Learner
from overlap_spec.frontend.codec import TextCodec


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
    run_schedules(8, codec, **engine, graph_batch_sizes=batch_sizes)
    assert swaps.taken and swaps.trained, swaps


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        with synchronization_is_an_error():
            return function(*given)

    return call
