"""Takes each folder of `features/` and `entrypoints/` away, in a copy of the tree, and looks if the engine goes on.

    python tests/deletion/run.py                     every folder
    python tests/deletion/run.py features/grammar    these
    python tests/deletion/run.py --drawn 2           two that the tree chooses, so that they change with the code,
                                                     with the tests of the rooms that features attach to
    python tests/deletion/run.py --quick             without the engine's tests

What needs the folder goes with it (`entrypoints.NEEDS`). In the copy

    types      mypy passes on the engine, without what belongs to no other folder
    answers    an engine starts, and answers a completion and a chat as the whole one does
    refused    each flag and field of the folder is refused by its name
    tests      the engine's own tests pass

Tests of the folder are among the engine's. Such a test asks for what is gone: it imports it, or sets a field or a flag
of it. Its failure names the folder, and it is counted apart; any other failure is one. The exit status is 1 if
something is wrong. `--out`: a file for the summary.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from overlap_spec import entrypoints, features

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "overlap_spec"
ROOMS = ("client", "config", "frontend", "messages", "metrics", "models", "runtime", "sampling", "scheduler")
ENGINE = ("engine.py", "features", *ROOMS, "speculative", "worker")
TESTS = (
    *(f"tests/unit/{room}" for room in (*ROOMS, "speculative", "worker", "features")),
    *(f"tests/integration/test_ring{name}.py" for name in ("", "_methods", "_random_schedules", "_trees")),
)
TESTS_OF_DRAWN = (*(f"tests/unit/{room}" for room in ("scheduler", "worker", "features")), TESTS[-1])
QUICK = "not cuda and not full and not slow and not attack"
PASSED, SKIPPED, OF_FOLDER, FAILED = "passed", "skipped", "of the folder", "failed"
LIMIT_S = 1200.0
BUILT = (".venv", "build", "dist", "*.egg-info", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache")


@dataclass
class Outcome:
    """What a tree is without a folder. `problems`: empty if the folder can be taken away."""

    folder: str
    gone: list[str]  # with it
    passed: int = 0  # of the engine's tests
    of_folder: int = 0  # tests that ask for what is gone
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def folders() -> list[str]:
    """Every folder that can be taken away."""
    return [
        f"{room}/{path.name}"
        for room in ("features", "entrypoints")
        for path in sorted((PACKAGE / room).iterdir())
        if path.is_dir() and path.name != "__pycache__"
    ]


def gone_with(folder: str) -> list[str]:
    """The folder, and those that need it."""
    room, name = folder.split("/")
    needing = [other for other, needed in entrypoints.NEEDS.items() if name in needed] if room == "entrypoints" else []
    return [folder, *(f"entrypoints/{other}" for other in needing)]


def drawn(count: int) -> list[str]:
    """Folders that the package's own bytes choose."""
    seed = b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))
    return sorted(folders(), key=lambda name: hashlib.sha256(seed + name.encode()).hexdigest())[:count]


def copy_tree(target: Path) -> None:
    """Copy what git tracks; where there is no git, as in a tree that `.ci/run` has copied, what is not built."""
    if (ROOT / ".git").exists():
        subprocess.run([str(ROOT / ".ci" / "copy_tracked"), str(ROOT), str(target)], check=True)
    else:
        shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*BUILT))


def look(folder: str, copy: Path, whole: dict[str, str], tests: Sequence[str]) -> Outcome:
    """Take a folder away from a copy of the tree, and see what is left of the engine. `tests`: of the engine's."""
    begun, found = time.monotonic(), Outcome(folder, gone_with(folder))
    for each in found.gone:
        shutil.rmtree(copy / "overlap_spec" / each)
    run = Runner(copy, found)
    run.types()
    run.answers(whole)
    if tests:
        run.tests(tests)
    found.seconds = round(time.monotonic() - begun, 1)
    return found


