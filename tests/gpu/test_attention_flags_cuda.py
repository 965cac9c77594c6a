"""What flags say of attention, on a GPU in float32: whatever runs it, every request gets its plain, solo tokens."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from support.plain_oracle import PlainOracle
from support.random_schedules import random_requests, run_requests, run_schedules
from support.ring import RingConfig, tiny_loaded

from overlap_spec.config import AttentionSettings
from overlap_spec.frontend.codec import TextCodec

PLACE = torch.device("cuda", 0)
BATCH_SIZES = (1, 2, 4, 6)
NUM_SCHEDULES = 15
OPS = ("decode_attention", "paged_attention", "rope_kv_write", "tree_attention")
TORCH = AttentionSettings(target_torch=True, draft_torch=True)


@contextmanager
def no_kernels_of_attention() -> Iterator[None]:
    """Any op that would launch one fails the request."""
    refuse = AssertionError("an op of attention was called")
    with mock.patch.multiple(
        "overlap_spec.models.layers.attention", **{op: mock.Mock(side_effect=refuse) for op in OPS}
    ):
        yield


@pytest.mark.parametrize("topk", [1, 3])
def test_torch_attention_runs_no_kernel(topk: int, codec: TextCodec) -> None:
    config = RingConfig(topk=topk, dtype=torch.float32, place=PLACE, attention=TORCH, max_len=120, widths_seed=1)
    models = tiny_loaded(20, config.num_steps, torch.float32, PLACE, topk=topk)
    oracle = PlainOracle(20, codec, torch.float32, PLACE)
    requests = random_requests(random.Random(7), 20)
    try:
        seen = run_requests(requests, models, config, codec, oracle, "torch", no_kernels_of_attention)
    finally:
        oracle.close()
    assert seen["finished"] and seen["accepted"]


@pytest.mark.parametrize(
    ("attention", "batch_sizes"),
    [
        (AttentionSettings(target_torch=True), ()),
        (AttentionSettings(draft_torch=True), ()),
        (AttentionSettings(prefill_kernel=True), BATCH_SIZES),
        (AttentionSettings(draft_window=3), BATCH_SIZES),
    ],
    ids=["torch target", "torch draft", "prefill kernel", "narrow draft"],
)
def test_random_schedules(attention: AttentionSettings, batch_sizes: tuple[int, ...], codec: TextCodec) -> None:
    engine = {"dtype": torch.float32, "place": PLACE, "graph_batch_sizes": batch_sizes}
    run_schedules(NUM_SCHEDULES, codec, attention=attention, **engine)
