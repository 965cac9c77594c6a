"""What streams and prompts wait for each other, in simulated time on a device like one that was measured.

Measured on the H200 at commit 2ca3e6b5 (traffic_h200.json, traffic_rate_h200.json): first token of 16,000 / 40,000
tokens beside 8 streams 619 / 2,224 ms, alone 479 / 1,620; at 15.6 requests a second a first token p50 / p99 of 63 /
418 ms. A test holds the simulation to that.
"""

import random
import statistics

import pytest
from support.fake_device import make_ready
from support.simulated_engine import DeviceCosts, SimulatedEngine, Stream

from overlap_spec.config import SchedulerSettings
from overlap_spec.messages import PrefillCosts
from overlap_spec.worker.graphs import two_part_sizes

H200 = DeviceCosts()
MIXING = DeviceCosts(two_parts=two_part_sizes(4, 128, 8192, 14 * 10**9, 1400))
NUM_STREAMS = 8
NEWCOMER = 99
GAP_S = 0.025  # the default on a GPU


def engine(
    costs: DeviceCosts = H200,
    max_gap_s: float | None = GAP_S,
    told: PrefillCosts | None = None,
    mixed: bool = False,
) -> SimulatedEngine:
    """`told`: what the worker has measured, if not exactly what steps cost."""
    ready = make_ready(
        num_slots=128,
        num_pages=16_385,
        page_size=16,
        max_len=65_536,
        chunk_tokens=8192,
        prefill_costs=told or costs.told(),
        two_parts=costs.two_parts,
    )
    return SimulatedEngine(
        ready, SchedulerSettings(128, 2, None, None, max_gap_s=max_gap_s, windows_with_prompts=mixed), costs
    )


def beside_streams(simulated: SimulatedEngine, num_tokens: int) -> tuple[float, float]:
    """A prompt comes while streams decode. Returns their longest gap, and the seconds to its first token."""
    for uid in range(NUM_STREAMS):
        simulated.ask(0.001 * uid, uid, 300, 5000)
    simulated.ask(1.0, NEWCOMER, num_tokens, 20)
    streams = simulated.streams
    simulated.run(lambda: NEWCOMER in streams and len(streams[NEWCOMER].times) > 3)
    return max(streams[uid].longest_gap_s for uid in range(NUM_STREAMS)), streams[NEWCOMER].first_token_s


def alone(simulated: SimulatedEngine, num_tokens: int) -> float:
    simulated.ask(0.0, NEWCOMER, num_tokens, 4)
    return simulated.run()[NEWCOMER].first_token_s


def poisson(simulated: SimulatedEngine, seconds: float, rate: float = 16.0) -> list[Stream]:
    """Prompts of 64 to 8,000 tokens, answers of 16 to 600, at random times."""
    rng, at, uid = random.Random(1), 0.0, 0
    while (at := at + rng.expovariate(rate)) < seconds:
        uid += 1
        prompt, answer = rng.lognormvariate(6.6, 1), rng.lognormvariate(5, 0.7)
        simulated.ask(at, uid, int(min(max(prompt, 64), 8000)), int(min(max(answer, 16), 600)))
    return list(simulated.run().values())


def p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


@pytest.mark.parametrize(("num_tokens", "first", "by_itself"), [(16_000, 0.619, 0.479), (40_000, 2.224, 1.620)])
def test_the_simulation_is_like_the_device(num_tokens: int, first: float, by_itself: float) -> None:
    assert beside_streams(engine(MIXING, mixed=True), num_tokens)[1] == pytest.approx(first, rel=0.12)
    assert alone(engine(MIXING, mixed=True), num_tokens) == pytest.approx(by_itself, rel=0.12)


@pytest.mark.slow
def test_random_arrivals_are_like_those_of_the_device() -> None:
    first = [stream.first_token_s for stream in poisson(engine(MIXING, mixed=True), 20.0, rate=15.6)]
    assert statistics.median(first) == pytest.approx(0.063, rel=0.2)
    assert p99(first) == pytest.approx(0.418, rel=0.15)


@pytest.mark.parametrize(("num_tokens", "ratio"), [(16_000, 1.3), (40_000, 1.35)])
def test_a_long_prompt_stops_no_stream(num_tokens: int, ratio: float) -> None:
    """It is to take 1.25 times its time alone: a decode step follows every chunk."""
    gap, first = beside_streams(engine(), num_tokens)
    assert gap < 0.034, "must be at most 40 ms"
    assert first / alone(engine(), num_tokens) <= ratio


@pytest.mark.parametrize("measured", [0.6, 1.6])
def test_costs_that_were_measured_wrongly_are_corrected(measured: float) -> None:
    """The first chunks of an engine may be off; once a few prompts have run, none is."""
    simulated = engine(told=H200.told(error=measured))
    for i in range(4):
        simulated.ask(0.3 * i, 1000 + i, 6000, 1)
    gap, first = beside_streams(simulated, 16_000)
    late = [b - a for uid in range(NUM_STREAMS) for a, b in zip(*_neighbours(simulated.streams[uid]), strict=True)]
    assert max(late) < 0.036 and gap < 0.07
    assert simulated.scheduler.planner.chunks.correction == pytest.approx(1 / measured, rel=0.1)


def _neighbours(stream: Stream) -> tuple[list[float], list[float]]:
    """Times of tokens after the first second, and those after them."""
    times = [at for at in stream.times if at > 1.0]
    return times[:-1], times[1:]


@pytest.mark.slow
def test_random_arrivals() -> None:
    """The gap is far below what it must be; the first token waits as long as a device of this speed lets it."""
    streams = poisson(engine(), 20.0)
    assert len(streams) > 250
    assert max(stream.longest_gap_s for stream in streams) < 0.040, "must be at most 60 ms"
    assert p99([stream.first_token_s for stream in streams]) < 0.55
    assert p99([stream.per_token_s for stream in streams]) < 0.0135


@pytest.mark.parametrize("num_tokens", [16_000, 40_000])
def test_in_mixed_steps_a_prompt_is_faster(num_tokens: int) -> None:
    gap, first = beside_streams(engine(MIXING, mixed=True), num_tokens)
    assert gap < 0.027, "must be at most 40 ms"
    assert first < 0.97 * beside_streams(engine(), num_tokens)[1]


@pytest.mark.slow
def test_random_arrivals_where_steps_are_mixed() -> None:
    streams, apart = poisson(engine(MIXING, mixed=True), 20.0), poisson(engine(), 20.0)
    assert max(stream.longest_gap_s for stream in streams) < 0.030
    assert p99([stream.per_token_s for stream in streams]) < 0.0105
    assert p99([stream.per_token_s for stream in streams]) < 0.9 * p99([stream.per_token_s for stream in apart])
    first, first_apart = (p99([stream.first_token_s for stream in each]) for each in (streams, apart))
    assert first < 1.05 * first_apart


def test_what_is_learnt_of_mixed_steps_is_their_whole_time() -> None:
    simulated = engine(MIXING, mixed=True)
    beside_streams(simulated, 40_000)
    assert sum(len(plan.parts()) == 2 for _, plan in simulated.plans) > 30
    assert simulated.scheduler.planner.chunks.correction == pytest.approx(1.0, abs=0.2)


def test_mixed_steps_that_are_launched_one_operation_after_the_other_are_slow() -> None:
    """Measured on the H200 at commit 89b278d: 11.9 s to the first of 40,000 tokens."""
    assert beside_streams(engine(mixed=True), 40_000)[1] > 2 * beside_streams(engine(), 40_000)[1]
