"""Real child processes with fake actors: ready, failed, killed, drained, stopped."""

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from support.fake_settings import fake_settings
from support.supervised import OBEDIENT, TIMEOUT_S, is_running, recovering, supervised, until

from overlap_spec.config import Settings, SupervisorSettings
from overlap_spec.errors import ActorDied
from overlap_spec.messages import ActorFailed, ActorReady, Alive, DraftState, FrontendFacts
from overlap_spec.runtime import supervisor as supervisor_module, watchdog as watchdog_module
from overlap_spec.runtime.run_directory import LOCK_FILE, RunDirectory
from overlap_spec.runtime.supervisor import Supervisor

pytestmark = pytest.mark.timeout(60)  # a start that does not end is a failure, not a run's end


def test_the_schedulers_judgement_of_the_draft_is_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path) as supervisor:
            assert supervisor.draft is DraftState.UNKNOWN
            for sign in (Alive("scheduler", draft=DraftState.DEAD), Alive("worker"), Alive("frontend")):
                supervisor._dispatch(sign)
            assert supervisor.draft is DraftState.DEAD

    asyncio.run(scenario())


def test_ready_facts_progress_drain_and_stop(tmp_path: Path) -> None:
    async def scenario() -> None:
        seen: list[tuple[str, int, int]] = []
        run_dir = RunDirectory(tmp_path)
        supervisor = Supervisor(run_dir, OBEDIENT, lambda *line: seen.append(line))
        await supervisor.start(fake_settings())
        assert supervisor.facts == {role: FrontendFacts(role, "") for role in OBEDIENT}
        assert seen == [("loading", 1, 2)] * 3
        assert run_dir.path.stat().st_mode & 0o777 == 0o700
        kinds = {stat.S_IFMT(path.stat().st_mode) for path in run_dir.path.iterdir() if path.name != LOCK_FILE}
        assert kinds == {stat.S_IFSOCK}, "no file: it would outlive a killed run, with what is secret in the settings"
        assert await supervisor.drain(TIMEOUT_S)
        began = time.monotonic()
        await supervisor.stop()
        await supervisor.stop()
        assert time.monotonic() - began < supervisor_module.STOP_S, "an obedient actor is not waited out"
        assert not supervisor.failed.done()
        run_dir.remove()

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_error_at_start_arrives_in_the_childs_own_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path, worker="support.actors.failing") as supervisor:
            with pytest.raises(ActorDied, match=r"worker: model.safetensors: fc.weight is \[3, 4\]") as caught:
                await supervisor.start(fake_settings())
            assert caught.value.actor == "worker"

    asyncio.run(scenario())
    assert capfd.readouterr().err == "", "an error raised on purpose is reported once, by the parent"


@pytest.mark.slow
def test_unexpected_error_is_logged_with_its_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path, scheduler="no_such_module") as supervisor:
            with pytest.raises(ActorDied, match="scheduler: ModuleNotFoundError"):
                await supervisor.start(fake_settings())

    asyncio.run(scenario())
    assert capfd.readouterr().err.count("Traceback") == 1


@pytest.mark.slow
@pytest.mark.parametrize("role", OBEDIENT)
def test_a_killed_child_takes_the_others_along(tmp_path: Path, role: str) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path) as supervisor:
            await supervisor.start(fake_settings())
            began = time.monotonic()
            os.kill(supervisor.pids[role], signal.SIGKILL)
            error = await asyncio.wait_for(asyncio.shield(supervisor.failed), TIMEOUT_S)
            assert (error.actor, "SIGKILL" in str(error)) == (role, True)
            await supervisor.stop()
            assert time.monotonic() - began < supervisor_module.STOP_S, "no actor was asked to leave"

    asyncio.run(scenario())


async def recovered(supervisor: Supervisor) -> None:
    await until(lambda: supervisor.recovering is None, supervisor)


async def again(supervisor: Supervisor, role: str, number: int = signal.SIGKILL) -> dict[str, int]:
    """Kill one of the pair and wait until all are ready again. Returns their processes."""
    before = supervisor.pids
    os.kill(before[role], number)
    await until(lambda: supervisor.recovering is not None, supervisor)
    await recovered(supervisor)
    assert supervisor.pids["frontend"] == before["frontend"]
    assert all(supervisor.pids[role] != before[role] for role in ("scheduler", "worker"))
    assert not any(is_running(before[role]) for role in ("scheduler", "worker"))
    return supervisor.pids


