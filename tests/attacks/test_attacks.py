"""One client attacks a real server; another one streams beside it, and must not notice.

    python -m pytest -m attack tests/attacks --summaries benchmarks/results/attacks_cpu.json
    python -m pytest -m attack tests/attacks --cases worst --summaries benchmarks/results/attacks_h200.json

The first runs every case on every server that it concerns, in about twenty minutes; the second, on a GPU, the ten
worst. `.ci/run` runs every finding once (`-m "attack and not full"`). What a case asserts: `support/attacks/play.py`.
"""

import time
from pathlib import Path

import pytest
from support.attacks.all_cases import CASES, WORST
from support.attacks.case import Case
from support.attacks.play import play
from support.attacks.servers import SERVERS, AttackedServer
from support.attacks.summary import note

TRIES = 3  # of a case in which the victim only waited too long: other programs take the cores at times
PAUSE_S = 5.0  # before another try


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = metafunc.config.getoption("--cases")
    cases = [case for case in CASES if chosen != "worst" or case.name in WORST]
    given = [
        pytest.param(case, kind, id=f"{kind}-{case.name}", marks=_marks(case, kind))
        for kind in SERVERS
        for case in cases
        if kind in (case.servers[:1] if chosen == "worst" else case.servers)
    ]
    metafunc.parametrize(("case", "kind"), given)


def _marks(case: Case, kind: str) -> list[pytest.MarkDecorator]:
    in_ci = case.finding is not None and kind == case.ci_server
    return [pytest.mark.attack, pytest.mark.slow if in_ci else pytest.mark.full]


@pytest.mark.timeout(600)
def test_attack(case: Case, attacked: AttackedServer, is_quiet: bool, request: pytest.FixtureRequest) -> None:
    played, tries = play(case, attacked, is_quiet), 1
    while played.failures and played.only_late and tries < TRIES:
        time.sleep(PAUSE_S)
        played, tries = play(case, attacked, is_quiet), tries + 1
    summaries = request.config.getoption("--summaries")
    if summaries is not None:
        note(Path(summaries), case, attacked.kind, {**played.figures(), "tries": tries})
    if played.failures:
        attacked.replace()
        pytest.fail("\n".join([f"{case.label}: {case.name}", *played.failures]), pytrace=False)
