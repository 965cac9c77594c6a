"""Thousands of requests and frames that no client would send: no 5xx but 503, no hang, and nothing is left behind.

    python -m pytest -m full tests/e2e/test_e2e_fuzz.py --fuzz-seconds 3600 [--seed N] [--summaries FILE]
    python -m pytest tests/e2e/test_e2e_fuzz.py --fuzz-cases 5000 [--seed N]

CI sends as many of each kind as fit its time, as does the second command with 5,000. The first goes on for an hour,
half of it with requests, half with frames: it notes what fails, and goes on (`support/fuzz/campaign.py`).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import hypothesis
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, strategies as st
from support.command_line import Service
from support.fuzz.campaign import Campaign, Failure
from support.fuzz.checks import FrameTarget, HttpTarget
from support.fuzz.frames import frames, sendings
from support.fuzz.http_cases import HttpCase, http_cases
from support.fuzz.restarted import Restarted
from support.leftovers import Held, as_before, drained, held_by

from overlap_spec.messages import ToFrontendFromClient

SHORT = ("--context-length", "64", "--max-running-requests", "8", "--max-total-tokens", "1200", "--audit-rate", "0.05")
FULL_S = 60.0  # without --fuzz-seconds
MOST_GROWN_MB = 100.0
REQUESTS, FRAMES = 120, 300  # in CI: about 4 s each
WAIT_EVERY = 40  # sends, after which every request must have ended
PROMPTS = ("The sky is", "one two three", "Why?")

Record = Callable[..., None]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory, tiny_flags: tuple[str, ...]) -> Iterator[Service]:
    """A service whose answers are short: its context is 64 tokens, and its pages are few."""
    with Service(tmp_path_factory.mktemp("fuzzed"), *tiny_flags, *SHORT, "--log-level", "error") as running:
        yield running


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory, tiny_flags: tuple[str, ...]) -> Iterator[Restarted]:
    """The same, which is started again after a failure has ended it."""
    flags = (*tiny_flags, *SHORT, "--log-level", "error")
    with Restarted(lambda: Service(tmp_path_factory.mktemp("restarted"), *flags)) as found:
        yield found


@pytest.fixture
def campaign(request: pytest.FixtureRequest, seed: int) -> Campaign:
    """Two tests share the time."""
    return Campaign(float(request.config.getoption("--fuzz-seconds") or FULL_S) / 2, seed)


@pytest.fixture
def num_cases(request: pytest.FixtureRequest) -> int | None:
    given = request.config.getoption("--fuzz-cases")
    return None if given is None else int(given)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--seed"))


def run_cases(check: Callable[[Any], None], strategy: st.SearchStrategy[Any], num_cases: int, seed: int) -> int:
    """Make cases until there were so many. Returns how many there were."""
    seen = 0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(strategy)
    def run(case: Any) -> None:
        nonlocal seen
        seen += 1
        check(case)

    run()
    return seen


def answers(service: Service) -> list[Any]:
    """Tokens, greedy and drawn, of an engine that has nothing else to do."""
    found = []
    for text in PROMPTS:
        for temperature in (0.0, 1.0):
            sampling = {"temperature": temperature, "max_new_tokens": 24, "seed": 7, "ignore_eos": True}
            body = {"text": text, "sampling_params": sampling}
            reply = httpx.post(f"{service.url}/generate", json=body, timeout=60)
            found.append(reply.json()["output_ids"])
    return found


def check_nothing_is_left(service: Service, before: dict[str, Held], expected: list[Any]) -> dict[str, Any]:
    """Fail unless the engine is empty and answers as before. Returns the growth of each process's memory, in MB."""
    assert service.process.poll() is None, service.log()
    assert drained(service) == ""
    assert as_before(service, before) == ""
    assert answers(service) == expected
    assert service.get("/health").status_code == 200
    assert "Traceback" not in service.log(), service.log()[-4000:]
    return {role: round((now.rss - before[role].rss) / 1e6, 1) for role, now in held_by(service).items()}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_http_requests(fuzzed: Service, num_cases: int | None, seed: int, record_summary: Record) -> None:
    num_cases = num_cases or REQUESTS
    cases = http_cases(fuzzed.get("/openapi.json").json())
    expected, target = answers(fuzzed), HttpTarget(fuzzed.url)
    try:
        run_cases(target.check, cases, max(num_cases // 10, 20), seed + 1)  # threads and caches are there after it
        before, begun = held_by(fuzzed), time.monotonic()
        target.statuses.clear()
        seen = run_cases(target.check, cases, num_cases, seed)
        spent = time.monotonic() - begun
    finally:
        target.close()
    grown = check_nothing_is_left(fuzzed, before, expected)
    figures = {"cases": seen, "answers": dict(sorted(target.statuses.items())), "grown_mb": grown}
    record_summary("fuzzed_http", {**figures, "seed": seed, "seconds": round(spent, 1)})


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_frames(fuzzed: Service, num_cases: int | None, seed: int, record_summary: Record) -> None:
    num_cases = num_cases or FRAMES
    together = sendings()
    expected, num_frames, sends = answers(fuzzed), 0, 0
    with FrameTarget(fuzzed.endpoint) as target:

        def check(some: list[bytes]) -> None:
            nonlocal num_frames, sends
            target.check(some)
            num_frames, sends = num_frames + len(some), sends + 1
            if sends % WAIT_EVERY == 0:
                target.wait_for_the_open()
                target.junk_connection(some[0])

        run_cases(check, together, max(num_cases // 20, 20), seed + 1)
        before, begun = held_by(fuzzed), time.monotonic()
        target.answers.clear()
        num_frames = 0
        while num_frames < num_cases:
            run_cases(check, together, max((num_cases - num_frames) // 2, 20), seed + num_frames)
        target.wait_for_the_open()
        spent = time.monotonic() - begun
        grown = check_nothing_is_left(fuzzed, before, expected)
    figures = {"frames": num_frames, "answers": dict(sorted(target.answers.items())), "grown_mb": grown}
    record_summary("fuzzed_frames", {**figures, "seed": seed, "seconds": round(spent, 1)})


@pytest.mark.full
@pytest.mark.timeout(8 * 3600)
def test_requests_for_an_hour(restarted: Restarted, campaign: Campaign, record_summary: Record) -> None:
    statuses: Counter[str] = Counter()

    def check(case: HttpCase) -> None:
        restarted.of_http(statuses).check(case)

    cases = http_cases(restarted.service.get("/openapi.json").json())
    failures = campaign.run(check, cases, restarted.whats_wrong)
    figures = {**campaign.figures(), "answers": dict(sorted(statuses.items())), "grown_mb": restarted.grown_mb()}
    record_summary("fuzzed_http", {**figures, "restarts": restarted.num_restarts})
    assert not failures and max(figures["grown_mb"].values()) <= MOST_GROWN_MB, report(failures, figures)


@pytest.mark.full
@pytest.mark.timeout(8 * 3600)
def test_frames_for_an_hour(restarted: Restarted, campaign: Campaign, record_summary: Record) -> None:
    answers_seen: Counter[str] = Counter()
    num_frames = 0

    def check(some: list[bytes]) -> None:
        nonlocal num_frames
        num_frames += len(some)
        target = restarted.of_frames(answers_seen)
        target.check(some)
        if num_frames % WAIT_EVERY == 0:
            target.wait_for_the_open()
            target.junk_connection(some[0])

    failures = campaign.run(check, sendings(), restarted.whats_wrong)
    figures = {**campaign.figures(), "answers": dict(sorted(answers_seen.items())), "grown_mb": restarted.grown_mb()}
    record_summary("fuzzed_frames", {**figures, "frames": num_frames, "restarts": restarted.num_restarts})
    assert not failures and max(figures["grown_mb"].values()) <= MOST_GROWN_MB, report(failures, figures)


def report(failures: list[Failure], figures: dict[str, Any]) -> str:
    """All that failed, each with its smallest case and the seed of its round."""
    lines = [f"grown_mb: {figures['grown_mb']}"]
    lines += [f"--seed {each.seed}, {each.seen} times: {each.error}\n    {each.case}" for each in failures]
    return "\n".join(lines)


@pytest.mark.slow
def test_cases_differ_in_sort() -> None:
    """What would make the runs above say nothing: cases of one sort."""
    found: list[bytes] = []
    run_cases(found.append, frames(), 100, seed=0)
    decoder = msgspec.msgpack.Decoder(ToFrontendFromClient)
    sorts = Counter(sort_of(decoder, frame) for frame in found)
    assert sorts["malformed"] > 10 and len(sorts) >= 5, sorts


def sort_of(decoder: "msgspec.msgpack.Decoder[Any]", frame: bytes) -> str:
    try:
        return type(decoder.decode(frame)).__name__
    except Exception:  # whatever the bytes make the decoder say
        return "malformed"
