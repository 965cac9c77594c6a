"""Jobs in processes of their own: answers, limits, cancellation, and what is left behind."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from overlap_spec.runtime.isolated import Isolated, TooLarge, TooLong, Work, WorkFailed

MIB = 1 << 20
LOADED = "loaded"


def factory(argument: str) -> Work:
    """The work that the tests isolate: the payload's first word says what to do."""
    loaded = [argument]

    def work(payload: bytes) -> bytes:
        word, _, rest = payload.partition(b" ")
        match word:
            case b"echo":
                return rest
            case b"loaded":
                loaded.append("changed")
                return ",".join(loaded).encode()
            case b"pid":
                return str(os.getpid()).encode()
            case b"take":
                return b"x" * int(rest)
            case b"spin":
                while True:
                    pass
            case b"abort":
                os.abort()
            case b"sleep":
                time.sleep(60)
        raise ValueError(f"no {word.decode()} here")

    return work


@pytest.fixture
def run() -> Iterator[Callable[[Callable[[Isolated], Awaitable[None]]], None]]:
    """Runs a story with an `Isolated`, which is closed afterwards."""

    def runner(story: Callable[[Isolated], Awaitable[None]]) -> None:
        async def told() -> None:
            isolated = Isolated(f"{__name__}:factory", LOADED, most_bytes=64 * MIB)
            try:
                await asyncio.wait_for(story(isolated), 60)
            finally:
                isolated.close()

        asyncio.run(told())

    yield runner


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


async def children_of(pid: int, count: int) -> list[int]:
    """The children of a process once there are so many."""
    for _ in range(1000):
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if len(found) == count:
            return [int(each) for each in found]
        await asyncio.sleep(0.01)
    raise AssertionError(f"{count} children expected, there are {found}")


def test_a_job_answers_and_its_memory_is_its_own(run: Callable[..., None]) -> None:
    async def story(isolated: Isolated) -> None:
        large = os.urandom(3 * MIB)
        assert await isolated.run(b"echo " + large, 5) == large
        assert await isolated.run(b"echo ", 5) == b""
        assert await isolated.run(b"loaded", 5) == b"loaded,changed"
        assert await isolated.run(b"loaded", 5) == b"loaded,changed"
        pids = {await isolated.run(b"pid", 5) for _ in range(3)}
        assert len(pids) == 3

    run(story)


@pytest.mark.slow
def test_jobs_run_beside_each_other(run: Callable[..., None]) -> None:
    async def story(isolated: Isolated) -> None:
        spinning = asyncio.create_task(isolated.run(b"spin", 60))
        answers = await asyncio.gather(*[isolated.run(b"echo %d" % each, 5) for each in range(8)])
        assert answers == [b"%d" % each for each in range(8)] and not spinning.done()
        spinning.cancel()

    run(story)


def test_limits_of_time_and_memory(run: Callable[..., None]) -> None:
    async def story(isolated: Isolated) -> None:
        with pytest.raises(TooLong, match=r"0\.2 s"):
            await isolated.run(b"spin", 0.2)
        assert len(await isolated.run(b"take %d" % (32 * MIB), 5)) == 32 * MIB
        with pytest.raises(TooLarge):
            await isolated.run(b"take %d" % (80 * MIB), 5)
        with pytest.raises(TooLarge):  # as a library does whose allocation fails
            await isolated.run(b"abort", 5)
        with pytest.raises(WorkFailed, match="ValueError: no thing here"):
            await isolated.run(b"thing", 5)

    run(story)


def test_a_job_that_only_waits_is_given_up(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlap_spec.runtime.isolated.START_S", 0.5)

    async def story(isolated: Isolated) -> None:
        await isolated.run(b"echo", 5)
        with pytest.raises(TooLong, match="on busy cores"):
            await isolated.run(b"sleep", 0.05)

    run(story)


def test_a_cancelled_job_is_killed(run: Callable[..., None]) -> None:
    async def story(isolated: Isolated) -> None:
        template = int(await isolated.run(b"pid", 5)) and isolated.pid
        assert template is not None
        task = asyncio.create_task(isolated.run(b"spin", 60))
        (job,) = await children_of(template, 1)
        descriptors = len(os.listdir(f"/proc/{template}/fd"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await children_of(template, 0)
        assert state_of(job) == "" and len(os.listdir(f"/proc/{template}/fd")) == descriptors - 1
        assert await isolated.run(b"echo on", 5) == b"on"

    run(story)


@pytest.mark.slow
def test_a_template_process_that_died_is_started_again(run: Callable[..., None]) -> None:
    async def story(isolated: Isolated) -> None:
        assert await isolated.run(b"echo 1", 5) == b"1"
        assert isolated.pid is not None
        os.kill(isolated.pid, signal.SIGKILL)
        assert await isolated.run(b"echo 2", 5) == b"2"

    run(story)


def test_closing_ends_all_processes(run: Callable[..., None]) -> None:
    async def story(isolated: Isolated) -> None:
        await isolated.run(b"echo", 5)
        assert isolated.pid is not None
        task = asyncio.create_task(isolated.run(b"spin", 60))
        pids = [isolated.pid, *await children_of(isolated.pid, 1)]
        task.cancel()
        isolated.close()
        for _ in range(500):
            if not any(state_of(pid) in "RSD" and state_of(pid) for pid in pids):
                return
            await asyncio.sleep(0.01)
        raise AssertionError([state_of(pid) for pid in pids])

    run(story)


@pytest.mark.slow
def test_work_that_cannot_be_loaded_is_an_error() -> None:
    async def story() -> None:
        isolated = Isolated(f"{__name__}:no_such_factory", most_bytes=MIB)
        with pytest.raises(WorkFailed, match="without an answer"):
            await isolated.run(b"", 1)
        isolated.close()

    asyncio.run(story())
