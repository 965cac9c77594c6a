"""What a peer of the TCP address may send: bounds of messages, handshakes and connections, by bytes on real sockets."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq
from support.public_link import arrives, dealer, never, on_stage

from overlap_spec.client.link import MAX_MESSAGE_BYTES
from overlap_spec.frontend import tcp_guard
from overlap_spec.frontend.frontend_actor import ClientEndpoint
from overlap_spec.frontend.tcp_guard import FRAMES_OF_A_TURN, MOST_FRAMES, FrameCounter, FrameError, password_of
from overlap_spec.messages import Ping, Pong

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
TCP = {"client_endpoint": "tcp://127.0.0.1:*"}
KEYS = {"api_key": "ka", "key_names": {"ka": "alice", "kb": "bob"}}
CUT_S = 5.0


def frame(body: bytes, more: bool = False, command: bool = False) -> bytes:
    flags = more | 2 * (len(body) > 255) | 4 * command
    return bytes([flags]) + len(body).to_bytes(8 if len(body) > 255 else 1) + body


READY = frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER", command=True)
PING = msgspec.msgpack.encode(Ping(0.0))


class Peer:
    """Speaks ZMTP by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def shake_hands(self) -> None:
        await self.send(GREETING + READY)
        await self.reader.readexactly(64)
        assert (await self.reader.readexactly(2))[0] == 4
        assert (await self.reader.readexactly(READY[1])).startswith(b"\x05READY")

    async def is_cut(self, within_s: float = CUT_S) -> bool:
        """Whether the connection ends; heartbeats are read meanwhile."""
        with contextlib.suppress(ConnectionError):
            try:
                async with asyncio.timeout(within_s):
                    while await self.reader.read(1 << 16):
                        pass
            except TimeoutError:
                return False
        return True


