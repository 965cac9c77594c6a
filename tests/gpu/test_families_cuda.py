"""Random schedules on a GPU for targets that are not Llama: biases, norms of heads, windows, in graphs and without."""

import pytest
import torch
from support.random_schedules import run_schedules

from overlap_spec.frontend.codec import TextCodec

PLACE = torch.device("cuda", 0)
NUM_SCHEDULES = 30


@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4, 6)], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral with a window", "gemma 3", "olmo 2", "phi 3 in part"])
def test_random_schedules(codec: TextCodec, family: str, batch_sizes: tuple[int, ...]) -> None:
    run_schedules(NUM_SCHEDULES, codec, dtype=torch.float32, place=PLACE, graph_batch_sizes=batch_sizes, family=family)
