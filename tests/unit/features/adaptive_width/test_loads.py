"""Loads that go up and down in one engine, and a draft that gets worse meanwhile: never slower than plain decoding.

The scheduler is the real one, with its policy. Time is simulated: steps take what they took on an H200, where an
earlier policy learnt to be slower in this order of calls and ended at 0.42 of plain decoding.
"""

import pytest
from support.played_engine import Engine, Synthetic
from support.simulated_widths import WidthsEngine
from support.step_tables import LEVELS, SERVED, costs_of

CALLS = (1, 24, 100, 200, 256, 256, 256, 100, 24, 1)  # requests, one call after another
ANSWER = 208  # tokens


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """The speeds of the calls without a draft, in tokens per second."""
    engine = WidthsEngine()
    return [engine.call(num_requests, ANSWER) for num_requests in CALLS]


@pytest.mark.slow
@pytest.mark.full_but_every(2)
@pytest.mark.parametrize(
    ("mean", "least"),
    [
        (2.5, (1.8, 1.55, 1.25, 1.13, 1.1)),
        (1.3, (1.05, 0.97, 0.97, 0.965, 0.955)),
        (3.5, (2.5, 2.0, 1.25, 1.13, 1.1)),
    ],
)
def test_no_call_is_slower_than_plain_decoding_or_than_the_call_before_it(
    plain: list[float], mean: float, least: tuple[float, ...]
) -> None:
    """`least`: of plain decoding's speed, for 1, 24, 100, 200 and 256 requests. Prompts go through the draft, too."""
    engine = WidthsEngine(mean)
    ratios = [engine.call(num_requests, ANSWER) / speed for num_requests, speed in zip(CALLS, plain, strict=True)]
    wanted = dict(zip(sorted(set(CALLS)), least, strict=True))
    assert all(ratio > wanted[num_requests] for num_requests, ratio in zip(CALLS, ratios, strict=True)), ratios
    for up, down in ((0, -1), (1, -2), (2, -3), (4, 6)):
        least_kept = 0.95 if CALLS[up] == 1 else 0.97  # of one answer's 83 steps, the mean varies by 2%
        assert ratios[down] > least_kept * ratios[up], "nothing that was learnt on the way makes it slower"


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("batch_size", [128, 256, 32])
def test_trials_after_a_long_good_phase_do_not_cost_an_answer(batch_size: int) -> None:
    """All that was earned in that time would pay for one trial after another: 0.96 and 0.94 of 128 and 256 requests."""
    engine = Engine(costs_of(SERVED), Synthetic(3.5, LEVELS[3.5]), batch_size)
    engine.run(2000)
    engine.guesses = Synthetic(1.3, LEVELS[3.5])
    for _ in range(3):
        engine.reset_clock()
        while engine.tokens < 256:
            engine.run(1)
        assert engine.plain_ratio() > 0.97