@pytest.mark.slow
def test_scheduler_and_worker_are_started_again_up_to_a_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path, frontend="support.actors.recovering") as supervisor:
            await supervisor.start(recovering(most=2))
            await again(supervisor, "worker")
            os.kill(supervisor.pids["worker"], signal.SIGSTOP)  # a stopped one is killed all the same
            pids = await again(supervisor, "scheduler")
            assert await supervisor.drain(TIMEOUT_S), "the frontend is told over its new link"
            os.kill(pids["worker"], signal.SIGKILL)
            error = await asyncio.wait_for(asyncio.shield(supervisor.failed), TIMEOUT_S)
            assert error.actor == "worker" and "SIGKILL" in str(error)

    asyncio.run(scenario())


async def heard_from_all(supervisor: Supervisor) -> None:
    """Every actor answers a probe, over the link that it reads now."""
    before = {role: beat.heard_at for role, beat in supervisor.watchdog._heartbeats.items()}
    assert set(before) == set(OBEDIENT)
    for role in before:
        supervisor._probe(role)
    await until(lambda: all(supervisor.watchdog._heartbeats[r].heard_at > at for r, at in before.items()), supervisor)


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_frontend_is_started_again_alone(tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path, frontend="support.actors.recovering") as supervisor:
            lost: list[ActorDied] = []
            supervisor.frontend_died = lost.append
            await supervisor.start(replace(recovering(most=5), supervisor=SupervisorSettings(watchdog_timeout_s=1.5)))
            before = supervisor.pids
            for count in (1, 2):
                os.kill(supervisor.pids["frontend"], number)
                await until(lambda: supervisor.recovering is not None, supervisor)
                await recovered(supervisor)
                assert [error.actor for error in lost] == ["frontend"] * count
                await heard_from_all(supervisor)
            assert supervisor.pids["frontend"] != before["frontend"] and not is_running(before["frontend"])
            assert all(supervisor.pids[role] == before[role] for role in ("scheduler", "worker"))
            await again(supervisor, "worker")
            await heard_from_all(supervisor)
            assert await supervisor.drain(TIMEOUT_S) and len(lost) == 2

    asyncio.run(scenario())
    assert "the frontend is started again (1 of 5 times in 10 minutes)" in caplog.text


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("drains_first", [True, False])
@pytest.mark.parametrize("role", ["frontend", "scheduler"])
def test_a_drain_outlives_processes(tmp_path: Path, role: str, drains_first: bool) -> None:
    """Also where it begins before the others are started again."""

    async def scenario() -> None:
        async with supervised(tmp_path, frontend="support.actors.draining_later") as supervisor:
            await supervisor.start(recovering(most=1))
            if drains_first:
                drain = asyncio.create_task(supervisor.drain(TIMEOUT_S))
                await heard_from_all(supervisor)
                os.kill(supervisor.pids[role], signal.SIGKILL)
            else:
                os.kill(supervisor.pids[role], signal.SIGKILL)
                await until(lambda: supervisor.recovering is not None, supervisor)
                drain = asyncio.create_task(supervisor.drain(TIMEOUT_S))
            assert await drain and not supervisor.failed.done()
            await recovered(supervisor)

    asyncio.run(scenario())


async def die_together(tmp_path: Path, first: str, second: str) -> None:
    """The second one dies while the first is being started again."""
    async with supervised(tmp_path, frontend="support.actors.recovering") as supervisor:
        lost: list[ActorDied] = []
        supervisor.frontend_died = lost.append
        await supervisor.start(recovering(most=3))
        before = supervisor.pids
        os.kill(before[first], signal.SIGKILL)
        await until(lambda: supervisor.recovering is not None and first in supervisor.pids, supervisor)
        supervisor.actor_died(ActorDied(second, "too"))
        await recovered(supervisor)
        assert not set(supervisor.pids.values()) & set(before.values())
        assert [error.actor for error in lost][-1] == second
        await heard_from_all(supervisor)


def test_a_worker_that_dies_while_the_frontend_starts_takes_all_along(tmp_path: Path) -> None:
    asyncio.run(die_together(tmp_path, "frontend", "worker"))


@pytest.mark.slow
def test_a_frontend_that_dies_while_the_pair_starts_takes_all_along(tmp_path: Path) -> None:
    asyncio.run(die_together(tmp_path, "scheduler", "frontend"))


