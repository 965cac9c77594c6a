"""The storm for every other drafting method: a shorter one each, with all that must happen in it."""

import pytest
from support.storm import run_seeds, run_storm
from support.tiny.methods import TINY_METHODS

from overlap_spec.frontend.codec import TextCodec

OTHERS = [name for name in TINY_METHODS if name != "EAGLE3"]  # test_ring_storm.py


@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize("method", OTHERS)
def test_2_schedules(codec: TextCodec, method: str) -> None:
    """Too few for all that must happen; what does happen is plain decoding's."""
    seen = run_seeds(range(3, 5), codec, {"method": method})
    assert seen["finished"] > 5 and seen["accepted"] > 0, dict(seen)


@pytest.mark.full_but_every(6)
@pytest.mark.slow
@pytest.mark.parametrize("method", OTHERS)
def test_storm_of_25_schedules(codec: TextCodec, method: str) -> None:
    run_storm(25, codec, method=method)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", OTHERS)
def test_storm_of_400_schedules(codec: TextCodec, method: str, record_summary) -> None:
    seen = run_storm(400, codec, method=method)
    record_summary(f"storm_400_{method.replace(' ', '_')}", {"schedules": 400, **seen})
