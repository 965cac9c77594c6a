"""Takes each folder of `features/` and `entrypoints/` away, in a copy of the tree, and looks if the engine goes on.

    python tests/deletion/run.py                     every folder
    python tests/deletion/run.py features/grammar    these
    python tests/deletion/run.py --drawn 2           two that the tree chooses, so that they change with the code; the
                                                     tests of the rooms that features attach to run without the first
    python tests/deletion/run.py --parts types answers    without the engine's tests
    python tests/deletion/run.py --jobs 25 --out tests/deletion/matrix.json    so many folders side by side
    python tests/deletion/run.py --jobs 7 --left --out FILE    folders and parts that are not in the file

What needs the folder goes with it (`entrypoints.NEEDS`). In the copy

    types      mypy passes on the engine, without what belongs to no other folder, and nothing imports what is gone
    answers    an engine starts, and answers a completion and a chat as the whole one does; each flag, field, path and
               command of the folder is refused by its name
    tests      the engine's own tests pass: those whose files can reach the room of the folder (`reach.py`); the others
               run the same code with the folder and without it

Tests of the folder are among the engine's. Such a test asks for what is gone: it imports it, or sets a field or a flag
of it. Its failure names the folder, and it is counted apart. Any other failure is run again alone, as some tests are
timed, and then in the whole tree: one that fails there too is listed, and is no problem of the folder's. Nor is a line
of mypy about the whole tree. The exit status is 1 if something is wrong.

`--out`: a file for the summary, written after each part. What it has of other folders and parts stays in it, each with
the tree that it was found in, so that several calls, on several machines, can share it.
"""

import argparse
import ast
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deletion.reach import Reach
from overlap_spec import entrypoints, features
from overlap_spec.runtime.source import describe_source

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "overlap_spec"
ROOMS_OF_FOLDERS = ("features", "entrypoints")
ROOMS = ("client", "config", "frontend", "messages", "metrics", "models", "runtime", "sampling", "scheduler")
ENGINE = ("engine.py", "features", *ROOMS, "speculative", "worker")
TESTS = (
    *(f"tests/unit/{room}" for room in (*ROOMS, "speculative", "worker", "features")),
    *(f"tests/integration/test_ring{name}.py" for name in ("", "_methods", "_random_schedules", "_trees")),
)
WIDTHS = "--ignore-glob=*test_scheduler_width*"  # 200 tests of a feature's policy, which asks no other folder
TESTS_OF_DRAWN = (*(f"tests/unit/{room}" for room in ("scheduler", "worker", "features")), TESTS[-1], WIDTHS)
QUICK = "not cuda and not full and not slow and not attack"
PARTS = ("answers", "tests", "types")
PASSED, SKIPPED, OF_FOLDER, FAILED = "passed", "skipped", "of the folder", "failed"
BUILT = (
    *(".venv", "build", "dist", "*.egg-info", ".mypy_cache", ".ruff_cache", ".pytest_cache"),
    *(".hypothesis", ".carry", ".whl"),
)
OF_PYTEST = "*-pytest-*.pyc"  # names the tree's files in tracebacks; other bytecode is as good in a copy
ENDED_BY_TIME = 124
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")


@dataclass
class Part:
    """What one part found: its figures, and what is wrong."""

    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Outcome:
    """What a tree is without a folder, and those that go with it. It can be taken away if no part has a problem."""

    folder: str
    gone: list[str]
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """Of all parts."""
        return [f"{name}: {problem}" for name, part in self.parts.items() for problem in part.problems]


class Settings(NamedTuple):
    """How folders are looked at. `tests`: of the engine's. `workers`: processes that run one folder's tests."""

    parts: Sequence[str] = PARTS
    tests: Sequence[str] = TESTS
    workers: int = 2
    limit_s: float = 1200.0  # of a command
    environment: Mapping[str, str] = {}


def folders() -> list[str]:
    """Every folder that can be taken away."""
    return [
        f"{room}/{path.name}"
        for room in ROOMS_OF_FOLDERS
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
        shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*BUILT, OF_PYTEST))


def of_tree(path: str) -> bool:
    """Whether modules of a whole tree would be found there."""
    return Path(path).resolve().is_relative_to(ROOT) or (Path(path) / "overlap_spec").exists()


