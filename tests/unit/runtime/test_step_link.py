"""The step links: order over both ways in, big messages, readers that sleep or poll, ends that go away."""

import asyncio
import contextlib
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq
from support.plans import SlotPart, plan_of

from overlap_spec import features
from overlap_spec.features.grammar import DropGrammar
from overlap_spec.messages import (
    Abort,
    AbortReason,
    LivenessProbe,
    NewFrontend,
    Shutdown,
    StepPlan,
    StepResult,
    ToScheduler,
    ToWorker,
)
from overlap_spec.runtime.run_directory import Endpoints
from overlap_spec.runtime.step_link import (
    OTHERS_S,
    PACKET_BYTES,
    QueuedOutlet,
    SharedOutlet,
    SpinPolicy,
    StepInbox,
    StepOutlet,
    _Sender,
    send_packet,
)
from overlap_spec.runtime.transport import ZmqInbox, ZmqOutlet

LOOPS = {"asyncio": asyncio.run, "uvloop": uvloop.run}
SPINS = [0.0, 0.05]


TIMEOUT_S = 30.0


@dataclass
class Ends:
    """An inbox and both ways into it."""

    inbox: StepInbox[Any]
    steps: StepOutlet[Any]
    others: ZmqOutlet[Any]


@contextlib.contextmanager
def ends(
    tmp_path: Path, union: Any = ToScheduler, spin_s: float = 0.0, spin: SpinPolicy | None = None
) -> Iterator[Ends]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoints = Endpoints(tmp_path)
    union = features.link(union)
    zmq_inbox: ZmqInbox[Any] = ZmqInbox(context, endpoints.inbox("reader"), union)
    patience = spin or SpinPolicy(spin_s)
    inbox: StepInbox[Any] = StepInbox(zmq_inbox, endpoints.steps("reader"), union, patience, LivenessProbe)
    steps: StepOutlet[Any] = StepOutlet(endpoints.steps("reader"))
    others: ZmqOutlet[Any] = ZmqOutlet(context, endpoints.inbox("reader"))
    try:
        yield Ends(inbox, steps, others)
    finally:
        for end in (steps, others, inbox, zmq_inbox):
            end.close()
        context.term()


def abort(uid: int) -> Abort:
    return Abort(uid, AbortReason.REQUESTED)


