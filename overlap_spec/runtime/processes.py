"""The child processes of one run: started, watched, killed.

Each child leads its own session: the terminal's signals reach the parent alone, which decides, and a kill also ends
the processes that the child has started (compilers).
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from overlap_spec.config import Settings, child_environment, encode_settings

DUMP_SIGNAL = signal.SIGUSR1  # writes every thread's Python stack to stderr, whatever the process is doing
CANNOT_DUMP = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting in the kernel", "Z": "gone", "": "gone"}
KILL_S = 1.0  # for killed processes to end: a driver needs a while to free much GPU memory

Exited = Callable[[str, int], None]  # role, exit status (negative: the signal that ended it)


class Children:
    """One process per role. `on_exit` is called once per child that was not abandoned, for every kind of exit."""

    def __init__(self, roles: Mapping[str, str], on_exit: Exited) -> None:
        self._roles = roles
        self._on_exit = on_exit
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}

    @property
    def pids(self) -> dict[str, int]:
        """Process number by role."""
        return {role: process.pid for role, process in self._processes.items()}

    @property
    def running(self) -> list[str]:
        """The roles whose processes have not ended."""
        return [role for role, process in self._processes.items() if process.returncode is None]

    async def start(
        self, run_dir: Path, settings: Settings, roles: Collection[str], generation: int = 0, others: int = 0
    ) -> None:
        """Start these roles. `others`: the generation of those that they send to.

        Cancellation: those that have started are known, and `kill` ends them.
        """
        for role in roles:
            await self.start_one(role, run_dir, settings, generation, others)

    async def start_one(
        self, role: str, run_dir: Path, settings: Settings, generation: int = 0, others: int = 0
    ) -> None:
        """Start one role, which must not run. It reads the settings from a pipe: a file would outlive a killed run."""
        # -P: a file of the working directory must not shadow a module, as `-m` alone would let it.
        program = (sys.executable, "-P", "-m", "overlap_spec.runtime.actor")
        process = await asyncio.create_subprocess_exec(
            *(*program, role, self._roles[role], str(run_dir)),
            *map(str, (generation, others, os.getpid())),
            env=child_environment(settings, role) | {"PYTHONPATH": import_path()},
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.__stderr__,  # libraries print to stdout, which is for answers
            start_new_session=True,
        )
        self._processes[role] = process
        self._watchers[role] = asyncio.create_task(self._watch(role, process), name=f"watch-{role}")
        assert process.stdin is not None
        process.stdin.write(encode_settings(settings))
        process.stdin.close()

    async def wait(self, timeout_s: float) -> bool:
        """Wait until every child is gone; False if one is still there after `timeout_s`."""
        if not self._watchers:
            return True
        _, running = await asyncio.wait(self._watchers.values(), timeout=timeout_s)
        return not running

    def drop(self, roles: Collection[str]) -> list[asyncio.Task[None]]:
        """Abandon these. Returns tasks that end with them."""
        for role in roles:
            self.abandon(role)
        return [self._watchers.pop(role) for role in roles if role in self._watchers]

    async def kill(self) -> None:
        """End every child that still runs, and wait until it is gone, but no longer than KILL_S."""
        for process in self._processes.values():
            _kill(process)
        await self.wait(KILL_S)

    def abandon(self, role: str) -> None:
        """Kill one child whose end is known: `on_exit` is not called for it, as it may take long to be gone."""
        process = self._processes.pop(role, None)
        if process is not None:
            _kill(process)

    def forget(self) -> None:
        """Stop watching. The kernel ends killed children that are still there."""
        for watcher in self._watchers.values():
            watcher.cancel()

    async def _watch(self, role: str, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        if self._processes.get(role) is process:
            self._on_exit(role, status)


def _kill(process: asyncio.subprocess.Process) -> None:
    """Send SIGKILL to a process and those that it has started; a stopped one ends too."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def request_dump(pid: int) -> str:
    """Ask a child for every thread's Python stack, on stderr. Returns what the log should say of it."""
    state = _state_of(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, DUMP_SIGNAL)
    if state in CANNOT_DUMP:
        return f"the process is {CANNOT_DUMP[state]}, so it cannot write its stack"
    return "its stack follows"


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, all its threads together; 0 if it is gone."""
    fields = _fields_of(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _state_of(pid: int) -> str:
    """One letter, as in ps; "" if it is gone."""
    fields = _fields_of(pid)
    return fields[0] if fields else ""


def _fields_of(pid: int) -> list[str]:
    """What the kernel tells of a process, from its state on; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def describe_exit(status: int) -> str:
    """How a process ended, as a phrase."""
    if status >= 0:
        return f"exited with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"


def import_path() -> str:
    """PYTHONPATH of a child, which imports from where its parent does, installed or not."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)