@pytest.mark.slow
def test_a_frontend_that_dies_while_it_starts_is_started_once_more_up_to_the_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path, frontend="support.actors.recovering") as supervisor:
            await supervisor.start(recovering(most=2))
            before = supervisor.pids
            os.kill(before["frontend"], signal.SIGKILL)
            await until(lambda: supervisor.recovering is not None and "frontend" in supervisor.pids, supervisor)
            os.kill(supervisor.pids["frontend"], signal.SIGKILL)
            await until(lambda: len(supervisor._recoveries._begun) == 2, supervisor)
            await recovered(supervisor)
            assert supervisor.pids["worker"] == before["worker"]
            await heard_from_all(supervisor)
            os.kill(supervisor.pids["frontend"], signal.SIGKILL)
            error = await asyncio.wait_for(asyncio.shield(supervisor.failed), TIMEOUT_S)
            assert error.actor == "frontend"

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_error_on_purpose_of_the_frontend_ends_the_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path) as supervisor:
            await supervisor.start(recovering(most=3))
            supervisor._dispatch(ActorFailed("frontend", "audit fault", "", on_purpose=True))
            assert supervisor.failed.result().actor == "frontend"

    asyncio.run(scenario())


@pytest.mark.parametrize("actor", ["frontend", "worker"])
@pytest.mark.parametrize("refused", [True, False])
def test_a_refusal_of_any_process_is_told_as_one(tmp_path: Path, actor: str, refused: bool) -> None:
    """The exit status is 2 then, after which a service manager does not start the same command again."""

    async def scenario() -> None:
        async with supervised(tmp_path) as supervisor:
            supervisor._dispatch(ActorFailed(actor, "--chat-template: no", "", on_purpose=True, refused=refused))
            assert supervisor.failed.result().refused is refused

    asyncio.run(scenario())


def test_one_death_counts_once_however_often_it_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path, frontend="support.actors.recovering") as supervisor:
            await supervisor.start(recovering(most=1))
            supervisor._on_exit("worker", 1)
            supervisor.watchdog._heartbeats["frontend"].probed = True
            supervisor._dispatch(ActorFailed("worker", "out of memory", ""))
            supervisor._dispatch(ActorFailed("scheduler", "its worker is gone", ""))
            supervisor._dispatch(ActorReady("worker", FrontendFacts("of the one that died", "")))
            await recovered(supervisor)
            assert supervisor.facts["worker"] == FrontendFacts("worker", "")
            assert not supervisor.watchdog._heartbeats["frontend"].probed, "its answer is lost with the link"
            await asyncio.sleep(supervisor_module.FAILURE_S)
            assert not supervisor.failed.done()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_death_while_they_are_started_again_counts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path, frontend="support.actors.recovering") as supervisor:
            await supervisor.start(recovering(most=2))
            os.kill(supervisor.pids["worker"], signal.SIGKILL)
            await until(lambda: supervisor.recovering is not None and "worker" in supervisor.pids, supervisor)
            await again(supervisor, "worker")
            supervisor.actor_died(ActorDied("scheduler", "does not answer"))
            assert supervisor.failed.done()

    asyncio.run(scenario())


def with_timeout(seconds: float) -> Settings:
    return msgspec.structs.replace(fake_settings(), supervisor=SupervisorSettings(watchdog_timeout_s=seconds))


@pytest.mark.slow
def test_an_actor_that_hangs_in_c_code_writes_its_stack_and_is_dead(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path, scheduler="support.actors.hanging") as supervisor:
            await supervisor.start(with_timeout(1.5))
            while supervisor.watchdog.unresponsive() is None:
                await asyncio.sleep(0.01)
            assert not supervisor.failed.done(), "late, and not given up yet"
            error = await asyncio.wait_for(asyncio.shield(supervisor.failed), TIMEOUT_S)
            assert (error.actor, "hung: no heartbeat for " in str(error)) == ("scheduler", True)
            assert supervisor.killed == {"scheduler"}

    asyncio.run(scenario())
    assert "in hang_in_a_loop" in capfd.readouterr().err
    assert "its stack follows" in caplog.text


