"""Random schedules on a CPU, in float64 without exception (tests/support/random_schedules.py)."""

import random

import pytest
from support.plain_oracle import PlainOracle
from support.random_schedules import Counting, random_requests, run_requests, run_schedules, run_seeds
from support.ring import RingConfig, tiny_loaded

from overlap_spec.frontend.codec import TextCodec


@pytest.mark.slow
def test_3_random_schedules(codec: TextCodec) -> None:
    """Too few requests for all that must happen; what does happen is plain decoding's."""
    seen = run_seeds(range(3), codec, {})
    assert seen["finished"] > 5 and seen["accepted"] > 0 and seen["rejected"] > 0, dict(seen)


@pytest.mark.slow
def test_9_random_schedules(codec: TextCodec) -> None:
    run_schedules(9, codec)


@pytest.mark.full
def test_20_random_schedules(codec: TextCodec) -> None:
    run_schedules(20, codec)


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("oracle_seed", [20, 10])
def test_wrong_answers_are_counted(codec: TextCodec, oracle_seed: int) -> None:
    """Against what they must be, and against what another model answers."""
    requests, oracle = random_requests(random.Random(1), 20), PlainOracle(oracle_seed, codec)
    counting = Counting(oracle)
    try:
        seen = run_requests(requests, tiny_loaded(10, 3), RingConfig(max_len=120), codec, counting, "counted")
    finally:
        oracle.close()
    assert seen["finished"] > 10
    assert len(counting.wrong) == 0 if oracle_seed == 10 else seen["finished"] * 0.8 < len(counting.wrong) <= 20


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_1000_random_schedules(codec: TextCodec, record_summary) -> None:
    seen = run_schedules(1000, codec)
    record_summary("schedules_1000", {"schedules": 1000, **seen})
