"""Which of the package's files run between two moments, in every process of a service.

    install(DIR)    in each process, as it starts (`sitecustomize.py`, which `hook` writes)
    SIGUSR2         from now on, the time at which each file first runs is kept; `PID.on` is written
    SIGUSR2         the times are written, to `PID.json`, and nothing is kept any more

A process that a job was forked to is not asked for its files, as it may be gone by then.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

PACKAGE = f"{os.sep}overlap_spec{os.sep}"
HOOK = "from support.called_files import install\n\ninstall({directory!r})\n"


class CalledFiles:
    """The times at which files of the package first run, in this process."""

    def __init__(self) -> None:
        self.is_on = False
        self.times: dict[str, float] = {}

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """What `sys.setprofile` calls. A generator that goes on counts as called."""
        if self.is_on and event == "call":
            path = frame.f_code.co_filename
            if path not in self.times and PACKAGE in path:
                self.times[path] = time.monotonic()


def install(directory: str) -> None:
    """Let this process keep and write its files when it is told to."""
    called = CalledFiles()

    def switch(number: int, frame: FrameType | None) -> None:
        if called.is_on:
            sys.setprofile(None)
            called.is_on = False
            _write(Path(directory) / f"{os.getpid()}.json", called.times)
        else:
            called.times = {}
            called.is_on = True
            sys.setprofile(called.note)
            _write(Path(directory) / f"{os.getpid()}.on", {})

    threading.setprofile(called.note)  # the main thread is imported in, which it would slow down
    signal.signal(signal.SIGUSR2, switch)


def hook(directory: Path) -> str:
    """A folder for PYTHONPATH, because of which every interpreter installs this."""
    own = directory / "hook"
    own.mkdir()
    (own / "sitecustomize.py").write_text(HOOK.format(directory=str(directory)))
    return str(own)


def called_during(run: Callable[[], object], pids: list[int], directory: Path) -> dict[str, float]:
    """The files that the processes run while `run` does, by their places below `overlap_spec/`, and when first."""
    _switched(pids, directory, "on")
    run()
    found: dict[str, float] = {}
    for times in _switched(pids, directory, "json"):
        for file, first in times.items():
            name = file.rpartition(PACKAGE)[2]
            found[name] = min(first, found.get(name, first))
    return found


def _switched(pids: list[int], directory: Path, kind: str) -> list[dict[str, float]]:
    """What each process writes into a file of this kind when it is told to begin, or to end."""
    for pid in pids:
        os.kill(pid, signal.SIGUSR2)
    written = []
    for pid in pids:
        path = directory / f"{pid}.{kind}"
        while not path.exists():
            time.sleep(0.01)
        written.append(json.loads(path.read_text()))
        path.unlink()
    return written


def _write(path: Path, times: dict[str, float]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(times))
    partial.rename(path)
