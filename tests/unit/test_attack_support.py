"""What judges attacks and fuzzed cases: a long wait, a failure and its smallest case are found."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from documents.attacks import attacks_table
from hypothesis import strategies as st
from support.attacks.all_cases import CASES, WORST
from support.attacks.attacker import Reply
from support.attacks.case import Case, answered_or_refused, refused
from support.attacks.memory import MIB, bytes_of, settle
from support.attacks.play import FORBIDDEN, Played, _judge_gaps
from support.attacks.servers import SERVERS
from support.attacks.victim import Waits
from support.fuzz.campaign import Campaign, kind_of


def reply(status: int, message: str, param: str | None = None) -> Reply:
    shown = "null" if param is None else f'"{param}"'
    return Reply(status, f'{{"error":{{"message":"{message}","param":{shown}}}}}')


def test_a_refusal_names_field_and_limit() -> None:
    good = reply(400, "stop strings have at most 1,000 characters, one has 3", "stop")
    assert refused(good, "stop", "1,000") == "400 `stop`"
    for wrong in (("stop", "2,000"), ("bad_words", "1,000")):
        with pytest.raises(AssertionError, match="does not"):
            refused(good, *wrong)
    with pytest.raises(AssertionError, match="expected 400"):
        refused(reply(500, "stop 1,000", "stop"), "stop")
    with pytest.raises(AssertionError, match="expected 400"):
        answered_or_refused(Reply(0, "no answer"), "stop")


def test_a_wait_counts_before_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    waits = Waits()
    waits.begin()
    now[0] = 1.0
    waits.event(more=True)
    now[0] = 4.0
    assert waits.take() == (3.0, 1)  # the second wait goes on
    now[0] = 4.5
    waits.begin()  # again, after a failure: the wait has begun at 4.0
    now[0] = 6.0
    waits.event(more=False)
    now[0] = 9.0
    assert waits.take() == (2.0, 1)


async def _nothing(attacker: object) -> str:
    return ""


CASE = Case("x", 1, _nothing)


def played(honest_s: float, attacked_s: float, errors: dict[str, int] | None = None) -> Played:
    rows = [
        {"stream_s": seconds, "small_s": 0.0, "errors": found}
        for seconds, found in ((honest_s, {}), (attacked_s, errors or {}))
    ]
    return Played(honest=rows[0], attacked=rows[1])


@pytest.mark.parametrize(
    ("case", "seconds", "quiet", "is_late"),
    [
        (CASE, (0.1, 0.34), False, False),
        (CASE, (0.1, 0.36), False, True),
        (dataclasses.replace(CASE, least_s=0.5), (0.1, 0.74), False, False),
        (CASE, (0.01, 0.044), True, False),
        (CASE, (0.01, 0.046), True, True),
    ],
)
def test_a_late_victim(case: Case, seconds: tuple[float, float], quiet: bool, is_late: bool) -> None:
    found = played(*seconds)
    _judge_gaps(case, found, quiet)
    assert bool(found.failures) == is_late and found.only_late


def test_an_error_of_the_victim_is_no_lateness() -> None:
    found = played(0.1, 0.1, {"stream: cut off": 1})
    _judge_gaps(CASE, found, quiet=False)
    assert found.failures and not found.only_late


@pytest.mark.parametrize(
    "line", ["Traceback (most recent call last):", "recovered from the death", "worker has failed"]
)
def test_lines_that_no_attack_may_cause(line: str) -> None:
    assert FORBIDDEN.search(f"12:00 INFO x: {line}") and not FORBIDDEN.search('"POST /v1/completions" 400 2 ms: stop')


def test_memory_of_a_process() -> None:
    own = bytes_of(os.getpid())
    code = f"import time; kept = bytes({64 * MIB}); kept = b'x' * {64 * MIB}; print(1, flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        assert bytes_of(child.pid) > 64 * MIB
    finally:
        child.kill()
        child.communicate()
    assert own > MIB and bytes_of(child.pid) == 0


def test_memory_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.attacks.memory.memory_of", lambda main: {"main": 5 * MIB, "frontend": 300 * MIB})
    assert settle(1, {"main": 5 * MIB, "frontend": 50 * MIB}, 100 * MIB, 0.0) == {"main": 0, "frontend": 250 * MIB}


def test_every_finding_and_two_variants_of_each_rule() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) and set(names) >= WORST
    assert sorted(case.finding for case in CASES if case.finding) == list(range(1, 21))
    for rule in range(1, 12):
        assert len([case for case in CASES if case.rule == rule and case.finding is None]) >= 2, rule
    assert all(set(case.servers) <= set(SERVERS) for case in CASES)


def run(campaign: Campaign, check: Callable[[Any], None], wrong: str = "") -> Campaign:
    campaign.run(check, st.integers(0, 1000), lambda: wrong)
    return campaign


@pytest.mark.slow
def test_a_campaign_notes_failures_and_goes_on() -> None:
    def check(case: int) -> None:
        assert case < 50, "beyond fifty" if case % 2 else "even, too"

    found = run(Campaign(2.0, seed=3), check).failures
    assert {(kind, each.case) for kind, each in found.items()} == {
        ("AssertionError: beyond fifty", "51"),
        ("AssertionError: even, too", "50"),
    }
    assert min(each.seed for each in found.values()) == 3 and max(each.seen for each in found.values()) > 1


@pytest.mark.slow
def test_what_is_wrong_after_a_round_is_noted() -> None:
    assert [each.error for each in run(Campaign(0.01, 0), lambda case: None, "a traceback").failures.values()] == [
        "a traceback"
    ]


def test_failures_of_one_kind() -> None:
    assert kind_of(AssertionError("status 500 of 'a'")) == kind_of(AssertionError("status 501 of 'b'"))
    assert kind_of(AssertionError("no answer")) != kind_of(AssertionError("a traceback"))


def test_the_table_shows_what_fails(tmp_path: Any) -> None:
    row = {"rule": 4, "finding": 1, "commit": "c" * 12, "outcome": "400 `stop`", "peak_mib": 7, "failures": []}
    row |= {"gap_ms": 90, "small_ms": 120, "honest_gap_ms": 40, "honest_small_ms": 30}
    of_servers = {"ngram": {**row, "failures": ["late"]}, "plain": {**row, "gap_ms": 200}}
    ran = {
        "cpu": "a CPU",
        "device": "cpu",
        "commit": "c" * 12,
        "python": "3.11",
        "versions": {"torch": "2"},
        "command": "pytest",
    }
    file = tmp_path / "attacks_cpu.json"
    file.write_text(json.dumps({"attacks": {"run": ran, "cases": {"a-b": of_servers}}}))
    table = attacks_table(file).splitlines()
    assert table[2] == "| a b | 4 | 400 `stop` **fails on ngram** | plain, ngram | 200 / 120 | 40 / 40 | 7 |"
    assert table[-1].startswith("1 attacks; a CPU, two busy cores; commit cccccccccccc;")
