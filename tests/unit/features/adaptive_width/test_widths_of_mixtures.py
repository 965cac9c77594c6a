"""Mixtures of experts: what a width costs depends on the text, which changes every 200 steps.

A step at start has random tokens, whose experts differ; text shares them, more or less (`routed_steps.py`).
"""

import pytest
from support.played_engine import Chain
from support.routed_steps import RoutedEngine

from overlap_spec.features.adaptive_width.scheduler import STALE_STEPS, StepSeconds

STEPS = 1600
SKEWS = ((0.0, 1.5, 0.5, 2.5), (2.5, 0.0), (1.0, 1.5, 2.0))
DRAFTS = {
    1.3: Chain((0.3, 0.0, 0.0)),
    1.8: Chain((0.5, 0.4, 0.4)),
    2.7: Chain((0.8, 0.7, 0.6)),
    3.7: Chain((0.95,) * 3),
}


def served(tokens: float, batch_size: int, skews: tuple[float, ...]) -> list[tuple[float, float]]:
    """Speeds over plain decoding and over the best fixed width, in two stretches. Requests come a few at a time."""
    engine = RoutedEngine(DRAFTS[tokens], 1, skews)
    while engine.batch_size < batch_size:
        engine.run(24)
        engine.batch_size *= 2
    return [engine.speeds(STEPS) for _ in range(2)]


@pytest.mark.full_but_every(4)
@pytest.mark.slow_but_every(28)
@pytest.mark.parametrize("skews", SKEWS, ids=str)
@pytest.mark.parametrize("batch_size", [1, 8, 32])
@pytest.mark.parametrize("tokens", DRAFTS)
def test_it_is_not_slower_than_plain_decoding_and_near_the_best_width(
    tokens: float, batch_size: int, skews: tuple[float, ...]
) -> None:
    """With 32 requests and 1.3 tokens 0.82 of plain, if what was measured at start is believed of plain steps.

    A plain step of one request reads as many experts in any text. So it shows nothing of what wide ones take, trials of
    which are paid for once in some hundred steps: there the best width is not always found.
    """
    cold, then = served(tokens, batch_size, skews)
    assert min(cold[0], then[0]) > 0.97, "of plain decoding"
    if batch_size == 32 or tokens > 3:
        assert min(cold[1], then[1]) > 0.95, "of the best fixed width"
    else:
        assert min(cold[1], then[1]) > (0.91 if batch_size > 1 else 0.885)


@pytest.mark.parametrize("tokens", [1.3, 3.7])
def test_a_good_chain_is_widened_without_a_trial(tokens: float) -> None:
    """Of one request. A step of four columns costs too much to begin with, and no trial of it is paid for so soon."""
    engine = RoutedEngine(DRAFTS[tokens], 1, (1.5,))
    engine.run(150)
    assert engine.widths[0] == 2 and engine.current == (1 if tokens < 2 else 4)


def fast(kind: int) -> StepSeconds:
    """Steps of this kind have taken half of what was measured."""
    seconds = StepSeconds((1,), ((10.0, 20.0, 40.0),))
    for _ in range(200):
        seconds.observe(1, kind, seconds.measured(1)[kind] / 2)
    return seconds


@pytest.mark.parametrize("kind", range(3))
def test_what_makes_steps_fast_is_believed_of_all_in_proportion(kind: int) -> None:
    assert fast(kind).of(1) == pytest.approx([5.0, 10.0, 20.0], rel=1e-3)


def test_what_makes_a_wide_step_slow_is_not() -> None:
    seconds = StepSeconds((1,), ((10.0, 20.0, 40.0),))
    seconds.observe(1, 1, 23.0)
    assert seconds.of(1) == [10.0, 23.0, 43.0]


def test_what_narrow_steps_took_with_other_text_is_forgotten() -> None:
    seconds = fast(1)
    for _ in range(50):
        seconds.observe(1, 0, 10.0)
    before = seconds.of(1)[0]
    for _ in range(4 * STALE_STEPS):
        seconds.observe(1, 1, 10.0)
    assert before == pytest.approx(10.0, rel=0.01) and seconds.of(1)[0] == pytest.approx(5.0, rel=0.03)
