"""The proof that a feature can be taken away: its folder is hidden, and the engine answers and refuses by name."""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support.without_features import FIELDS

from overlap_spec import features

TESTS = Path(__file__).parents[1]
FOLDERS = sorted(
    path.name for path in Path(features.__path__[0]).iterdir() if path.is_dir() and path.name != "__pycache__"
)


@cache
def engines() -> "subprocess.Popen[str]":
    """A process whose forks are engines. It ends with this one."""
    path = os.pathsep.join([str(TESTS), *sys.path])
    command = [sys.executable, "-m", "support.without_features", "-"]
    piped = subprocess.PIPE
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stdin=piped, stdout=piped, text=True)
    atexit.register(process.communicate)
    return process


@cache
def answers(*hidden: str) -> dict[str, str]:
    """Of an engine, in a process of its own, that has all folders but these."""
    process = engines()
    assert process.stdin is not None and process.stdout is not None
    print(*hidden, file=process.stdin, flush=True)
    told: dict[str, str] | None = json.loads(process.stdout.readline())
    assert told is not None, "stderr has its error"
    return told


def test_every_folder_of_features_is_in_the_table() -> None:
    assert set(FOLDERS) <= set(features.NAMES)


def check(*hidden: str) -> None:
    whole, without = answers(), answers(*(f"features/{name}" for name in hidden))
    for name in ("completion", "chat"):
        assert without[name] == whole[name] != ""
    for field in FIELDS:
        owner = f"of the feature {field!r}, which is not part of this installation"
        assert (owner in without[field]) == (field in hidden), without[field]


def test_an_engine_without_any_feature_answers_as_one_with_all() -> None:
    check(*FOLDERS)


@pytest.mark.full_but_every(6)
@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_an_engine_without_one_feature_answers_as_one_with_all(folder: str) -> None:
    check(folder)
