"""The public link over real sockets: bounded and watched. The test is both ends."""

import asyncio
import contextlib
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import zmq
from support.public_link import TIMEOUT_S, arrives, dealer, never, on_stage

from overlap_spec.client.link import ClientDealer, Gone, Malformed, Unread
from overlap_spec.frontend.frontend_actor import ClientEndpoint
from overlap_spec.messages import (
    Cancel,
    Detokenize,
    Detokenized,
    ErrorCode,
    GetStats,
    Ping,
    Pong,
    Rejected,
    Stats,
    StatsReply,
    TextDeltas,
    TextPrompt,
    Tokenize,
    Usage,
)
from overlap_spec.runtime.heap import GivingBack

AT_ONCE_S = 5.0  # half of the time after which silence alone would end a client
GONE = Gone("closed its connection, or its process answers no more")


def test_messages_go_both_ways_and_clients_have_numbers(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        router = endpoint.router
        async with dealer(endpoint) as one, dealer(endpoint) as two:
            one.send(Ping(1.0))
            assert await arrives(router) == (1, Ping(1.0))
            two.send(GetStats("s"))
            assert await arrives(router) == (2, GetStats("s"))
            router.send(2, StatsReply("s", Stats()))
            router.send(1, Pong(1.0, True))
            assert await one.recv() == Pong(1.0, True)
            assert await two.recv() == StatsReply("s", Stats())
            router.send(77, Pong(1.0, True))  # no such client: nothing happens

    on_stage(scene, tmp_path)


def test_the_memory_of_large_messages_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(GivingBack, "soon", lambda giving_back: given.append(1))

    async def scene(endpoint: ClientEndpoint) -> None:
        async with dealer(endpoint) as client:
            client.send(Tokenize("small", TextPrompt("a")))
            await arrives(endpoint.router)
            assert not given
            client.send(Tokenize("large", TextPrompt("a" * (2 << 20))))
            await arrives(endpoint.router)
            assert given

    on_stage(scene, tmp_path)


def test_a_reader_is_woken_although_sends_touch_the_same_socket(tmp_path: Path) -> None:
    """Sends swallow the descriptor's edges; without the check after each of them a reader would hang."""

    async def scene(endpoint: ClientEndpoint) -> None:
        async def echo() -> None:
            while True:
                number, message = await endpoint.router.recv()
                assert isinstance(message, Ping)
                endpoint.router.send(number, Pong(message.sent_at, True))

        async def shout(client: ClientDealer) -> None:
            for index in range(1000):
                client.send(Ping(float(index)))
                if index % 7 == 0:
                    await asyncio.sleep(0)

        async with dealer(endpoint) as client:
            echoing, shouting = asyncio.create_task(echo()), asyncio.create_task(shout(client))
            heard = [await asyncio.wait_for(client.recv(), TIMEOUT_S) for _ in range(1000)]
            await shouting
            echoing.cancel()
        assert [pong.sent_at for pong in heard if isinstance(pong, Pong)] == [float(index) for index in range(1000)]

    on_stage(scene, tmp_path)


def deaf_client(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> "zmq.Socket[bytes]":
    """It says one word and reads nothing."""
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.RCVHWM, 1)
    client.setsockopt(zmq.RCVBUF, 4096)
    client.setsockopt(zmq.LINGER, 0)
    client.connect(address)
    client.send(msgspec.msgpack.encode(Ping(0.0)))
    return client


CHUNK = "x" * 10_000


def step(*request_ids: str) -> TextDeltas:
    count = len(request_ids)
    usage = Usage(1, 0, 1, 0)
    return TextDeltas(list(request_ids), [CHUNK] * count, [[]] * count, [None] * count, [usage] * count)


def test_a_request_whose_answer_is_not_read_is_ended_alone_and_nobody_waits_for_it(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        deaf = deaf_client(context, endpoint.address)
        router = endpoint.router
        assert (await arrives(router))[0] == 1
        async with dealer(endpoint) as lively:
            lively.send(Ping(0.0))
            assert (await arrives(router))[0] == 2
            unread = asyncio.create_task(router.recv())
            num_sent, seconds = 0, []
            while not unread.done():
                began = time.perf_counter()
                router.send(1, step("long"))
                seconds.append(time.perf_counter() - began)
                num_sent += 1
                if num_sent % 20 == 0:
                    router.send(1, Detokenized("other", CHUNK * 30))  # one answer, however large, is not too many
                    router.send(2, Pong(float(num_sent), True))
                    assert await lively.recv() == Pong(float(num_sent), True)
                assert num_sent < 500
                await asyncio.sleep(0)
            number, word = unread.result()
            assert number == 1 and isinstance(word, Unread) and word.request_id == "long"
            assert 200_000 < word.num_bytes < 220_000
            assert statistics.median(seconds) < 0.02
        deaf.close(0)
        context.destroy(linger=0)

    on_stage(scene, tmp_path, max_queued_bytes=200_000)


def test_a_client_whose_loop_is_busy_is_sent_everything_all_the_same(tmp_path: Path) -> None:
    """ZeroMQ's thread takes it from the connection: one large answer cannot end the others of the same client."""

    async def scene(endpoint: ClientEndpoint) -> None:
        router = endpoint.router
        async with dealer(endpoint) as busy:
            busy.send(Ping(0.0))
            assert (await arrives(router))[0] == 1
            unread = asyncio.create_task(router.recv())
            for _ in range(10):
                for _ in range(150):  # fewer bytes than the bound, however late ZeroMQ's threads are
                    router.send(1, step("a"))
                while router._unread:
                    await asyncio.sleep(0.001)
            assert not unread.done()
            unread.cancel()

    on_stage(scene, tmp_path, max_queued_bytes=2_000_000)


def test_what_has_room_by_now_is_not_unread(tmp_path: Path) -> None:
    """ZeroMQ is asked again before a request is ended, although the next attempt on the clock is still to come."""

    async def scene(endpoint: ClientEndpoint) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        late = deaf_client(context, endpoint.address)
        late.setsockopt(zmq.RCVTIMEO, round(1e3 * TIMEOUT_S))
        router = endpoint.router
        await arrives(router)
        num_sent = 0
        while router._unread < 150_000:  # the loop gets no turn from here on, and nothing is tried again
            router.send(1, step("a"))
            num_sent += 1
        for _ in range(num_sent - router._unread // len(CHUNK)):
            late.recv()
        for _ in range(10):
            router.send(1, step("a"))
        await never(router.recv(), 0.05)
        context.destroy(linger=0)

    on_stage(scene, tmp_path, max_queued_bytes=200_000)


def test_what_a_client_leaves_unread_is_bounded_too_and_the_longest_stream_ends_first(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        deaf = deaf_client(context, endpoint.address)
        router = endpoint.router
        await arrives(router)
        words: list[object] = []
        while len(words) < 1:
            router.send(1, step("a"))
            router.send(1, step("a", "b"))
            with contextlib.suppress(TimeoutError):
                words.append((await asyncio.wait_for(router.recv(), 0.001))[1])
        assert isinstance(words[0], Unread) and words[0].request_id == "a"
        for _ in range(5):
            router.send(1, Detokenized("q", CHUNK))  # refused instead: the client is told when it reads
        while not isinstance(words[-1], Gone):
            router.send(1, step("b"))
            words.append((await arrives(router))[1])
        assert "bytes unread" in words[-1].why
        deaf.close(0)
        context.destroy(linger=0)

    on_stage(scene, tmp_path, max_queued_bytes=10**9, max_client_bytes=300_000)


def test_a_client_that_reads_late_but_in_time_gets_everything_in_order(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        late = deaf_client(context, endpoint.address)
        await arrives(endpoint.router)
        for index in range(300):
            endpoint.router.send(1, Detokenized(str(index), CHUNK))
        received = []
        while len(received) < 300:
            if late.poll(0):
                received.append(msgspec.msgpack.decode(late.recv(), type=Detokenized).request_id)
            else:
                await asyncio.sleep(0.005)
        assert received == [str(index) for index in range(300)]
        context.destroy(linger=0)

    on_stage(scene, tmp_path)


def test_a_stopped_process_is_gone_and_a_busy_one_is_not(tmp_path: Path) -> None:
    """ZeroMQ's own threads answer heartbeats, whatever the loop of the client does."""

    async def scene(endpoint: ClientEndpoint) -> None:
        router = endpoint.router
        async with dealer(endpoint) as busy:
            busy.send(Ping(0.0))
            assert (await arrives(router))[0] == 1
            command = [sys.executable, "-c", KILLED, endpoint.address]
            with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
                assert (await router.recv())[0] == 2
                process.send_signal(signal.SIGSTOP)
                number, word = await arrives(router)
                assert number == 2 and isinstance(word, Gone) and "answers no more" in word.why
                process.kill()
            await never(router.recv(), 0.8)  # two timeouts in which the other one has said nothing
            router.send(1, Pong(0.0, True))
            assert await busy.recv() == Pong(0.0, True)

    on_stage(scene, tmp_path, client_timeout_s=0.4)


def test_a_flood_waits_in_its_own_queue_and_what_is_too_much_is_refused(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        router = endpoint.router
        async with dealer(endpoint) as flood, dealer(endpoint) as user:
            for index in range(1500):
                flood.send(GetStats(f"flood {index}"))
            while (await arrives(router))[1] != GetStats("flood 20"):
                pass
            user.send(Ping(5.0))
            await asyncio.sleep(0.1)
            others = 0
            while (await arrives(router))[1] != Ping(5.0):
                others += 1
            assert others <= 4
            flood.send(Cancel("flood 1"))  # it ends work, so it is read
            num_read = 0
            while (word := await arrives(router)) != (1, Cancel("flood 1")):
                num_read += 1
                assert word[0] == 1
            assert num_read < 500
            refused = [await flood.recv() for _ in range(900)]
            assert all(isinstance(word, Rejected) and word.code is ErrorCode.OVERLOADED for word in refused)
        assert isinstance((await arrives(router))[1], Gone)

    on_stage(scene, tmp_path, max_client_messages=100)


def test_bytes_that_wait_are_bounded_for_each_client_and_in_all(tmp_path: Path) -> None:
    def text(name: str) -> Tokenize:
        return Tokenize(name, TextPrompt("x" * 10_000))

    async def scene(endpoint: ClientEndpoint) -> None:
        router = endpoint.router
        async with dealer(endpoint) as one, dealer(endpoint) as two, dealer(endpoint) as three:
            for client in (one, two, three):
                client.send_all([text(str(index)) for index in range(4)])
            while len(router._clients) < 3:
                await asyncio.sleep(0.001)
                router._read(1)
            assert 70_000 < router._waiting.budget.total < 75_000  # of one of them a single text
            for client in (one, two, three):
                word = await asyncio.wait_for(client.recv(), TIMEOUT_S)
                assert isinstance(word, Rejected) and "too much waits" in word.message
            assert (await arrives(router))[1] == text("0")

    on_stage(scene, tmp_path, max_client_bytes=32_000, max_bytes=75_000)


def test_what_a_client_had_waiting_goes_with_it(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        router = endpoint.router
        async with dealer(endpoint) as leaving:
            for index in range(50):
                leaving.send(GetStats(str(index)))
            leaving.send(Cancel("x", everyone=True))
            await arrives(router)
        words = []
        while not words or not isinstance(words[-1], Gone):
            words.append((await arrives(router))[1])
            await asyncio.sleep(0.01)
        assert words[-2] == Cancel("x", everyone=True)
        assert len(words) < 50
        await never(router.recv(), 0.1)

    on_stage(scene, tmp_path)


def test_what_a_dropped_client_has_still_sent_is_as_much_its_keys_as_before(tmp_path: Path) -> None:
    """It sends far more than is read, all at once: the end of that comes after it was dropped."""

    async def scene(endpoint: ClientEndpoint) -> None:
        router = endpoint.router
        async with dealer(endpoint, "ka") as flooding:
            flooding.send_all([*(Cancel("x", everyone=True) for _ in range(20)), Cancel("y", everyone=True)])
            words = []
            while not any(isinstance(word, Cancel) and word.request_id == "y" for word in words):
                words.append((await arrives(router))[1])
        assert any(isinstance(word, Gone) for word in words)
        assert {word.of_key for word in words if isinstance(word, Cancel)} == {"alice"}

    keys = {"api_key": "ka", "key_names": {"ka": "alice"}, "max_client_messages": 5}
    on_stage(scene, tmp_path, client_endpoint="tcp://127.0.0.1:*", **keys)


def test_a_query_takes_the_turn_of_its_key_and_a_gateways_that_of_its_caller(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        for key, owner in (("ka", "key alice"), ("boss", "key bob")):
            async with dealer(endpoint, key) as client:
                client.send(Tokenize("t", TextPrompt("x"), owner="key bob"))
                client.send(Detokenize("d", b"", owner="key bob"))
                words = [(await arrives(endpoint.router))[1] for _ in range(2)]
                assert [word.owner for word in words if isinstance(word, Tokenize | Detokenize)] == [owner] * 2
            assert isinstance((await arrives(endpoint.router))[1], Gone)

    keys = {"api_key": "ka", "key_names": {"ka": "alice"}, "admin_key": "boss"}
    on_stage(scene, tmp_path, client_endpoint="tcp://127.0.0.1:*", **keys)


def test_a_closed_connection_is_noticed_at_once_although_nothing_is_sent(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        async with dealer(endpoint) as other:
            other.send(Ping(0.0))
            await arrives(endpoint.router)
            async with dealer(endpoint) as leaving:
                leaving.send(Ping(0.0))
                await arrives(endpoint.router)
            began = time.monotonic()
            assert await arrives(endpoint.router) == (2, GONE)
            assert time.monotonic() - began < AT_ONCE_S
            other.send(Ping(1.0))
            assert await arrives(endpoint.router) == (1, Ping(1.0))
            endpoint.router.send(1, Pong(1.0, True))
            assert await other.recv() == Pong(1.0, True)  # the probe was not taken for a message

    on_stage(scene, tmp_path)


KILLED = """
import sys, zmq, msgspec
from overlap_spec.messages import Ping
client = zmq.Context().socket(zmq.DEALER)
client.setsockopt(zmq.RCVHWM, 1)
client.connect(sys.argv[1])
client.send(msgspec.msgpack.encode(Ping(0.0)))
sys.stdin.read()
"""


def test_a_killed_client_is_noticed_at_once_also_with_messages_under_way(tmp_path: Path) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        command = [sys.executable, "-c", KILLED, endpoint.address]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            await endpoint.router.recv()
            for _ in range(100):
                endpoint.router.send(1, Detokenized("r", CHUNK))
            await asyncio.sleep(0.05)
            process.kill()
            process.wait()
            began = time.monotonic()
            assert await arrives(endpoint.router) == (1, GONE)
            assert time.monotonic() - began < AT_ONCE_S

    on_stage(scene, tmp_path)


GENERATE = ["Generate", "r", ["TextPrompt", "Hi"], {}]


@pytest.mark.parametrize(
    ("payload", "request_id", "field"),
    [
        (b"", "", ""),
        (b"\xc1garbage", "", ""),
        (msgspec.msgpack.encode({"a": 1}), "", ""),
        (msgspec.msgpack.encode(["Unknown", "r"]), "r", ""),
        (msgspec.msgpack.encode(["Generate", 5]), "", ""),
        (msgspec.msgpack.encode([*GENERATE[:3], {"top_p": 7}]), "r", "top_p"),
        (msgspec.msgpack.encode([*GENERATE[:3], {"top_p": "x"}]), "r", "top_p"),
        (msgspec.msgpack.encode([*GENERATE[:3], {"temperature": float("nan")}]), "r", "temperature"),
        (msgspec.msgpack.encode([*GENERATE[:3], {"stop_token_ids": ["x"]}]), "r", "stop_token_ids"),
        (msgspec.msgpack.encode(["Generate", "r", ["NoPrompt"], {}]), "r", ""),
        (msgspec.msgpack.encode(GENERATE).replace(b"Hi", b"\xff\xfe"), "r", ""),
        (msgspec.msgpack.encode(["Generate", "r", ["ChatPrompt", []]])[:-1] + b"\x91" * 3000, "r", ""),
    ],
)
def test_something_malformed_is_told_from_whom_and_what(
    tmp_path: Path, payload: bytes, request_id: str, field: str
) -> None:
    async def scene(endpoint: ClientEndpoint) -> None:
        async with dealer(endpoint) as client:
            client._duplex.socket.send(payload)
            number, word = await arrives(endpoint.router)
            assert number == 1 and isinstance(word, Malformed)
            assert (word.request_id, word.field) == (request_id, field)
            client._duplex.socket.send_multipart((b"two", b"frames"))
            assert isinstance((await arrives(endpoint.router))[1], Malformed)

    on_stage(scene, tmp_path)


def test_what_a_client_has_left_behind_is_not_read(tmp_path: Path) -> None:
    """Its messages are still in the socket when its connection has ended; what it has cancelled is cancelled."""

    async def scene(endpoint: ClientEndpoint) -> None:
        router = endpoint.router
        async with dealer(endpoint) as first:
            first.send(Ping(1.0))
            assert await arrives(router) == (1, Ping(1.0))
        assert await arrives(router) == (1, GONE)
        left = dealer(endpoint)
        async with left as second:
            second.send_all((Detokenize("d", b""), Cancel("c"), Detokenize("e", b"")))
        time.sleep(0.3)  # the router's loop is busy until the connection has ended
        found = [await arrives(router), await arrives(router)]
        assert sorted(found, key=str) == sorted([(2, GONE), (2, Cancel("c"))], key=str)
        async with dealer(endpoint) as third:
            third.send(Ping(2.0))
            assert await arrives(router) == (3, Ping(2.0))

    on_stage(scene, tmp_path)
