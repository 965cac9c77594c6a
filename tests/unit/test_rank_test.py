"""The rank test that judges attacks by time."""

import random

import pytest
from support.prying import Guesses, Prober, Times, cached_counts, guess_times
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


class Remembering(Prober):
    """A server that answers in a tenth of the time what anyone has sent, or only what the same name has."""

    def __init__(self, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._sent: set[tuple[str, ...]] = set()

    def seconds(self, name: str, ids: list[int], new_tokens: int = 1) -> float:
        key = ("" if self._is_shared else name, str(ids))
        taken = (0.1 if key in self._sent else 1.0) * random.Random(str(ids)).uniform(1, 2)
        self._sent.add(key)
        return taken


@pytest.mark.parametrize("guesses", [Guesses(40, 12), Guesses(40, 4, context=100)])
def test_guesses_tell_whether_names_share(guesses: Guesses) -> None:
    assert guess_times(Remembering(is_shared=True), guesses).p_value < 1e-6
    assert guess_times(Remembering(is_shared=False), guesses).p_value >= 1e-3
