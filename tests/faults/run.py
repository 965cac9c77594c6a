"""Plants each fault of `planted/*.toml`, alone in a copy of the tree, and runs the tests that must fail with it.

    python tests/faults/run.py [--jobs 2] [--only WORD ..]

A fault is one decision that is made wrong: a bound, an index, an order, a comparison, something left out. Nothing is
raised by it, and every module can still be imported. The tests it names pass without it, and are part of README's
command. A fault that no longer applies, that survives its tests, or with which they hang, is a failure, and the exit
status is 1. `--only`: faults whose file, room or reason has one of these words.
"""

import argparse
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
QUICK = "not cuda and not full and not slow"  # as README's command
LIMIT_S = 120.0  # for the tests of a fault
BASELINE_LIMIT_S = 900.0  # for all tests that faults name, without a fault
FORKED = multiprocessing.get_context("forkserver")  # what most tests import is imported once
FORKED.set_forkserver_preload(["pytest", "torch", "triton", "tokenizers", "zmq"])
KILLED, SURVIVED, HUNG, BROKEN, STALE = "killed", "survived", "hung", "broken", "stale"


@dataclass(frozen=True)
class Fault:
    """`before` occurs once in the file; `drawn`: `draw.py` has found it."""

    path: str
    before: str
    after: str
    tests: tuple[str, ...]
    why: str
    drawn: bool = False

    @property
    def room(self) -> str:
        """The directory that the decision is made in, below the package; `kernels`, or `benchmarks`."""
        package, _, rest = self.path.removeprefix("kernels/").rpartition("/")[0].partition("/")
        return {"overlap_spec": rest, "overlap_spec_kernels": "kernels"}.get(package, package)

    @property
    def name(self) -> str:
        """Its file, and the first line that it changes."""
        pairs = zip(self.before.splitlines(), self.after.splitlines(), strict=False)
        changed = next((old for old, new in pairs if old != new), self.before.splitlines()[-1])
        return f"{self.path}: {changed.strip()}"


@dataclass(frozen=True)
class Outcome:
    """What became of a fault, the seconds that it took, and of a failure the end of the output."""

    fault: Fault
    verdict: str
    seconds: float
    output: str = ""


def planted() -> list[Fault]:
    """Every fault, in the order of the files."""
    found = []
    for file in sorted((HERE / "planted").glob("*.toml")):
        for entry in tomllib.loads(file.read_text()).get("fault", []):
            tests = tuple(entry.pop("tests"))
            found.append(Fault(**entry, tests=tests, drawn=file.stem == "drawn"))
    return found


def with_fault(text: str, fault: Fault) -> str | None:
    """The file with the fault in it; None if the fault does not apply to it."""
    return text.replace(fault.before, fault.after) if text.count(fault.before) == 1 else None


class Copy:
    """A copy of the tracked files, for one fault at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        subprocess.run([ROOT / ".ci" / "copy_tracked", ROOT, path], check=True, stderr=subprocess.DEVNULL)

    def judge(self, fault: Fault) -> Outcome:
        """Plant it, run its tests, and put the file back."""
        began, file = time.monotonic(), self._path / fault.path
        right = file.read_text() if file.exists() else ""
        wrong = with_fault(right, fault)
        if wrong is None:
            return Outcome(fault, STALE, 0.0)
        try:
            self._write(file, wrong)
            verdict, output = self.run(fault.tests, LIMIT_S, "-n", "0", "-x")
        finally:
            self._write(file, right)
        return Outcome(fault, verdict, time.monotonic() - began, output)

    def run(self, tests: Sequence[str], limit_s: float, *options: str) -> tuple[str, str]:
        """Returns what the tests make of a fault, and the end of what they print."""
        arguments = ["-q", "-p", "no:cacheprovider", "-m", QUICK, *options, *tests]
        with tempfile.NamedTemporaryFile() as printed:
            process = FORKED.Process(target=_run_pytest, args=(self._path, arguments, printed.name))
            process.start()
            process.join(limit_s)
            if process.exitcode is None:
                os.killpg(process.ident or 0, signal.SIGKILL)  # and the processes that its tests have started
                process.join()
            output = Path(printed.name).read_text(errors="replace")
        if process.exitcode == -signal.SIGKILL:
            return HUNG, output[-2000:]
        if process.exitcode == 1 and "\nFAILED " in output:
            return KILLED, ""
        return (BROKEN if process.exitcode else SURVIVED), output[-2000:]

    def _write(self, file: Path, text: str) -> None:
        """Its compiled form may be as new, and as long, so it goes."""
        file.write_text(text)
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            compiled.unlink()


def _run_pytest(tree: Path, arguments: Sequence[str], output: str) -> None:
    """In a process of its own, which has imported nothing of any tree."""
    os.setsid()
    os.chdir(tree)
    with open(output, "wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    roots = [str(tree), str(tree / "kernels")]
    os.environ["PYTHONPATH"] = os.pathsep.join(roots)  # of processes that tests start
    sys.path[:0] = roots
    sys.exit(pytest.main([*arguments]))


def judged(faults: Sequence[Fault], copies: Sequence[Copy]) -> Iterator[Outcome]:
    """Judge each fault in the first copy that is free."""
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def judge(fault: Fault) -> Outcome:
        copy = free.get()
        try:
            return copy.judge(fault)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        yield from pool.map(judge, faults)


def chosen(faults: Sequence[Fault], words: Sequence[str]) -> list[Fault]:
    """Those that have one of the words; all without any."""
    return [fault for fault in faults if not words or any(word in f"{fault.name} {fault.why}" for word in words)]


def report(outcomes: Sequence[Outcome], seconds: float) -> int:
    """Print how many faults of each room were killed. Returns the exit status."""
    planted_in, killed_in = Counter[str](), Counter[str]()
    for outcome in outcomes:
        planted_in[outcome.fault.room] += 1
        killed_in[outcome.fault.room] += outcome.verdict == KILLED
    for room, count in sorted(planted_in.items()):
        print(f"{room or 'overlap_spec':32} {killed_in[room]:3} of {count:3} killed")
    print(f"{killed_in.total()} of {len(outcomes)} killed in {seconds:.0f} s")
    return 0 if outcomes and killed_in.total() == len(outcomes) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Judge the faults that were asked for. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="faults that are judged at a time")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="faults that have one of these words")
    given = parser.parse_args(argv)
    if not (faults := chosen(planted(), given.only)):
        parser.error(f"no fault has any of these words in its file, room or reason: {', '.join(given.only)}")
    began, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory() as work:
        copies = [Copy(Path(work) / str(number)) for number in range(given.jobs)]
        tests = sorted({test for fault in faults for test in fault.tests})
        verdict, output = copies[0].run(tests, BASELINE_LIMIT_S, "-n", str(given.jobs), "--dist", "worksteal")
        if verdict != SURVIVED:
            print(output, "\nwithout a fault the tests do not pass")
            return 1
        print(f"without a fault all tests pass ({time.monotonic() - began:.0f} s)", flush=True)
        for outcome in judged(faults, copies):
            print(f"{outcome.verdict:8} {outcome.seconds:5.1f} s  {outcome.fault.name}", flush=True)
            if outcome.output:
                print(outcome.output)
            outcomes.append(outcome)
    return report(outcomes, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
