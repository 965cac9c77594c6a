"""Figures of answers whose times were written down by hand, and the search for a rate."""

import asyncio
from array import array
from typing import Any

import pytest

from overlap_spec.bench.traffic.figures import figures_of
from overlap_spec.bench.traffic.processes import Outcome, Played
from overlap_spec.bench.traffic.rate_search import Limits, RateSearch

LIMITS = Limits(first_token_ms=150.0, tpot_ms=20.0)


def outcome(sent_at: float, times: list[float], tokens: int = 0, **more: Any) -> Outcome:
    """Of token times in seconds."""
    stamps = array("d", times).tobytes()
    given: dict[str, Any] = {"tag": "", "due_at": sent_at, "prompt_len": 10, "counted_by": "usage"}
    return Outcome(sent_at=sent_at, times=stamps, tokens=tokens or len(times), **given | more)


def measured(outcomes: list[Outcome], **more: Any) -> dict[str, Any]:
    return figures_of(Played(outcomes, **{"cpu_shares": [0.1], "planned": len(outcomes)} | more), LIMITS)


def test_percentiles_are_those_computed_by_hand() -> None:
    """First tokens after 100, 200, .. 1100 ms: the median is the sixth, p90 the tenth, p99 a tenth before the last."""
    figures = measured([outcome(0.0, [n / 10]) for n in range(1, 12)])
    assert figures["first_token_ms"] == {"p50": 600.0, "p90": 1000.0, "p99": 1090.0, "max": 1100.0}
    assert figures["time_per_token_ms"] == {} and figures["gap_ms"] == {}
    assert figures["seconds"] == 1.1 and figures["requests_per_second"] == 10.0 and figures["prompt_tokens"] == 110


def test_time_per_token_counts_tokens_and_gaps_count_arrivals() -> None:
    """Nine tokens in three arrivals, 0.1 s, 0.2 s and 0.5 s after sending: (0.5 - 0.1) / 8 = 50 ms a token."""
    figures = measured([outcome(1.0, [1.1, 1.2, 1.5], tokens=9), outcome(1.0, [1.1, 1.1 + 0.016], tokens=2)])
    assert figures["time_per_token_ms"]["max"] == 50.0 and figures["time_per_token_ms"]["p50"] == 33.0
    assert figures["longest_gap_ms"]["max"] == 300.0 and figures["longest_gap_ms"]["p50"] == 158.0
    assert figures["gap_ms"]["p50"] == 100.0 and figures["gap_ms"]["max"] == 300.0
    assert figures["tokens"] == 11 and figures["tokens_per_second"] == 22.0
    assert figures["goodput"] == 2.0  # one answer in half a second: the other takes too long for a token


def test_failed_and_cut_off_requests() -> None:
    outcomes = [
        outcome(0.0, [0.1, 0.2]),
        outcome(0.0, [9.0], error="HTTP 503", detail="full"),
        outcome(0.0, [], error="HTTP 503", detail="other"),
        outcome(0.0, [0.3, 0.9], error="connection lost", stopped=True),
    ]
    figures = measured(outcomes, planned=9, stopped_because="the time limit")
    assert figures["errors"] == {"HTTP 503": {"count": 2, "first": "full"}}
    assert (figures["planned"], figures["sent"], figures["answered"], figures["cut_off"]) == (9, 4, 1, 1)
    assert figures["first_token_ms"]["max"] == 300.0 and figures["longest_gap_ms"]["max"] == 600.0
    assert figures["time_per_token_ms"]["max"] == 600.0 and figures["stopped_because"] == "the time limit"


def test_nothing_was_answered() -> None:
    figures = measured([])
    assert figures["seconds"] == 0.0 and figures["tokens_per_second"] == 0.0 and not LIMITS.are_met(figures)


def test_a_busy_client_and_late_requests_are_reported() -> None:
    figures = measured([outcome(0.5, [0.6], due_at=0.2)], cpu_shares=[0.2, 0.71])["client"]
    assert figures["may_be_the_bottleneck"] and figures["cpu_shares"] == [0.2, 0.71]
    assert figures["sent_late_ms"]["max"] == 300.0
    assert not measured([], cpu_shares=[0.7])["client"]["may_be_the_bottleneck"]