class Runner:
    """Runs commands in a copy, and notes what is wrong."""

    def __init__(self, copy: Path, found: Outcome) -> None:
        self._copy = copy
        self._found = found

    def types(self) -> None:
        """The engine type-checks."""
        places = [f"overlap_spec/{name}" for name in ENGINE]
        ended = self._run("-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache"), *places)
        if ended.returncode:
            self._found.problems += [f"types: {line}" for line in ended.stdout.splitlines()[-4:]]

    def answers(self, whole: dict[str, str]) -> None:
        """The engine answers as the whole one, and refuses what is gone by name."""
        ended = self._run("-m", "support.without_features")
        if ended.returncode:
            self._found.problems.append(f"answers: {ended.stderr.strip().splitlines()[-1:]}")
            return
        answers: dict[str, str] = json.loads(ended.stdout)
        for name in ("tokens", "completion", "chat"):
            if name in answers and answers[name] != whole[name]:
                self._found.problems.append(f"{name}: {answers[name]!r}, not {whole[name]!r}")
        self._found.problems += [f"refused: {text}" for text in json.loads(answers["not refused"])]

    def tests(self, places: Sequence[str]) -> None:
        """The engine's tests pass, but for those of what is gone. What fails is run again alone: some are timed."""
        marks = ("-m", QUICK, "-q", "--continue-on-collection-errors")
        first = self._report(*marks, "-n", "2", "--dist", "worksteal", *places)
        if first is None:
            return
        outcomes = [self._outcome(case) for case in first]
        self._found.passed, self._found.of_folder = outcomes.count(PASSED), outcomes.count(OF_FOLDER)
        again = self._report(*marks, "--last-failed", *places) if FAILED in outcomes else ()
        for case in again or ():
            if self._outcome(case) == FAILED:
                self._found.problems.append(f"test: {case.get('classname')}::{case.get('name')}")

    def _report(self, *words: str) -> "list[ET.Element] | None":
        """The cases of a run of tests. None: they did not run, which is noted."""
        report = self._copy / "deletion.xml"
        ended = self._run("-m", "pytest", f"--junitxml={report}", *words)
        if ended.returncode not in (0, 1):  # all passed, or some failed
            self._found.problems += [f"tests: {line}" for line in (ended.stdout + ended.stderr).splitlines()[-4:]]
            return None
        return list(ET.parse(report).getroot().iter("testcase"))

    def _outcome(self, case: ET.Element) -> str:
        wrong = [each for each in case if each.tag in ("failure", "error")]
        if not wrong:
            return SKIPPED if len(case) else PASSED
        return OF_FOLDER if all(asks_for(self._found.gone, each.text or "") for each in wrong) else FAILED

    def _run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        path = os.pathsep.join(str(self._copy / name) for name in (".", "kernels", "tests"))
        environment = os.environ | {"PYTHONPATH": path}
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=self._copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )


def asks_for(gone: Iterable[str], text: str) -> bool:
    """Whether a test has failed because it asks for a folder that is gone.

    An import that fails must be one of the tests': the line before the error names one of their files.
    """
    for folder in gone:
        room, name = folder.split("/")
        kind = "feature" if room == "features" else "entry point"
        if re.search(rf"of the {kind} '{name}', which is not part of this installation", text):
            return True
        module = (
            rf"(No module named 'overlap_spec\.{room}\.{name}|cannot import name '{name}' from 'overlap_spec\.{room}')"
        )
        if re.search(rf"^tests/[^\n]*\n(?:[^\n]*\n){{0,4}}E +[^\n]*{module}", text, re.MULTILINE):
            return True
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    parser.add_argument("--drawn", type=int, metavar="N")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    assert not features.absent(), "the tree is not whole"
    chosen = drawn(arguments.drawn) if arguments.drawn else arguments.folders or folders()
    tests = () if arguments.quick else TESTS_OF_DRAWN if arguments.drawn else TESTS
    outcomes = []
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "source"
        copy_tree(source)
        whole = json.loads(Runner(source, Outcome("", []))._run("-m", "support.without_features").stdout)
        for folder in chosen:
            copy = Path(place) / "copy"
            shutil.copytree(source, copy)
            outcomes.append(look(folder, copy, whole, tests))
            shutil.rmtree(copy)
            print(line_of(outcomes[-1]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    return any(each.problems for each in outcomes)


def line_of(found: Outcome) -> str:
    """One line about a folder, and one for each problem."""
    others = f" with {', '.join(found.gone[1:])}" if found.gone[1:] else ""
    head = f"{found.folder:26} {found.passed:5} pass, {found.of_folder:4} are its own, {found.seconds:5.0f} s{others}"
    return "\n".join([head, *(f"    {problem}" for problem in found.problems)])


if __name__ == "__main__":
    sys.exit(main())
