"""Every other drafting method on a GPU, in graphs: random requests with aborts against solo plain decoding, in float32.

As in tests/gpu/test_ring_cuda.py, nothing on the launch path may wait for the device while requests are served.
"""

import pytest
import torch
from support.device_watch import sync_mode_warns
from support.plain_oracle import PlainOracle
from support.random_schedules import Counting, run_requests, run_schedules
from support.ring import RingConfig, tiny_loaded
from support.tiny.methods import TINY_METHODS
from test_ring_cuda import BATCH_SIZES, FULL, PLACE, mixed_requests, watch_for

from overlap_spec.frontend.codec import TextCodec

NUM_SCHEDULES = 15
OTHERS = [name for name in TINY_METHODS if name != "EAGLE3"]


@pytest.mark.parametrize("method", OTHERS)
def test_random_schedules_in_graphs(codec: TextCodec, method: str, record_summary) -> None:
    seen = run_schedules(
        NUM_SCHEDULES, codec, method=method, dtype=torch.float32, place=PLACE, graph_batch_sizes=BATCH_SIZES
    )
    name = f"schedules_graphs_{method.replace(' ', '_')}"
    record_summary(name, {"schedules": NUM_SCHEDULES, **seen}, torch.cuda.get_device_name())


@sync_mode_warns
@pytest.mark.parametrize("method", OTHERS)
def test_requests_in_graphs(codec: TextCodec, method: str, num_requests: int, record_summary) -> None:
    more = {"method": method, "graph_batch_sizes": BATCH_SIZES, "widths_seed": 1, "chunks_seed": 3}
    config = RingConfig(**{**vars(FULL), **more})
    models, figures = tiny_loaded(20, config.num_steps, torch.float32, PLACE, method), {}
    oracle = PlainOracle(20, codec, torch.float32, PLACE)
    counting = Counting(oracle)
    requests = mixed_requests("the same for every method", num_requests)
    try:
        seen = run_requests(requests, models, config, codec, counting, method, watch_for(config, figures))
    finally:
        oracle.close()
    figures |= {"requests": num_requests, "wrong": len(counting.wrong), **seen}
    record_summary(f"requests_graphs_{method.replace(' ', '_')}", figures, torch.cuda.get_device_name())
    assert not counting.wrong, counting.wrong
    assert seen["finished"] > num_requests // 2
