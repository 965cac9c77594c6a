"""Links between processes and inside one: order, types, waiting without burning, closing."""

import asyncio
import contextlib
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
import zmq
from support.memory_link import MemoryLink

from overlap_spec.messages import Abort, AbortReason, FlushCache, Shutdown, StepPlan, ToScheduler, ToWorker
from overlap_spec.runtime.run_directory import Endpoints
from overlap_spec.runtime.transport import ZmqInbox, ZmqOutlet, listening_socket

LOOPS = {"asyncio": asyncio.run, "uvloop": uvloop.run}


@contextlib.contextmanager
def link(tmp_path: Path, union: Any = ToScheduler) -> Iterator[tuple[ZmqInbox[Any], ZmqOutlet[Any]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = Endpoints(tmp_path).inbox("scheduler")
    outlet: ZmqOutlet[Any] = ZmqOutlet(context, address)  # connects first: actors start in any order
    inbox: ZmqInbox[Any] = ZmqInbox(context, address, union)
    try:
        yield inbox, outlet
    finally:
        outlet.close()
        inbox.close()
        context.term()


def abort(uid: int) -> Abort:
    return Abort(uid, AbortReason.REQUESTED)


@pytest.mark.parametrize("loop", LOOPS)
def test_messages_arrive_in_order_and_typed(tmp_path: Path, loop: str) -> None:
    async def scenario() -> None:
        with link(tmp_path) as (inbox, outlet):
            sent = [abort(uid) for uid in range(1000)] + [Shutdown(True)]
            for message in sent:
                outlet.send(message)
            assert [await inbox.recv() for _ in sent] == sent
            assert inbox.drain() == []

    LOOPS[loop](scenario())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_sleeping_reader_is_woken_by_every_message(tmp_path: Path, loop: str) -> None:
    """A lost edge would show as a time-out here: each message is sent only when the reader sleeps again."""

    async def scenario() -> None:
        with link(tmp_path) as (inbox, outlet):
            for uid in range(200):
                waiting = asyncio.create_task(inbox.recv())
                await asyncio.sleep(0)
                outlet.send(abort(uid))
                assert await asyncio.wait_for(waiting, 20) == abort(uid)

    LOOPS[loop](scenario())


def test_a_cancelled_reader_loses_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        with link(tmp_path) as (inbox, outlet):
            for uid in range(50):
                waiting = asyncio.create_task(inbox.recv())
                await asyncio.sleep(0)
                outlet.send(abort(uid))
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting
                assert await asyncio.wait_for(inbox.recv(), 20) == abort(uid)

    asyncio.run(scenario())


def test_drain_takes_what_recv_has_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        with link(tmp_path) as (inbox, outlet):
            for uid in range(10):
                outlet.send(abort(uid))
            seen = [await inbox.recv()]
            while len(seen) < 10:
                seen += inbox.drain()
                await asyncio.sleep(0.001)
            assert seen == [abort(uid) for uid in range(10)]

    asyncio.run(scenario())


def test_waiting_burns_no_cpu(tmp_path: Path) -> None:
    async def scenario() -> None:
        with link(tmp_path) as (inbox, _):
            before = resource.getrusage(resource.RUSAGE_THREAD)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(inbox.recv(), 0.5)
            after = resource.getrusage(resource.RUSAGE_THREAD)
            assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.05

    asyncio.run(scenario())


def test_a_message_of_another_link_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        with link(tmp_path, ToWorker) as (inbox, outlet):
            outlet.send(abort(1))
            with pytest.raises(msgspec.ValidationError, match="Invalid value 'Abort'"):
                await asyncio.wait_for(inbox.recv(), 20)

    asyncio.run(scenario())


def test_a_send_never_blocks_when_nobody_reads(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outlet: ZmqOutlet[Any] = ZmqOutlet(context, Endpoints(tmp_path).inbox("unbound"))
    for uid in range(20_000):  # far beyond ZeroMQ's default high-water mark of 1,000
        outlet.send(abort(uid))
    outlet.close()
    context.destroy(linger=0)


def test_messages_leave_after_close(tmp_path: Path) -> None:
    """A dying actor sends, closes and exits; its reader still gets the message."""
    address = Endpoints(tmp_path).inbox("scheduler")

    def die() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        outlet: ZmqOutlet[Any] = ZmqOutlet(context, address)
        outlet.send(abort(7))
        outlet.close()
        context.term()

    async def scenario() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        inbox: ZmqInbox[Any] = ZmqInbox(context, address, ToScheduler)
        dying = threading.Thread(target=die)
        dying.start()
        assert await asyncio.wait_for(inbox.recv(), 20) == abort(7)
        dying.join()
        inbox.close()
        context.term()

    asyncio.run(scenario())


def test_memory_link_keeps_order_and_checks_types() -> None:
    async def scenario() -> None:
        memory: MemoryLink[Any] = MemoryLink(ToScheduler)
        waiting = asyncio.create_task(memory.recv())
        await asyncio.sleep(0)
        memory.send(abort(1))
        memory.send(FlushCache())
        assert await waiting == abort(1)
        assert memory.drain() == [FlushCache()]
        with pytest.raises(msgspec.ValidationError):
            memory.send(StepPlan(1, 1))  # the wrong link, on purpose

    asyncio.run(scenario())


def test_endpoints_are_sockets_in_the_run_directory(tmp_path: Path) -> None:
    endpoints = Endpoints(tmp_path)
    addresses = {endpoints.inbox("worker"), endpoints.inbox("scheduler"), endpoints.client()}
    assert len(addresses) == 3
    assert all(address.startswith(f"ipc://{tmp_path}/") for address in addresses)


def test_an_address_in_brackets_is_the_same_address() -> None:
    with contextlib.closing(listening_socket("[127.0.0.1]", 0, 1)) as bound:
        assert bound.getsockname()[0] == "127.0.0.1"
