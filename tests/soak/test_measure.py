"""A leak is found in samples of memory, and a jump is none."""

from random import Random

import pytest
from support.soak.measure import ENOUGH, Sample, growing, row_of, slope_mb

STEP = 25  # requests between samples


def samples(kb_per_request: float, count: int, jump_mb: float = 0.0) -> list[Sample]:
    """A process that also breathes by 200 kB; a cache of `jump_mb` comes once, in the middle."""
    random = Random(0)
    jump = [jump_mb * 1e6 if index > count // 2 else 0.0 for index in range(count)]
    rss = [
        5e7 + kb_per_request * 1e3 * index * STEP + random.uniform(-2e5, 2e5) + jump[index] for index in range(count)
    ]
    return [Sample(index * STEP, int(each)) for index, each in enumerate(rss)]


@pytest.mark.parametrize("kb_per_request", [0.0, 0.5, 3.0, 20.0])
def test_the_slope_is_what_each_request_leaves(kb_per_request: float) -> None:
    assert slope_mb(samples(kb_per_request, 200)) == pytest.approx(kb_per_request, abs=0.1)


def test_a_leak_is_found_and_a_cache_that_fills_once_is_none() -> None:
    enough = 2 * ENOUGH // STEP
    assert growing([row_of("worker", samples(1.3, enough))])
    assert not growing([row_of("worker", samples(0.0, enough))])
    assert not growing([row_of("worker", samples(0.0, enough, jump_mb=1.0))])


def test_a_short_run_tells_of_large_leaks_alone() -> None:
    assert not growing([row_of("worker", samples(5.0, 30))])
    assert growing([row_of("worker", samples(60.0, 30))])
