"""Ranks of the worker as fake actors in real processes: who is started again with whom, and whose death is named."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from support.supervised import is_running, recovering, supervised, until

from overlap_spec.messages import ActorFailed, Alive
from overlap_spec.runtime import supervisor as supervisor_module

RANKS = {"frontend": "support.actors.recovering", "worker-1": "support.actors.obedient"}


@pytest.mark.slow
@pytest.mark.parametrize("role", ["worker-1", pytest.param("worker", marks=pytest.mark.slow)])
def test_all_ranks_and_the_scheduler_are_started_again_with_any_of_them(tmp_path: Path, role: str) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path, **RANKS) as supervisor:
            await supervisor.start(recovering(most=2))
            before = supervisor.pids
            os.kill(supervisor.pids[role], signal.SIGKILL)
            await until(lambda: supervisor.recovering is not None, supervisor)
            assert supervisor.recovering is not None and supervisor.recovering.actor == role
            await until(lambda: supervisor.recovering is None, supervisor)
            assert {name for name, pid in supervisor.pids.items() if pid == before[name]} == {"frontend"}
            assert not any(is_running(before[name]) for name in ("scheduler", "worker", "worker-1"))

    asyncio.run(scenario())


def test_the_cause_of_a_lost_rank_is_waited_for(tmp_path: Path) -> None:
    """Another rank tells of the loss before the death itself is known."""

    async def scenario() -> None:
        async with supervised(tmp_path, **RANKS) as supervisor:
            await supervisor.start(recovering(most=2))
            supervisor._dispatch(ActorFailed("worker", "another rank is gone", "", on_purpose=True, lost_rank=True))
            assert supervisor.recovering is None
            os.kill(supervisor.pids["worker-1"], signal.SIGKILL)
            await until(lambda: supervisor.recovering is not None, supervisor)
            assert supervisor.recovering is not None and supervisor.recovering.actor == "worker-1"
            await until(lambda: supervisor.recovering is None, supervisor)
            await asyncio.sleep(2 * supervisor_module.FAILURE_S)
            assert supervisor.recovering is None, "it is not counted as another death"

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_lost_rank_without_a_cause_is_a_death_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path, **RANKS) as supervisor:
            await supervisor.start(recovering(most=2))
            supervisor._dispatch(ActorFailed("worker", "another rank is gone", "", on_purpose=True, lost_rank=True))
            await until(lambda: supervisor.recovering is not None, supervisor)
            assert supervisor.recovering is not None and supervisor.recovering.actor == "worker"
            await until(lambda: supervisor.recovering is None, supervisor)

    asyncio.run(scenario())


def test_a_rank_that_waits_tells_so_in_its_phase(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path, **RANKS) as supervisor:
            supervisor.watchdog.started("worker-1")
            supervisor._dispatch(Alive("worker-1", waits_s=3.0))
            late = supervisor.watchdog.starting()
            assert late is not None and late.actor == "worker-1", "it is not ready by that"

    asyncio.run(scenario())
