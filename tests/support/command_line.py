"""The command line as tests run it: real processes, their output, and what they leave behind."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

# A command starts three interpreters that import torch: seconds on idle cores, but more than 60 on busy ones. A command
# that hangs is found all the same, before pytest's own limit of 300 s ends the whole run.
COMMAND_S = 180.0
COMMAND = (sys.executable, "-P", "-m", "overlap_spec")


def environment(tmp_path: Path, **extra: str) -> dict[str, str]:
    """This process's environment and import path, with temporary files and caches of its own."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    own = {"PYTHONPATH": path, "TMPDIR": str(tmp_path), "OVERLAP_SPEC_CACHE": str(tmp_path / "cache")}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", **extra}


def run_command(tmp_path: Path, *words: str, stdin: str = "", **extra: str) -> "subprocess.CompletedProcess[str]":
    """Run `overlap-spec WORDS` to its end."""
    return subprocess.run(
        [*COMMAND, *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        env=environment(tmp_path, **extra),
    )


class Service:
    """`overlap-spec serve` on a free port. Entering waits for `ready`; leaving kills what is left."""

    def __init__(self, tmp_path: Path, *flags: str, **extra: str) -> None:
        self.tmp_path = tmp_path
        self._log = (tmp_path / "stderr.log").open("w+")
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment(tmp_path, **extra),
        )
        self.lines: list[str] = []
        self.children: dict[str, int] = {}

    def __enter__(self) -> Self:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if self.lines[-1] == "ready":
                self.children = self.actors()
                return self
        raise AssertionError(f"serve did not start: {self.lines} {self.log()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()

    def actors(self) -> dict[str, int]:
        """Process numbers by role, as they are now: a recovery starts others."""
        return {role: pid for pid, role in actors_of(self.process.pid)}

    @property
    def url(self) -> str:
        """Where it listens, from its table."""
        return self._cell("HTTP")

    @property
    def endpoint(self) -> str:
        """Where its ZMQ clients connect, from its table."""
        return self._cell("ZMQ")

    def log(self) -> str:
        """What all its processes have written to stderr."""
        return (self.tmp_path / "stderr.log").read_text()

    def logs(self, words: str, timeout_s: float = 60.0) -> bool:
        """Whether the log says this by then: a line may be written after the reply that it is about."""
        deadline = time.monotonic() + timeout_s
        while words not in self.log():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def leftovers(self) -> list[str]:
        """Names of run directories, and actors that still run."""
        alive = [f"{role} {pid}" for role, pid in self.children.items() if is_running(pid)]
        return [path.name for path in self.tmp_path.glob("overlap-spec-*")] + alive

    def get(self, path: str) -> httpx.Response:
        """One GET."""
        return httpx.get(f"{self.url}{path}", timeout=60)

    def _cell(self, name: str) -> str:
        """The value of a row, which long ones go on in rows without a name."""
        cells = [[cell.strip() for cell in line.split("│")[1:3]] for line in self.lines if line.startswith("│")]
        first = next(number for number, (found, _) in enumerate(cells) if found == name)
        more = itertools.takewhile(lambda cell: not cell[0], cells[first + 1 :])
        return "".join([cells[first][1], *(value for _, value in more)])


def actors_of(parent: int) -> Iterator[tuple[int, str]]:
    """Process number and role of every actor that `parent` has started."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (words := _command_of(entry)) and "overlap_spec.runtime.actor" in words:
            role = words[words.index("overlap_spec.runtime.actor") + 1]
            if words[-1] == str(parent):
                yield int(entry.name), role


def is_running(pid: int) -> bool:
    """True unless the process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def cpu_ticks(pid: int) -> int:
    """User and system time of a process, in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def wait_until_gone(pids: Sequence[int], timeout_s: float) -> bool:
    """Wait for processes to end; False if one still runs after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _command_of(entry: Path) -> list[str]:
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []
