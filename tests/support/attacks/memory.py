"""Memory of a server's processes by role, their child processes included, and the most that all had together."""

import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Self

from support.command_line import actors_of

MIB = 1 << 20
SAMPLE_S = 0.05


def processes_of(main: int) -> dict[str, list[int]]:
    """Process numbers by role: an actor's with those it has started, and the rest of the server's as `main`."""
    children = _children()
    roles = {pid: role for pid, role in actors_of(main)}
    found: dict[str, list[int]] = {"main": [], **{role: [] for role in roles.values()}}

    def walk(pid: int, role: str) -> None:
        role = roles.get(pid, role)
        found[role].append(pid)
        for child in children[pid]:
            walk(child, role)

    walk(main, "main")
    return found


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                parent = int(Path(entry.path, "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            found[parent].append(int(entry.name))
    return found


def bytes_of(pid: int) -> int:
    """Of a process, what it shares with others divided among them; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def memory_of(main: int) -> dict[str, int]:
    """Bytes by role."""
    return {role: sum(map(bytes_of, pids)) for role, pids in processes_of(main).items()}


class Peak:
    """Samples the memory of all processes together while it is entered."""

    def __init__(self, main: int) -> None:
        self._main = main
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.num_bytes = 0
        self.by_role: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._left.wait(SAMPLE_S):
            now = memory_of(self._main)
            self.num_bytes = max(self.num_bytes, sum(now.values()))
            self.by_role = {role: max(size, self.by_role.get(role, 0)) for role, size in now.items()}


def settle(main: int, before: dict[str, int], allowed: int, timeout_s: float) -> dict[str, int]:
    """Wait until no role has more than `allowed` bytes beyond before, or the time is up. Returns each one's growth."""
    deadline = time.monotonic() + timeout_s
    while True:
        now = memory_of(main)
        grown = {role: size - before.get(role, 0) for role, size in now.items()}
        if max(grown.values()) <= allowed or time.monotonic() > deadline:
            return grown
        time.sleep(0.2)