def plan(step_id: int, num_bytes: int) -> StepPlan:
    chunk = bytes(range(256)) * (num_bytes // 256)
    return plan_of(step_id, [SlotPart(0, tokens=chunk)], 1)


def open_files() -> list[str]:
    """Those of long messages that this process holds."""
    links = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the directory itself
            links.append(os.readlink(entry.path))
    return [link for link in links if "memfd" in link]


@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize("spin_s", SPINS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_reader_meets_every_message_of_both_ways(tmp_path: Path, loop: str, spin_s: float) -> None:
    """A lost wake-up would show as a time-out: each message is sent only when the reader sleeps or polls."""

    async def scenario() -> None:
        with ends(tmp_path, spin_s=spin_s) as link:
            for uid in range(100):
                for way in (link.steps, link.others):
                    sender = threading.Timer(0.0005 * (uid % 3), way.send, (abort(uid),))
                    sender.start()
                    assert await asyncio.wait_for(link.inbox.recv(), 20) == abort(uid)
                    sender.join()

    LOOPS[loop](scenario())


def test_a_cancelled_reader_loses_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        with ends(tmp_path) as link:
            for uid in range(50):
                waiting = asyncio.create_task(link.inbox.recv())
                await asyncio.sleep(0)
                link.steps.send(abort(uid))
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting
                assert await asyncio.wait_for(link.inbox.recv(), 20) == abort(uid)

    asyncio.run(scenario())


@pytest.mark.parametrize("num_bytes", [0, PACKET_BYTES - 256, PACKET_BYTES, 3 * PACKET_BYTES, 4 << 20])
def test_a_thread_reads_messages_of_any_size_in_order(tmp_path: Path, num_bytes: int) -> None:
    """Some of them lie in files and some do not, and none is read before all are sent."""
    with ends(tmp_path, ToWorker) as link:
        sent = [plan(step, (num_bytes + 256 * step) * (step != 2)) for step in range(5)]
        for message in sent:
            link.steps.send(message)
        received: list[Any] = []
        while len(received) < len(sent):
            received += link.inbox.poll()
            if not received:
                link.inbox.wait(5.0)
        assert received == sent
        assert not open_files(), "a file is closed when it has been sent, and when it has been read"


@pytest.mark.parametrize("num_bytes", [PACKET_BYTES - 1, PACKET_BYTES, PACKET_BYTES + 1])
def test_a_payload_as_long_as_a_packet_or_a_byte_longer_arrives_whole(num_bytes: int) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    payload = bytes(range(1, 256)) * (num_bytes // 255 + 1)
    with one, other:
        send_packet(one, payload[:num_bytes])
        assert _Sender(other).receive() == payload[:num_bytes]


def test_two_that_send_before_they_read_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Both ends of the ring's inner loop, in one thread: plans of 128k tokens one way, results of a full batch back."""
    for role in ("worker", "scheduler"):
        (tmp_path / role).mkdir()
    with ends(tmp_path / "worker", ToWorker) as plans, ends(tmp_path / "scheduler") as results:
        long = [plan(step, 4 * 131072) for step in (1, 2)]
        full = [StepResult(step, [[128_000] * 9] * 4096, [8] * 4096, 0.1) for step in (1, 2)]
        for one, other in zip(long, full, strict=True):
            plans.steps.send(one)
            results.steps.send(other)
        assert plans.inbox.drain() == long
        assert results.inbox.drain() == full


def test_a_thread_waits_until_a_busy_reader_has_room(tmp_path: Path) -> None:
    """Far more than a socket's buffer holds."""
    with ends(tmp_path, ToWorker) as link:
        link.steps.send(plan(0, 0))
        rest = threading.Thread(target=lambda: [link.steps.send(plan(step, 1024)) for step in range(1, 2_000)])
        rest.start()
        rest.join(0.2)
        assert rest.is_alive()
        found: list[int] = []
        while len(found) < 2_000:
            link.inbox.wait(TIMEOUT_S)
            found += [each.step_id for each in link.inbox.poll()]
        rest.join(TIMEOUT_S)
        assert found == list(range(2_000))


def test_a_thread_that_waits_is_let_go_when_its_reader_ends(tmp_path: Path) -> None:
    outlet: StepOutlet[Any] = StepOutlet(Endpoints(tmp_path).steps("reader"))
    with ends(tmp_path, ToWorker) as link:
        outlet.send(plan(0, 0))
        assert link.inbox.drain() == [plan(0, 0)]
        rest = threading.Thread(target=lambda: [outlet.send(plan(step, 1024)) for step in range(1, 2_000)])
        rest.start()
        rest.join(0.2)
        assert rest.is_alive()
    rest.join(TIMEOUT_S)
    assert not rest.is_alive()
    outlet.close()


def test_a_loop_never_waits_for_a_busy_reader(tmp_path: Path) -> None:
    """Grammars of thousands of requests come at once, while the worker computes a step."""

    async def story() -> None:
        with ends(tmp_path, ToWorker) as link:
            outlet: QueuedOutlet[Any] = QueuedOutlet(Endpoints(tmp_path).steps("reader"))
            for uid in range(3_000):
                outlet.send(DropGrammar(uid))
            assert outlet._unsent
            found: list[int] = []
            while len(found) < 3_000:
                found += [each.uid for each in link.inbox.poll()]
                await asyncio.sleep(0)
            assert found == list(range(3_000)) and not outlet._unsent
            outlet.close()

    asyncio.run(asyncio.wait_for(story(), TIMEOUT_S))


def test_a_thread_that_sleeps_is_woken_by_either_way(tmp_path: Path) -> None:
    with ends(tmp_path, ToWorker) as link:
        for step in range(30):
            for way in (link.steps, link.others):
                sender = threading.Timer(0.002, way.send, (plan(step, 0),))
                sender.start()
                while not (received := link.inbox.poll()):
                    link.inbox.wait(None)
                assert received == [plan(step, 0)]
                sender.join()


def test_a_thread_that_polls_hears_the_others_too(tmp_path: Path) -> None:
    """Shutdown comes by ZeroMQ, and a busy worker never sleeps."""
    with ends(tmp_path, ToWorker) as link:
        link.others.send(Shutdown(False))
        deadline = time.monotonic() + 5
        received: list[Any] = []
        while not received and time.monotonic() < deadline:
            received = link.inbox.poll()
        assert received == [Shutdown(False)]


def test_a_thread_whose_steps_take_long_hears_the_others_too(tmp_path: Path) -> None:
    """It polls once a step: a probe that waited for many polls would make a busy worker look dead."""
    with ends(tmp_path, ToWorker) as both:
        both.inbox.poll()
        both.others.send(LivenessProbe())
        heard: list[Any] = []
        for _ in range(3):  # far fewer than POLLS_BETWEEN
            time.sleep(1.2 * OTHERS_S)
            heard += both.inbox.poll()
        assert heard == [LivenessProbe()]


def test_patience_ends(tmp_path: Path) -> None:
    """An idle reader burns no CPU, however long it polled for the next message before."""

    async def scenario() -> None:
        with ends(tmp_path, spin_s=0.02) as link:
            link.steps.send(abort(1))
            assert await link.inbox.recv() == abort(1)
            before = resource.getrusage(resource.RUSAGE_THREAD)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(link.inbox.recv(), 0.5)
            after = resource.getrusage(resource.RUSAGE_THREAD)
            assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.08

    asyncio.run(scenario())


def test_without_patience_nobody_polls() -> None:
    spin = SpinPolicy(0.0)
    spin.renew()
    assert not spin.lasts


def test_patience_lasts_from_the_last_event(tmp_path: Path) -> None:
    times = [100.0]
    spin = SpinPolicy(0.02, lambda: times[-1])
    assert not spin.lasts, "nothing has happened yet"
    spin.renew()
    for now, lasts in ((100.019, True), (100.021, False), (200.0, False)):
        times.append(now)
        assert spin.lasts is lasts


def test_a_reader_does_not_poll_after_a_message_that_nothing_follows_on(tmp_path: Path) -> None:
    class Noting(SpinPolicy):
        renewed = 0

        def renew(self) -> None:
            self.renewed += 1

    async def scenario() -> None:
        spin, counts = Noting(0.0), []
        with ends(tmp_path, spin=spin) as link:
            for message in (LivenessProbe(), LivenessProbe(), abort(1), LivenessProbe()):
                link.others.send(message)
                assert await link.inbox.recv() == message
                counts.append(spin.renewed)
            link.others.send(abort(2))
            while not (drained := link.inbox.drain()):
                await asyncio.sleep(0.001)
            assert drained == [abort(2)]
            link.others.send(abort(3))
            assert await link.inbox.recv() == abort(3)
        assert [*counts, spin.renewed] == [1, 1, 1, 2, 3]

    asyncio.run(scenario())


def test_a_reader_polls_while_its_patience_lasts_and_then_sleeps(tmp_path: Path, monkeypatch: Any) -> None:
    """Whatever it waits for, a step that hangs for one. Every look at the clock takes a millisecond of its time."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    async def scenario() -> None:
        with ends(tmp_path, spin=SpinPolicy(0.02, clock)) as link:
            polls_before_sleep: list[int] = []
            polls = 0
            poll, sleep = link.inbox._poll, link.inbox._readable

            def counted() -> None:
                nonlocal polls
                polls += 1
                poll()

            async def noted() -> None:
                polls_before_sleep.append(polls)
                await sleep()

            monkeypatch.setattr(link.inbox, "_poll", counted)
            monkeypatch.setattr(link.inbox, "_readable", noted)
            for number in (1, 2):
                waiting = asyncio.create_task(link.inbox.recv())
                while len(polls_before_sleep) < number:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.02)
                waiting.cancel()
            assert polls_before_sleep[0] in range(15, 25)
            assert polls in range(30, 50), "a connection that comes may wake it, but not to poll again"

    asyncio.run(scenario())


def test_a_sender_that_goes_leaves_what_it_sent(tmp_path: Path) -> None:
    with ends(tmp_path, ToWorker) as link:
        link.steps.send(plan(1, 0))
        link.steps.close()
        assert link.inbox.drain() == [plan(1, 0)]
        assert link.inbox.drain() == []  # finds the end of the connection
        slept = []
        for _ in range(3):  # ZeroMQ, which is connecting, may wake it once or twice
            started = time.monotonic()
            link.inbox.wait(0.05)
            link.inbox.poll()
            slept.append(time.monotonic() - started)
        assert max(slept) > 0.04, "a connection that has ended must not wake its reader"


def test_a_reader_that_has_gone_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before the first message, and after it."""
    caplog.set_level(logging.INFO)
    outlet: StepOutlet[Any] = StepOutlet(Endpoints(tmp_path).steps("reader"))
    with ends(tmp_path, ToWorker) as link:
        outlet.send(plan(1, 0))
        assert link.inbox.drain() == [plan(1, 0)]
    for late in (outlet, StepOutlet(Endpoints(tmp_path).steps("reader"))):
        caplog.clear()
        for step in range(3):
            late.send(plan(step, 4 * PACKET_BYTES * step))
        late.close()
        assert [record.message.split(" (")[0] for record in caplog.records] == [
            f"the reader of {tmp_path / 'reader.steps'} is gone"
        ]


def test_what_is_sent_at_once_is_read_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        with ends(tmp_path) as link:
            outlet: QueuedOutlet[Any] = QueuedOutlet(Endpoints(tmp_path).steps("reader"))
            outlet.send(abort(0))
            for count in (1, 300, 5_000):  # the last in a file
                outlet.send_all([abort(uid) for uid in range(count)])
            outlet.send(abort(1))
            first = await link.inbox.recv()
            found = [first, *link.inbox.drain()]
            assert [each.uid for each in found] == [0, *range(1), *range(300), *range(5_000), 1]
            outlet.close()

    asyncio.run(story())


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("num_bytes", [100, 10_000, 40_000])
def test_what_there_is_no_room_for_waits_in_order(tmp_path: Path, num_bytes: int) -> None:
    async def story() -> None:
        with ends(tmp_path, ToWorker) as link:
            outlet: QueuedOutlet[Any] = QueuedOutlet(Endpoints(tmp_path).steps("reader"))
            for step_id in range(3_000):
                outlet.send(plan(step_id, num_bytes))
            assert outlet._unsent
            found: list[Any] = []
            while len(found) < 3_000:
                found += [await link.inbox.recv(), *link.inbox.drain()]
                await asyncio.sleep(0)
            assert found == [plan(step_id, num_bytes) for step_id in range(3_000)]
            assert not outlet._unsent
            outlet.close()

    asyncio.run(asyncio.wait_for(story(), TIMEOUT_S))


def test_a_reader_may_bind_later(tmp_path: Path) -> None:
    async def story() -> None:
        outlet: QueuedOutlet[Any] = QueuedOutlet(Endpoints(tmp_path).steps("reader"))
        outlet.send(abort(1))
        outlet.send_all([abort(2), abort(3)])
        with ends(tmp_path) as link:
            found = [(await link.inbox.recv()).uid for _ in range(3)]
            assert found == [1, 2, 3]
            outlet.close()

    asyncio.run(asyncio.wait_for(story(), TIMEOUT_S))


def test_messages_to_a_reader_that_is_gone_are_lost(tmp_path: Path) -> None:
    async def story() -> None:
        outlet: QueuedOutlet[Any] = QueuedOutlet(Endpoints(tmp_path).steps("reader"))
        with ends(tmp_path) as link:
            outlet.send(abort(1))
            assert (await link.inbox.recv()).uid == 1
        for uid in range(3):
            outlet.send(abort(uid))
        assert not outlet._unsent
        outlet.close()

    asyncio.run(story())


def test_a_sender_that_has_died_is_read_to_its_end_before_the_next_one(tmp_path: Path) -> None:
    """What a frontend that is gone has sent comes before the first message of another one, whenever it is read."""
    with ends(tmp_path) as link:
        successor: StepOutlet[Any] = StepOutlet(Endpoints(tmp_path).steps("reader"))
        for uid in range(40):
            link.steps.send(Abort(uid, AbortReason.REQUESTED))
        link.steps.close()
        successor.send(NewFrontend(1))
        successor.send(Abort(99, AbortReason.REQUESTED))
        found = link.inbox.drain()
        assert [each.uid for each in found if isinstance(each, Abort)] == [*range(40), 99]
        assert found[-2] == NewFrontend(1)
        successor.close()


def test_several_readers_get_the_same_messages_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that has not bound its socket yet gets them later, and the others do not wait for it."""
    plans = [plan_of(7, [SlotPart(0, (3,))], width=4), plan_of(8, [SlotPart(1, (5, 6))], width=2)]
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    encoded: list[object] = []

    async def scenario() -> tuple[list[object], list[object]]:
        outlets = [QueuedOutlet[Any](Endpoints(tmp_path / name).steps("reader")) for name in "01"]
        shared: SharedOutlet[Any] = SharedOutlet(outlets)
        encode = shared._encoder.encode
        shared._encoder = type("Counting", (), {"encode": lambda _, each: encoded.append(each) or encode(each)})()
        with ends(tmp_path / "0", ToWorker) as first:
            shared.send(plans[0])
            shared.send_all([plans[1], DropGrammar(4)])
            of_first = [await first.inbox.recv() for _ in range(3)]
            assert [len(outlet._unsent) for outlet in outlets] == [0, 2]
            with ends(tmp_path / "1", ToWorker) as second:
                of_second = [await second.inbox.recv() for _ in range(3)]
        shared.close()
        return of_first, of_second

    of_first, of_second = asyncio.run(scenario())
    assert of_first == of_second == [*plans, DropGrammar(4)]
    assert encoded == [plans[0], [plans[1], DropGrammar(4)]]
