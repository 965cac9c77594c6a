"""A supervisor of fake actors in real processes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from msgspec.structs import replace

from overlap_spec.config import RecoverySettings, Settings
from overlap_spec.runtime.run_directory import RunDirectory
from overlap_spec.runtime.supervisor import Supervisor
from support.fake_settings import fake_settings

TIMEOUT_S = 20.0
OBEDIENT = {
    "frontend": "support.actors.obedient",
    "scheduler": "support.actors.obedient",
    "worker": "support.actors.obedient",
}


@contextlib.asynccontextmanager
async def supervised(tmp_path: Path, **roles: str) -> AsyncIterator[Supervisor]:
    """Ended afterwards, when no process and no file may be left. `roles`: modules of actors that are not obedient."""
    run_dir = RunDirectory(tmp_path)
    supervisor = Supervisor(run_dir, OBEDIENT | roles, lambda *line: None)
    try:
        yield supervisor
    finally:
        await supervisor.stop()
        run_dir.remove()
        assert list(tmp_path.iterdir()) == []
        assert not any(is_running(pid) for pid in supervisor.pids.values())


def is_running(pid: int) -> bool:
    """A zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def recovering(most: int) -> Settings:
    """Of an engine whose actors are started again so many times."""
    return replace(fake_settings(), recovery=RecoverySettings(enabled=True, most=most))


async def until(holds: Callable[[], bool], supervisor: Supervisor) -> None:
    """Wait for what the supervisor is to come to by itself, unless it ends the run instead."""
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():
            assert not supervisor.failed.done(), str(supervisor.failed.result())
            await asyncio.sleep(0.001)
