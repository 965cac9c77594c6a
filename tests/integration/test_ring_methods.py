"""Random schedules for every other drafting method: fewer each, with all that must happen in them."""

import pytest
from support.random_schedules import run_schedules, run_seeds
from support.tiny.methods import TINY_METHODS

from overlap_spec.frontend.codec import TextCodec

OTHERS = [name for name in TINY_METHODS if name != "EAGLE3"]  # test_ring_random_schedules.py


@pytest.mark.full_but_every(10)
@pytest.mark.slow
@pytest.mark.parametrize("method", OTHERS)
def test_a_schedule(codec: TextCodec, method: str) -> None:
    """Too few requests for all that must happen; what does happen is plain decoding's."""
    seen = run_seeds(range(4, 5), codec, {"method": method})
    assert seen["finished"] > 5 and seen["accepted"] > 0, dict(seen)


@pytest.mark.full
@pytest.mark.parametrize("method", OTHERS)
def test_25_random_schedules(codec: TextCodec, method: str) -> None:
    run_schedules(25, codec, method=method)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", OTHERS)
def test_400_random_schedules(codec: TextCodec, method: str, record_summary) -> None:
    seen = run_schedules(400, codec, method=method)
    record_summary(f"schedules_400_{method.replace(' ', '_')}", {"schedules": 400, **seen})