class Tree:
    """A copy of the tree, in which commands run."""

    def __init__(self, copy: Path, settings: Settings) -> None:
        self.copy = copy
        self._settings = settings

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """A module of Python's to its end. It is ended, with all that it has started, when its time is over."""
        path = [str(self.copy / name) for name in (".", "kernels", "tests")]
        path += [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and not of_tree(each)]
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=self.copy,
            env=os.environ | self._settings.environment | {"PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            said = process.communicate(timeout=self._settings.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            said = (out, f"{words[0]} did not end within {self._settings.limit_s:.0f} s")
            return subprocess.CompletedProcess(words, ENDED_BY_TIME, *said)
        return subprocess.CompletedProcess(words, process.returncode, *said)

    def answers(self) -> dict[str, str]:
        """What an engine answers. Raises: RuntimeError if it does not."""
        ended = self.run("support.without_features")
        if ended.returncode:
            raise RuntimeError(" ".join(ended.stderr.strip().splitlines()[-1:]))
        found: dict[str, str] = json.loads(ended.stdout)
        return found

    def type_errors(self, cache: Path) -> list[str]:
        """What mypy says of the engine. Raises: RuntimeError if it does not run."""
        places = [f"overlap_spec/{name}" for name in ENGINE]
        version = "{}.{}".format(*sys.version_info)
        ended = self.run("mypy", f"--cache-dir={cache}", "--no-error-summary", f"--python-version={version}", *places)
        lines = ended.stdout.splitlines()
        if ended.returncode not in (0, 1) or ended.returncode and not lines:  # as without mypy
            raise RuntimeError(" ".join((ended.stdout + ended.stderr).strip().splitlines()[-2:]))
        return lines if ended.returncode else []

    def cases(self, *words: str) -> "list[ET.Element]":
        """Of a run of tests. Raises: RuntimeError if they do not run."""
        report, temporary = self.copy / "deletion.xml", self.copy.with_name(f"{self.copy.name}t")
        options = (f"--junitxml={report}", f"--basetemp={temporary}", "-m", QUICK, "-q")
        ended = self.run("pytest", *options, *words)
        shutil.rmtree(temporary, ignore_errors=True)
        if ended.returncode not in (0, 1):  # all passed, or some failed
            raise RuntimeError(" ".join((ended.stdout + ended.stderr).splitlines()[-4:]))
        return list(ET.parse(report).getroot().iter("testcase"))


class WholeTree:
    """The tree with all its folders, beside which those without one are looked at."""

    def __init__(self, place: Path, settings: Settings) -> None:
        self.copy = place / "whole"
        copy_tree(self.copy)
        self._tree = Tree(self.copy, settings)
        self._cache = place / "cache"
        self._settings = settings
        self._asks, self._checks, self._reaches, self._tests = (threading.Lock() for _ in range(4))  # one for each
        if (ROOT / ".mypy_cache").exists():
            shutil.copytree(ROOT / ".mypy_cache", self._cache)

    @functools.cached_property
    def _answers(self) -> dict[str, str]:
        return self._tree.answers()

    @functools.cached_property
    def _type_errors(self) -> list[str]:
        return self._tree.type_errors(self._cache)

    @functools.cached_property
    def _reaching(self) -> dict[str, tuple[list[str], int]]:
        reach = Reach(self.copy)
        return {room: reach.files(self._settings.tests, room) for room in ROOMS_OF_FOLDERS}

    def tests_of(self, folder: str) -> tuple[list[str], int]:
        """Files of tests that can reach the folder's room, and how many of the engine's do not."""
        with self._reaches:
            return self._reaching[folder.split("/")[0]]

    def answers(self) -> dict[str, str]:
        """What an engine answers, which is asked once."""
        with self._asks:
            return self._answers

    def type_errors(self) -> list[str]:
        """What mypy says of the tree, likewise."""
        with self._checks:
            return self._type_errors

    def cache_in(self, target: Path) -> Path:
        """A copy of mypy's cache, which is made first if there is none."""
        if not self._cache.exists():
            self.type_errors()
        with self._checks:
            shutil.copytree(self._cache, target)
        return target

    def failing(self, tests: Sequence[str]) -> set[str]:
        """The names of those of these tests that fail here too."""
        with self._tests:
            cases = self._tree.cases("-p", "no:cacheprovider", *tests)
        return {name_of(case) for case in cases if wrong_in(case)}


class Look:
    """What is left of the engine in a copy without a folder, part by part."""

    def __init__(self, folder: str, place: Path, whole: WholeTree, settings: Settings) -> None:
        self._copy = place / str(folders().index(folder))  # short: tests put sockets beside it
        self._whole = whole
        self._settings = settings
        self._tree = Tree(self._copy, settings)
        self._gone = gone_with(folder)
        self._folder = folder

    def outcome(self, told: Callable[[Outcome], None]) -> Outcome:
        """Of all parts, each told as soon as it is there; the copy is gone afterwards."""
        shutil.copytree(self._whole.copy, self._copy)
        for each in self._gone:
            shutil.rmtree(self._copy / "overlap_spec" / each)
        found = Outcome(self._folder, self._gone)
        looks = {"answers": self._answers, "tests": self._tests, "types": self._types}
        for name in self._settings.parts:
            begun = time.monotonic()
            try:
                found.parts[name] = looks[name]()
            except RuntimeError as error:
                found.parts[name] = Part(problems=[str(error)])
            found.parts[name].seconds = round(time.monotonic() - begun, 1)
            told(found)
        shutil.rmtree(self._copy)
        return found

    def _types(self) -> Part:
        """mypy would find what is gone where the package is installed, too: imports are looked at apart."""
        imports = imports_of(self._gone, self._copy / "overlap_spec")
        lines = self._tree.type_errors(self._whole.cache_in(self._copy / ".mypy_cache"))
        known = self._whole.type_errors() if lines else []
        new = [line for line in lines if line not in known]
        return Part({"lines_about_the_whole_tree": len(lines) - len(new)}, [*imports, *new])

    def _answers(self) -> Part:
        answers, whole = self._tree.answers(), self._whole.answers()
        compared = [name for name in ("tokens", "completion", "chat") if name in answers]
        problems = [
            f"{name}: {answers[name]!r}, not {whole[name]!r}" for name in compared if answers[name] != whole[name]
        ]
        problems += [f"not refused: {what}" for what in json.loads(answers["not refused"])]
        return Part({"compared": compared, "refused": json.loads(answers["refused"])}, problems)

    def _tests(self) -> Part:
        """Those that fail are run again alone, then in the whole tree."""
        places, others = self._whole.tests_of(self._folder)
        again = "--continue-on-collection-errors"  # tests of the folder, which import it
        first = self._tree.cases(again, "-n", str(self._settings.workers), "--dist", "worksteal", *places)
        counts = Counter(self._ended(case) for case in first)
        wrong: set[str] = set()
        if counts[FAILED]:
            wrong = {
                name_of(case)
                for case in self._tree.cases(again, "--last-failed", *places)
                if self._ended(case) == FAILED
            }
        there: set[str] = set()
        if wrong:
            kept = json.loads((self._copy / ".pytest_cache" / "v" / "cache" / "lastfailed").read_text())
            there = wrong & self._whole.failing([each for each in kept if name_in_report(each) in wrong])
        figures = {
            PASSED: counts[PASSED] + counts[FAILED] - len(wrong),
            OF_FOLDER: counts[OF_FOLDER],
            SKIPPED: dict(Counter(reason_of(case) for case in first if self._ended(case) == SKIPPED)),
            "failed in the whole tree too": sorted(there),
            "files": {"run": len(places), "that cannot reach it": others},
        }
        return Part(figures, sorted(wrong - there))

    def _ended(self, case: ET.Element) -> str:
        wrong = wrong_in(case)
        if not wrong:
            return SKIPPED if case.find("skipped") is not None else PASSED
        return OF_FOLDER if all(asks_for(self._gone, each.text or "") for each in wrong) else FAILED


def imports_of(gone: Iterable[str], package: Path) -> list[str]:
    """Imports of the engine that name a folder that is gone."""
    names = {f"overlap_spec.{each.replace('/', '.')}" for each in gone}
    places = [package / name for name in ENGINE]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    found = []
    for file in files:
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if any(name.rpartition(".")[2] in text for name in names) else ():
            for module in modules_of(node):
                if any(module == name or module.startswith(f"{name}.") for name in names):
                    found.append(f"{file.relative_to(package.parent)} imports {module}")
    return found


def modules_of(node: ast.AST) -> list[str]:
    """What an import may name: modules, and names in them."""
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        return [f"{node.module}.{each.name}" for each in node.names]
    return []


def wrong_in(case: ET.Element) -> list[ET.Element]:
    """Failures and errors of a test."""
    return [each for each in case if each.tag in ("failure", "error")]


def reason_of(case: ET.Element) -> str:
    """Why a test was skipped."""
    skipped = case.find("skipped")
    return "" if skipped is None else skipped.get("message", "")


def name_of(case: ET.Element) -> str:
    """Of a test, or of a file that cannot be imported, in a report."""
    return f"{case.get('classname')}::{case.get('name')}" if case.get("classname") else f"{case.get('name')}"


def name_in_report(test: str) -> str:
    """What `name_of` gives for a test that pytest names so."""
    file, found, name = test.partition("::")
    return file.removesuffix(".py").replace("/", ".") + found + name


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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="folders side by side, each on one core")
    parser.add_argument("--limit", type=float, default=1200.0, metavar="SECONDS", help="of each command")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that run the tests of one folder")
    parser.add_argument("--left", action="store_true", help="only folders and parts that are not in the file")
    parser.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    assert not features.absent() and not entrypoints.absent(), "the tree is not whole"
    chosen = drawn(arguments.drawn) if arguments.drawn else arguments.folders or folders()
    if unknown := {*chosen} - {*folders()}:
        parser.error(f"no folder of features or entry points: {', '.join(sorted(unknown))}")
    tests = TESTS_OF_DRAWN if arguments.drawn else TESTS
    alone = arguments.jobs == 1
    workers = arguments.workers or (2 if alone or arguments.drawn else 1)
    settings = Settings(arguments.parts, tests, workers, arguments.limit, {} if alone else ONE_THREAD)
    outcomes, writes = [], threading.Lock()

    def told(found: Outcome) -> None:
        with writes:
            if arguments.out is not None:
                write_summary(arguments.out, [found])

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(arguments.jobs) as pool:
        whole = WholeTree(place := Path(directory), settings)
        if "types" in settings.parts and not alone:
            pool.submit(whole.type_errors)  # for mypy's cache, while tests run
        wanted = {name: [each for each in settings.parts if each != "tests" or not arguments.drawn] for name in chosen}
        wanted[chosen[0]] = settings.parts
        left = {name: parts_left(arguments.out if arguments.left else None, name, wanted[name]) for name in chosen}
        looks = [
            pool.submit(Look(name, place, whole, settings._replace(parts=parts)).outcome, told)
            for name, parts in left.items()
            if parts
        ]
        for look in as_completed(looks):
            outcomes.append(look.result())
            print(line_of(outcomes[-1]), flush=True)
    wrong = [each.folder for each in outcomes if each.problems]
    print(f"{len(outcomes)} folders of {len(folders())}, problems in {len(wrong)}: {', '.join(wrong) or 'none'}")
    return bool(wrong)


