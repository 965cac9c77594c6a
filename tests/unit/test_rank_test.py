"""The rank test that judges attacks by time."""

import random

import pytest
from support.prying import Times, cached_counts
from support.rank_test import rank_p_value


def test_samples_that_differ_and_samples_that_do_not() -> None:
    """The first value is R's: wilcox.test(1:20, 21:40, exact = FALSE, correct = FALSE)."""
    low, high = [float(i) for i in range(20)], [float(i) for i in range(20, 40)]
    assert rank_p_value(low, high) == rank_p_value(high, low) == pytest.approx(6.302e-08, rel=1e-3)
    assert rank_p_value(low, low) == pytest.approx(1), "equal values share a rank"
    assert rank_p_value([1.0] * 20, [1.0] * 19 + [2.0]) > 0.3


def test_one_in_ten_of_equal_samples_has_a_value_below_a_tenth() -> None:
    rng = random.Random(1)
    values = [rank_p_value(*([rng.gauss(0, 1) for _ in range(20)] for _ in range(2))) for _ in range(500)]
    assert 30 <= sum(value < 0.1 for value in values) <= 70


def test_times_are_compared_and_counts_of_any_form_are_found() -> None:
    assert Times([1.0] * 20, [2.0] * 20).p_value < 1e-6
    text = '{"usage": {"details": {"cached_tokens": 16}}}\ndata: {"cache_read_input_tokens":32}'
    assert cached_counts(text) == {16, 32} and not cached_counts("{}")