@pytest.mark.slow
def test_a_busy_actor_is_late_after_longer_and_killed_at_the_same_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process sleeps, and the kernel's figures are the test's."""
    monkeypatch.setattr(supervisor_module, "cpu_seconds", lambda pid: time.monotonic())

    async def scenario() -> None:
        async with supervised(tmp_path, scheduler="support.actors.hanging") as supervisor:
            await supervisor.start(with_timeout(1.5))
            while (late := supervisor.watchdog.unresponsive()) is None:
                await asyncio.sleep(0.01)
            assert (late.doing, late.seconds > supervisor.watchdog.busy_s) == ("busy without a heartbeat", True)
            error = await asyncio.wait_for(asyncio.shield(supervisor.failed), TIMEOUT_S)
            assert "scheduler: hung: busy without a heartbeat for " in str(error)

    asyncio.run(scenario())


@pytest.mark.full
def test_an_actor_that_was_stopped_cannot_write_its_stack(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path) as supervisor:
            await supervisor.start(with_timeout(1.5))
            os.kill(supervisor.pids["worker"], signal.SIGSTOP)
            error = await asyncio.wait_for(asyncio.shield(supervisor.failed), TIMEOUT_S)
            assert (error.actor, "hung" in str(error)) == ("worker", True)

    asyncio.run(scenario())
    assert "the process is stopped, so it cannot write its stack" in caplog.text


@pytest.mark.slow
def test_a_phase_of_the_start_is_named_in_the_log_and_may_take_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog_module, "START_TIMEOUTS", 2)  # the log after one, the end after both

    async def scenario() -> None:
        async with supervised(tmp_path, worker="support.actors.slow_start") as supervisor:
            with pytest.raises(ActorDied, match="worker: hung: no heartbeat while compiling kernels for "):
                await supervisor.start(with_timeout(1.5))

    asyncio.run(scenario())
    assert "worker: still compiling kernels, for " in caplog.text


@pytest.mark.slow
def test_an_actor_that_has_to_be_killed_at_the_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a drain that was not over leaves an actor little time to stop."""
    monkeypatch.setattr(supervisor_module, "LAST_STOP_S", 0.2)

    async def scenario() -> None:
        async with supervised(tmp_path, frontend="support.actors.stubborn") as supervisor:
            await supervisor.start(fake_settings())
            assert not await supervisor.drain(0.1)
            began = time.monotonic()
            await supervisor.stop()
            assert time.monotonic() - began < supervisor_module.STOP_S / 2
            assert supervisor.killed == {"frontend"}

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_progress_callback_that_fails_ends_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        run_dir = RunDirectory(tmp_path)
        supervisor = Supervisor(run_dir, OBEDIENT, lambda what, done, total: print(1 // 0))
        with pytest.raises(ActorDied, match="supervisor: ZeroDivisionError"):
            await supervisor.start(fake_settings())
        await supervisor.stop()
        run_dir.remove()

    asyncio.run(scenario())


def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path) as supervisor:
            start = asyncio.create_task(supervisor.start(fake_settings()))
            while len(supervisor.pids) < 2:
                await asyncio.sleep(0.001)
            start.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await start

    asyncio.run(scenario())


PARENT = """
import asyncio, sys
from pathlib import Path
from support.fake_settings import fake_settings
from support.supervised import OBEDIENT, TIMEOUT_S, is_running, recovering, supervised, until
from overlap_spec.runtime.run_directory import LOCK_FILE, RunDirectory
from overlap_spec.runtime.supervisor import Supervisor

async def main():
    roles = dict.fromkeys(("frontend", "scheduler", "worker"), "support.actors.stubborn")
    supervisor = Supervisor(RunDirectory(Path(sys.argv[1])), roles, print)
    await supervisor.start(fake_settings())
    print(*supervisor.pids.values(), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_children_die_with_a_killed_parent_and_the_next_start_cleans_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}) as parent:
        assert parent.stdout is not None
        try:
            pids = [int(word) for word in parent.stdout.readline().split()]
            assert len(pids) == 3
            assert all(is_running(pid) for pid in pids)
            RunDirectory(tmp_path).remove()
            assert len(list(tmp_path.iterdir())) == 1, "the directory of a living owner is not touched"
        finally:
            parent.kill()  # what has failed would wait for its end
    deadline = time.monotonic() + TIMEOUT_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(list(tmp_path.iterdir())) == 1
    RunDirectory(tmp_path).remove()
    assert list(tmp_path.iterdir()) == []