@functools.cache
def described() -> dict[str, Any]:
    """The commit and the trees that all outcomes of a run are of."""
    return describe_source(f"tests/{room}" for room in ("integration", "support", "unit")).describe()


def parts_left(file: Path | None, folder: str, parts: Iterable[str]) -> list[str]:
    """Those of the parts that a summary does not have of a folder."""
    kept = json.loads(file.read_text())["folders"] if file is not None and file.exists() else {}
    return [part for part in parts if part not in kept.get(folder, {})]


def write_summary(file: Path, outcomes: Iterable[Outcome]) -> None:
    """Write what was found in the place of what the file has of the same folders and parts."""
    source = described()
    tree = hashlib.sha256(json.dumps(source["source"]["trees"], sort_keys=True).encode()).hexdigest()[:12]
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    found: dict[str, Any] = kept.get("folders", {})
    on = f"Python {platform.python_version()}, torch {version('torch')}"
    for each in outcomes:
        parts = {name: asdict(part) | {"on": on, "tree": tree} for name, part in each.parts.items()}
        found[each.folder] = found.get(each.folder, {}) | {"gone": each.gone} | parts
    found = {folder: found[folder] for folder in folders() if folder in found}
    named = {part["tree"] for each in found.values() for part in each.values() if isinstance(part, dict)}
    trees = kept.get("trees", {}) | {tree: {"commit": source["commit"], **source["source"]["trees"]}}
    trees = {name: trees[name] for name in trees if name in named}
    file.write_text(json.dumps({"trees": trees, "places of tests": TESTS, "folders": found}, indent=1) + "\n")


def line_of(found: Outcome) -> str:
    """One line about a folder, and one for each problem."""
    words = []
    if answers := found.parts.get("answers"):
        words.append(f"{len(answers.figures.get('refused', ())):3} refused")
    if tests := found.parts.get("tests"):
        counts = {name: tests.figures.get(name, 0) for name in (PASSED, OF_FOLDER)}
        words += [f"{count:5} {name}" for name, count in counts.items()]
        words.append(f"{sum(tests.figures.get(SKIPPED, {}).values()):3} skipped")
        words.append(f"{len(tests.figures.get('failed in the whole tree too', ()))} fail in the whole tree too")
    words.append(f"{sum(part.seconds for part in found.parts.values()):4.0f} s")
    others = f", with {', '.join(found.gone[1:])}" if found.gone[1:] else ""
    return "\n".join([f"{found.folder:26}{', '.join(words)}{others}", *(f"    {each}" for each in found.problems)])


if __name__ == "__main__":
    sys.exit(main())
