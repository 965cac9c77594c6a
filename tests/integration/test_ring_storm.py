"""The storm on a CPU, in float64 without exception (`tests/storm.py` says what a schedule holds)."""

import pytest
from storm import run_storm

from overlap_spec.tokenizer.codec import TextCodec


def test_storm_of_100_schedules(codec: TextCodec) -> None:
    run_storm(100, codec)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_storm_of_1000_schedules(codec: TextCodec, record_summary) -> None:
    seen = run_storm(1000, codec)
    record_summary("storm_1000", {"schedules": 1000, **seen})