@contextlib.asynccontextmanager
async def peer(endpoint: ClientEndpoint) -> AsyncIterator[Peer]:
    host, port = endpoint.address.removeprefix("tcp://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()


def dropped(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "is dropped" in text]


def test_a_peer_that_keeps_to_the_rules_is_heard(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        async with peer(endpoint) as raw, dealer(endpoint) as client:
            await raw.shake_hands()
            for at in range(len(READY)):  # heads and bodies in pieces
                await raw.send(frame(PING)[at : at + 1])
            assert await arrives(endpoint.router) == (1, Ping(0.0))
            many = frame(PING, more=True) * (MOST_FRAMES - 1) + frame(PING)
            await raw.send(many)
            for _ in range(MOST_FRAMES):
                assert await arrives(endpoint.router) == (1, Ping(0.0))
            client.send(Ping(2.0))
            assert await arrives(endpoint.router) == (2, Ping(2.0))
            endpoint.router.send(2, Pong(2.0, True))
            assert await client.recv() == Pong(2.0, True)

    on_stage(scene, tmp_path, **TCP)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (frame(b"", more=True) * (MOST_FRAMES + 1), "a message has more than 4096 frames"),
        (frame(bytes(1000), more=True) * 101, "a message has more than 100000 bytes"),
        (b"\x02" + (100_001).to_bytes(8), "a message has more than 100000 bytes"),
        (b"\x02" + (MAX_MESSAGE_BYTES + 1).to_bytes(8), f"a frame has {MAX_MESSAGE_BYTES + 1} bytes"),
        (b"\x02" + b"\xff" * 8, "a frame has 18446744073709551615 bytes"),
        (b"\x06" + (4097).to_bytes(8), "a command has 4097 bytes"),
        (b"\x08\x01a", "a frame has the flags 0x8"),
    ],
)
def test_a_peer_that_sends_too_much_is_dropped_by_name(
    sent: bytes, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        async with peer(endpoint) as raw, dealer(endpoint) as client:
            await raw.shake_hands()
            await raw.send(frame(PING))
            assert await arrives(endpoint.router) == (1, Ping(0.0))
            await raw.send(sent)
            assert await raw.is_cut()
            client.send(Ping(1.0))
            while (await arrives(endpoint.router))[1] != Ping(1.0):
                pass

    on_stage(scene, tmp_path, **TCP, max_client_bytes=100_000)
    (line,) = dropped(caplog)
    assert line.startswith("the ZMQ peer 127.0.0.1:") and why in line


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "it does not speak ZMTP 3"),
        (b"\x01\x00", "it does not speak ZMTP 3"),  # ZMTP 1
        (b"\xff" + bytes(8) + b"\x7f\x01", "it does not speak ZMTP 3"),  # ZMTP 2
        (b"\xff" + bytes(8) + b"\x01\x03", "it does not speak ZMTP 3"),
        (GREETING + frame(PING), "it sends a message before its key has been looked at"),
        (GREETING + frame(bytes(4097), command=True), "a command has 4097 bytes, at most 4096 are taken"),
        (GREETING + frame(b"\x03abc", command=True) * 9, "its handshake has more than 8 commands"),
    ],
)
def test_before_its_handshake_has_ended_a_peer_may_send_little(
    sent: bytes, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No key is asked for in the first bytes: what they may hold must be little, too."""

    async def scene(endpoint: ClientEndpoint) -> None:
        async with peer(endpoint) as raw:
            await raw.send(sent)
            assert await raw.is_cut()
            await never(endpoint.router.recv(), 0.05)

    on_stage(scene, tmp_path, **TCP, **KEYS)
    assert [why in line for line in dropped(caplog)] == [True]


def test_the_log_names_the_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.PLAIN_USERNAME, b"overlap-spec")
        socket.setsockopt(zmq.PLAIN_PASSWORD, b"kb")
        socket.connect(endpoint.address)
        socket.send(PING)
        assert await arrives(endpoint.router) == (1, Ping(0.0))
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.send_multipart([b"\xc1"] * (MOST_FRAMES + 1))
        while not dropped(caplog):
            await asyncio.sleep(0.01)
        context.destroy(linger=0)

    on_stage(scene, tmp_path, **TCP, **KEYS)
    assert "(key bob) is dropped: a message has more than 4096 frames" in dropped(caplog)[0]


def test_unfinished_messages_of_all_are_bounded_and_the_largest_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        async with peer(endpoint) as large, peer(endpoint) as small, peer(endpoint) as last:
            for each, size in ((large, 60_000), (small, 30_000), (last, 20_000)):
                await each.shake_hands()
                await each.send(frame(bytes(size), more=True))
                await asyncio.sleep(0.05)
            assert await large.is_cut()
            assert not await small.is_cut(0.1) and not await last.is_cut(0.1)
            await small.send(frame(PING))
            while (await arrives(endpoint.router))[1] != Ping(0.0):
                pass
            await last.send(frame(bytes(60_000), more=True))
            await last.send(frame(bytes(10_000), more=True))
            await small.send(frame(bytes(30_000), more=True))
            assert await last.is_cut(), "it holds most by now"

    on_stage(scene, tmp_path, **TCP, max_client_bytes=100_000, max_bytes=100_000)
    assert all("of all peers take more than 100000 bytes" in line for line in dropped(caplog))


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "its handshake takes more than 0 s"),
        (GREETING, "its handshake takes more than 0 s"),
        (GREETING + READY, ""),
        (GREETING + READY + frame(b"a", more=True), "a message is unfinished after 0 s"),
        (GREETING + READY + frame(bytes(500))[:-1], "a message is unfinished after 0 s"),
        (GREETING + READY + frame(PING), ""),
    ],
)
def test_handshakes_and_messages_have_time_limits(
    sent: bytes, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("HANDSHAKE_S", 0.2), ("MESSAGE_S", 0.2), ("LOOK_S", 0.02)):
        monkeypatch.setattr(tcp_guard, name, seconds)

    async def scene(endpoint: ClientEndpoint) -> None:
        async with peer(endpoint) as raw:
            for part in (sent[:64], sent[64:]):
                await raw.send(part)
                await asyncio.sleep(0.05)
            assert await raw.is_cut(1.0) == bool(why)

    on_stage(scene, tmp_path, **TCP)
    assert [why in line for line in dropped(caplog)] == [True] * bool(why)


def test_connections_are_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_guard, "MOST_OF_AN_ADDRESS", 2)

    async def scene(endpoint: ClientEndpoint) -> None:
        async with peer(endpoint) as first, peer(endpoint) as second:
            await first.shake_hands()
            await second.shake_hands()
            async with peer(endpoint) as third:
                assert await third.is_cut()
            first.writer.close()
            await asyncio.sleep(0.1)
            async with peer(endpoint) as fourth:
                await fourth.shake_hands()
                await fourth.send(frame(PING))
                while (await arrives(endpoint.router))[1] != Ping(0.0):
                    pass

    on_stage(scene, tmp_path, **TCP)
    assert [text for text in caplog.messages if "is turned away: 2 connections are open, 2 of its address" in text]


def test_last_words_of_a_client_that_leaves_arrive(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        async with peer(endpoint) as raw:
            await raw.shake_hands()
            await raw.send(frame(PING) * 500)
        for _ in range(500):
            assert (await arrives(endpoint.router))[1] == Ping(0.0)

    on_stage(scene, tmp_path, **TCP)


@pytest.mark.usefixtures("no_collections")
def test_a_flood_of_tiny_frames_leaves_turns_to_others(tmp_path: Path) -> None:
    """The loop works on what has come for some milliseconds at once, whatever it is."""
    longest = 0.0

    async def scene(endpoint: ClientEndpoint) -> None:
        async def tick() -> None:
            nonlocal longest
            while True:
                began = time.thread_time()
                await asyncio.sleep(0)
                longest = max(longest, time.thread_time() - began)

        async def drain() -> None:
            while True:  # as the service does
                await endpoint.router.recv()
                await asyncio.sleep(0)

        async with peer(endpoint) as raw:
            await raw.shake_hands()
            tasks = [asyncio.create_task(tick()), asyncio.create_task(drain())]
            for _ in range(3):
                await raw.send((frame(b"", more=True) * (MOST_FRAMES - 1) + frame(b"")) + frame(b"\xc1") * 3000)
            await asyncio.sleep(0.3)
            for task in tasks:
                task.cancel()

    on_stage(scene, tmp_path, **TCP)
    assert longest < 0.06, "far from what all of it takes, on a busy machine"


def counted(data: bytes, cuts: list[int], most_bytes: int = 1000) -> tuple[int, list[bytes], str]:
    """What a counter has seen of data that comes in pieces."""
    counter, error = FrameCounter(most_bytes), ""
    try:
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            while begin < end:
                begin = counter.feed(data[:end], begin)
            counter.takes_messages = counter.takes_messages or bool(counter.commands)
    except FrameError as found:
        error = str(found)
    return counter.held, counter.commands, error


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("seed", range(30))
def test_pieces_are_counted_as_the_whole(seed: int) -> None:
    draw = random.Random(seed)
    data = GREETING + READY
    for _ in range(draw.randint(0, 30)):
        size = draw.choice([0, 1, 2, 255, 256, 300])
        data += frame(draw.randbytes(size), more=draw.random() < 0.6, command=draw.random() < 0.1)
    data += draw.choice([b"", b"\x01", b"\x02\0\0", b"\x02" + bytes(7) + b"\x09", b"\x01\x07abc"])
    start = len(GREETING + READY)
    whole = counted(data, [start])
    for count in (1, 3, 20):
        cuts = sorted({start, *(draw.randrange(start, len(data) + 1) for _ in range(count))})
        assert counted(data, cuts) == whole
    assert counted(data, list(range(1, len(data)))) == whole
    assert whole[1] == [READY[2:]]


def test_the_password_of_a_handshake() -> None:
    hello = b"\x05HELLO\x0coverlap-spec\x05s\xc3\xa9sa"
    assert password_of([hello, b"\x08INITIATE"]) == b"s\xc3\xa9sa"
    for wrong in ([], [b"\x05READY"], [b"\x05HELLO"], [b"\x05HELLO\xff"], [b"\x05HELLO\x01a"], [b""]):
        assert password_of(wrong) == b""


def test_a_turn_ends_after_so_many_frames() -> None:
    counter = FrameCounter(1000)
    counter.feed(GREETING)
    counter.takes_messages = True
    data, at, turns = frame(b"") * 5000, 0, 0
    while at < len(data):
        end = counter.feed(data, at)
        assert 0 < end - at <= 2 * FRAMES_OF_A_TURN
        at, turns = end, turns + 1
    assert turns == 5
