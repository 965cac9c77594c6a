"""The child processes of one run: started, watched, killed.

Each child leads its own session: the terminal's signals reach the parent alone, which decides, and a kill also ends
the processes that the child has started (compilers).
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from overlap_spec.config import Settings, child_environment

KILL_S = 1.0  # for killed processes to end: a driver needs a while to free much GPU memory

Exited = Callable[[str, int], None]  # role, exit status (negative: the signal that ended it)


class Children:
    """One process per role. `on_exit` is called once per child, in the event loop, for every kind of exit."""

    def __init__(self, roles: Mapping[str, str], on_exit: Exited) -> None:
        self._roles = roles
        self._on_exit = on_exit
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def pids(self) -> dict[str, int]:
        """Process number by role."""
        return {role: process.pid for role, process in self._processes.items()}

    async def start(self, run_dir: Path, settings: Settings) -> None:
        """Start every role. Cancellation: those that have started are known, and `kill` ends them."""
        for role, module in self._roles.items():
            # -P: a file of the working directory must not shadow a module, as `-m` alone would let it.
            command = (
                sys.executable,
                "-P",
                "-m",
                "overlap_spec.runtime.actor",
                role,
                module,
                str(run_dir),
                str(os.getpid()),
            )
            process = await asyncio.create_subprocess_exec(
                *command,
                env=child_environment(settings, role) | {"PYTHONPATH": _import_path()},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.__stderr__,  # libraries print to stdout, which is for answers
                start_new_session=True,
            )
            self._processes[role] = process
            self._watchers.append(asyncio.create_task(self._watch(role, process), name=f"watch-{role}"))

    async def wait(self, timeout_s: float) -> bool:
        """Wait until every child is gone; False if one is still there after `timeout_s`."""
        if not self._watchers:
            return True
        _, running = await asyncio.wait(self._watchers, timeout=timeout_s)
        return not running

    async def kill(self) -> None:
        """End every child that still runs, and wait until it is gone, but no longer than KILL_S."""
        for process in self._processes.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        await self.wait(KILL_S)

    def forget(self) -> None:
        """Stop watching. The kernel ends killed children that are still there."""
        for watcher in self._watchers:
            watcher.cancel()

    async def _watch(self, role: str, process: asyncio.subprocess.Process) -> None:
        self._on_exit(role, await process.wait())


def describe_exit(status: int) -> str:
    """How a process ended, as a phrase."""
    if status >= 0:
        return f"exited with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"


def _import_path() -> str:
    """A child imports from where its parent does, installed or not."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)