def test_what_a_long_prompt_does_to_streams() -> None:
    """Sent at 10 s, first token at 12 s (2 s, alone 1.6 s). A gap that began before it and ended after it counts."""
    outcomes = [
        outcome(0.0, [1.6], tag="alone"),
        outcome(8.0, [8.1, 8.8, 9.9, 12.6, 13.0], tag="stream"),
        outcome(8.0, [8.1, 9.9, 10.4, 10.9], tag="stream"),
        outcome(10.0, [12.0], tag="long"),
    ]
    figures = measured(outcomes)
    assert figures["interruption"] == {
        "longest_gap_ms": 2700.0,
        "longest_gap_before_ms": 1800.0,
        "first_token_alone_ms": 1600.0,
        "first_token_among_streams_ms": 2000.0,
        "first_token_ratio": 1.25,
        "num_streams": 2,
        "streams_that_ended_before": 1,
    }
    assert figures["by_tag"]["stream"]["sent"] == 2 and figures["by_tag"]["long"]["first_token_ms"]["max"] == 2000.0


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        ({}, True),
        ({"errors": {"HTTP 503": {}}}, False),
        ({"stopped_because": "late"}, False),
        ({"first_token_ms": {"p99": 150.1}}, False),
        ({"time_per_token_ms": {"p99": 20.1}}, False),
        ({"time_per_token_ms": {}}, True),
        ({"first_token_ms": {}}, False),
    ],
)
def test_limits(changed: dict[str, Any], met: bool) -> None:
    kept = {"errors": {}, "stopped_because": "", "first_token_ms": {"p99": 150.0}, "time_per_token_ms": {"p99": 20.0}}
    assert LIMITS.are_met(kept | changed) is met


def search(
    highest: float, first: float = 4.0, most: int = 100, growth: float = 2.0
) -> tuple[dict[str, Any], list[float]]:
    """Of a server that keeps up to `highest`, in at most `most` trials."""
    tried: list[float] = []

    async def attempt(rate: float) -> tuple[bool, dict[str, Any]]:
        tried.append(rate)
        return rate <= highest, {}

    return asyncio.run(RateSearch(first, growth=growth).run(attempt, lambda: len(tried) < most)), tried


@pytest.mark.parametrize("highest", [0.3, 3.9, 4.0, 21.0, 100.0])
def test_the_highest_rate_is_found_within_the_precision(highest: float) -> None:
    found, tried = search(highest)
    assert found["complete"] and found["requests_per_second"] <= highest < found["missed_at"]
    assert found["missed_at"] <= 1.08 * found["requests_per_second"] and len(tried) <= 12
    assert [trial["rate"] for trial in found["trials"]] == tried and len(set(tried)) == len(tried)


def test_a_search_that_ends_early_has_what_it_knows() -> None:
    found, tried = search(21.0, most=4)
    assert tried[:4] == [4.0, 8.0, 16.0, 32.0]
    assert (found["requests_per_second"], found["missed_at"], found["complete"]) == (16.0, 32.0, False)


@pytest.mark.parametrize(
    ("highest", "tried"), [(13.9, [12.0, 15.6, 13.6821, 14.6096]), (10.2, [12.0, 9.2308, 10.5247])]
)
def test_a_search_that_begins_nearby_goes_in_small_steps(highest: float, tried: list[float]) -> None:
    assert [round(rate, 4) for rate in search(highest, first=12.0, growth=1.3)[1][: len(tried)]] == tried


def test_a_trial_that_was_cut_off_decides_nothing() -> None:
    async def attempt(rate: float) -> tuple[bool | None, dict[str, Any]]:
        return (True if rate < 10 else None), {}

    found = asyncio.run(RateSearch(8.0).run(attempt))
    assert [trial["met"] for trial in found["trials"]] == [True, None]
    assert (found["requests_per_second"], found["missed_at"], found["complete"]) == (8.0, None, False)


@pytest.mark.parametrize(("highest", "missed"), [(0.0, 2**-10), (1e9, None)])
def test_a_search_without_an_end_ends(highest: float, missed: float | None) -> None:
    found, tried = search(highest)
    assert not found["complete"] and found["missed_at"] == missed and len(tried) < 20
