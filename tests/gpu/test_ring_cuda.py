"""The whole ring on a GPU, graphs and all: random requests with aborts against solo plain decoding there.

Float32 (IEEE) without exception; bfloat16, at sizes that take the streamed kernel, up to rounding. While requests are
served, nothing on the launch path may wait for the device; with graphs nothing is compiled and no memory taken.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from support.device_watch import compilations, device_allocations, sync_mode_warns, synchronization_is_an_error
from support.near_oracle import NearOracle, rounded_target
from support.plain_oracle import PlainOracle
from support.random_schedules import Counting, Request, random_requests, run_requests, run_schedules
from support.ring import RingConfig, tiny_loaded

from overlap_spec.frontend.codec import TextCodec

Watch = Callable[[], AbstractContextManager[object]]

NUM_SCHEDULES, NUM_REQUESTS, NUM_16_BIT = 30, 250, 250
BATCH_SIZES = (1, 2, 4, 6)
STREAMED = {"hidden": 64, "intermediate_size": 1152}  # gates, heads and, being long, rows of the second half of an MLP
MOST = 0.15  # of a logit; logits have a deviation of 3, and a bfloat16 of 3 is rounded by up to 0.008
PLACE = torch.device("cuda", 0)
FULL = RingConfig(
    page_size=4, num_pages=46, num_slots=6, chunk_tokens=64, max_len=120, place=PLACE, dtype=torch.float32, warm=True
)
RINGS = {
    "graphs": {"graph_batch_sizes": BATCH_SIZES, "widths_seed": 1},
    "graphs-mixed": {"graph_batch_sizes": BATCH_SIZES, "chunks_seed": 3},
    "graphs-depth1": {"graph_batch_sizes": BATCH_SIZES, "depth": 1},
    "graphs-plain": {"graph_batch_sizes": BATCH_SIZES, "num_steps": 0, "page_size": 8, "num_pages": 23},
    "eager": {"page_size": 1, "num_pages": 180, "widths_seed": 2},
}


def mixed_requests(seed: str, count: int, filters: bool = True) -> list[Request]:
    """Half of them with long answers, which together exceed the pool."""
    rng = random.Random(seed)
    requests = random_requests(rng, count // 2, True, filters) + random_requests(rng, count // 2, False, filters)
    rng.shuffle(requests)
    return requests


def watch_for(config: RingConfig, figures: dict[str, int]) -> Watch:
    """Notes in `figures` what the ring did that it should not, once it was ready."""

    @contextmanager
    def watch() -> Iterator[None]:
        before = device_allocations()
        with compilations() as compiled, synchronization_is_an_error():
            yield
        figures.update(compiled=len(compiled), device_allocations=device_allocations() - before)
        if config.graph_batch_sizes:
            assert not compiled, compiled
            assert figures["device_allocations"] == 0

    return watch


@pytest.mark.parametrize("batch_sizes", [(), BATCH_SIZES], ids=["eager", "graphs"])
def test_random_schedules(codec: TextCodec, batch_sizes: tuple[int, ...], record_summary) -> None:
    """Rings of all kinds, a few requests each."""
    seen = run_schedules(NUM_SCHEDULES, codec, dtype=torch.float32, place=PLACE, graph_batch_sizes=batch_sizes)
    name = f"schedules_{'graphs' if batch_sizes else 'eager'}"
    record_summary(name, {"schedules": NUM_SCHEDULES, **seen}, torch.cuda.get_device_name())


@sync_mode_warns
@pytest.mark.parametrize("kind", RINGS)
def test_requests_in_float32(codec: TextCodec, kind: str, record_summary) -> None:
    config = RingConfig(**{**vars(FULL), **RINGS[kind]})
    requests = mixed_requests(kind, NUM_REQUESTS)
    models, figures = tiny_loaded(20, config.num_steps, torch.float32, PLACE), {}
    oracle = PlainOracle(20, codec, torch.float32, PLACE)
    counting = Counting(oracle)
    try:
        seen = run_requests(requests, models, config, codec, counting, kind, watch_for(config, figures))
    finally:
        oracle.close()
    figures = {"requests": NUM_REQUESTS, "wrong": len(counting.wrong), **figures, **seen}
    record_summary(f"requests_{kind}", figures, torch.cuda.get_device_name())
    assert not counting.wrong, counting.wrong
    assert seen["mid_step_aborts"] > 20
    assert seen["finished"] > NUM_REQUESTS // 2
    assert seen["mixed_steps"] > 20 or config.chunks_seed is None, "which graphs alone can be"


@sync_mode_warns
@pytest.mark.parametrize("kind", ["graphs", "graphs-plain"])
def test_requests_in_bfloat16(codec: TextCodec, kind: str, record_summary) -> None:
    config = RingConfig(**{**vars(FULL), **RINGS[kind], "dtype": torch.bfloat16})
    requests = mixed_requests(f"{kind} 16", NUM_16_BIT, filters=False)
    models, figures = tiny_loaded(20, config.num_steps, torch.bfloat16, PLACE, **STREAMED), {}
    oracle = NearOracle(rounded_target(20, torch.bfloat16, **STREAMED), codec, MOST)
    counting = Counting(oracle)
    seen = run_requests(requests, models, config, codec, counting, kind, watch_for(config, figures))
    near = {"tokens_not_the_best": oracle.near_ties, "largest_shortfall": round(oracle.worst, 4)}
    figures = {"requests": NUM_16_BIT, "wrong": len(counting.wrong), **figures, **near, **seen}
    record_summary(f"requests_bfloat16_{kind}", figures, torch.cuda.get_device_name())
    assert not counting.wrong, counting.wrong
