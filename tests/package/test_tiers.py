"""README's command and `.ci/run` take turns: together they run every test that is neither `cuda` nor `full`, once."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ALL = "not cuda and not full"
OPTIONS = {"-n": 1, "--dist": 1, "-m": 1}  # and how many words follow; nothing else may narrow what is run
README, CI = ROOT / "README.md", ROOT / ".ci" / "run"


def marks_of(command: str) -> str:
    """What a `python -m pytest` selects, by marks alone."""
    words = shlex.split(command)
    given: dict[str, str] = {}
    while words:
        option = words.pop(0)
        assert OPTIONS.get(option) == 1 and option not in given, command
        given[option] = words.pop(0)
    return given["-m"]


def commands_in(path: Path) -> list[str]:
    """Arguments of every line that runs tests as CI does: in parallel, by marks."""
    return re.findall(r"^(?!#).*\.venv/bin/python -m pytest (-n [^;\n]*)", path.read_text(), re.MULTILINE)


def collected(marks: str) -> list[str]:
    """Names of all tests with those marks, in the order of a run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", marks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_ci_runs_the_rest_after_readmes_command() -> None:
    """By rule, for every combination of marks that a test can have."""
    (quick,), rest = commands_in(README), commands_in(CI)
    steps = re.search(r"set -- (.*)", CI.read_text())
    assert steps is not None and steps[1].split()[-4:] == ["tests", "deletion", "slow", "attacks"]
    assert "readme_command pytest" in CI.read_text()
    marks = ("cuda", "full", "slow", "attack")
    for number in range(1 << len(marks)):
        has = {name: bool(number >> place & 1) for place, name in enumerate(marks)}
        if has["attack"] and not (has["slow"] or has["full"]):
            continue  # an attack takes seconds: tests/attacks marks none of them so
        taken = [evaluated(marks_of(command), has) for command in (quick, *rest)]
        assert sum(taken) == evaluated(ALL, has), has


def evaluated(marks: str, has: dict[str, bool]) -> bool:
    """Of `and`, `or`, `not` and names, which mean in Python what they mean to pytest."""
    return bool(eval(marks, {"__builtins__": {}}, has))


@pytest.mark.full  # it collects all tests four times; the rule above says the same of every combination of marks
def test_each_test_is_in_one_of_the_tiers() -> None:
    (quick,), rest = commands_in(README), commands_in(CI)
    of_tiers = [test for command in (quick, *rest) for test in collected(marks_of(command))]
    assert sorted(of_tiers) == sorted(collected(ALL))


def test_what_is_not_collected_has_no_test_of_the_tier() -> None:
    """Files that never give a mark are passed over, so no other file may give it to their tests."""
    others = [path for path in ROOT.glob("tests/**/*.py") if not path.name.startswith(("test_", "check_"))]
    giving = [path for path in others if re.search(r"mark\.(slow|attack)\b(?!_but_every)", path.read_text())]
    assert [path.relative_to(ROOT).as_posix() for path in giving] == ["tests/conftest.py"]
    assert "slow_but_every" in giving[0].read_text(), "which a test's own file names"


def test_a_command_that_leaves_more_out_is_noticed() -> None:
    with pytest.raises(AssertionError):
        marks_of('-n 2 -m "not slow" tests/unit')
