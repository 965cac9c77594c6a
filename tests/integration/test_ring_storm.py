"""The storm on a CPU, in float64 without exception (`tests/storm.py` says what a schedule holds)."""

import pytest
from storm import run_storm
from tiny_tokenizer import write_tokenizer

from overlap_spec.tokenizer.codec import TextCodec, load_codec


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return load_codec(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_storm_of_100_schedules(codec: TextCodec) -> None:
    run_storm(100, codec)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_storm_of_1000_schedules(codec: TextCodec, record_summary) -> None:
    seen = run_storm(1000, codec)
    record_summary("storm_1000", {"schedules": 1000, **seen})
