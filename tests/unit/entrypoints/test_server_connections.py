"""Connections that send nothing, send slowly, are too many, or go on sending after their answer."""

import asyncio
import json
import logging
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace
from support.fake_engine_client import INFO, FakeClient, healthy

from overlap_spec.config import ApiKeys, HttpLimits
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.http_server import HttpServer
from overlap_spec.entrypoints.protection import connections
from overlap_spec.entrypoints.protection.connections import Connections, raise_file_limit

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HANG = json.dumps({"prompt": "one hang", "stream": True}).encode()
TIMEOUT_S = 15.0  # less than the time that a head has by default
SHORT = HttpLimits(header_timeout_s=0.2, body_timeout_s=0.2)


@asynccontextmanager
async def serving(limits: HttpLimits, **info: object) -> AsyncIterator[HttpServer]:
    app = create_app(FakeClient(), replace(INFO, http=limits, **info), healthy)
    server = HttpServer(app, "127.0.0.1", 0, limits)
    await server.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield server
    finally:
        for client in CLIENTS:
            client.writer.transport.abort()
        CLIENTS.clear()
        await server.stop(0.2)


def with_server(story: Callable[[HttpServer], Awaitable[None]], limits: HttpLimits, **info: object) -> None:
    async def run() -> None:
        async with serving(limits, **info) as server:
            await story(server)

    asyncio.run(run())


CLIENTS: list["Raw"] = []  # of the server that runs


class Raw:
    """A client that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def says(self, data: bytes) -> "Raw":
        self.writer.write(data)
        await self.writer.drain()
        return self

    async def answer(self) -> tuple[int, bytes]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        return int(head.split()[1]), await self._reader.readexactly(length)

    async def status(self) -> int:
        return (await self.answer())[0]

    async def ended(self) -> bytes:
        """What came before the end."""
        return await self._reader.read()


async def connect(server: HttpServer) -> Raw:
    client = Raw(*await asyncio.open_connection("127.0.0.1", server.port))
    CLIENTS.append(client)
    return client


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (b"", b""),
        (b"POST /v1/comple", b"408"),
        (GET[:-2], b"408"),
        (GET + GET[:9], b"408"),  # the second one
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{", b"408"),
    ],
)
def test_a_silent_connection_ends(said: bytes, heard: bytes) -> None:
    async def story(server: HttpServer) -> None:
        client = await (await connect(server)).says(said)
        last = (await client.ended()).split(b"HTTP/1.1 ")[-1]
        assert last.startswith(heard)
        if heard:
            assert json.loads(last.partition(b"\r\n\r\n")[2])["error"]["code"] == "slow_request"
        assert await (await (await connect(server)).says(GET)).status() == 200

    with_server(story, SHORT)


def test_a_body_that_drips_ends_and_a_slow_one_does_not() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"

    async def story(server: HttpServer) -> None:
        drips = await (await connect(server)).says(head % 1000)
        for _ in range(35):
            await drips.says(b" ")
            await asyncio.sleep(0.02)
        assert await drips.status() == 408
        body = b'{"prompt": "a"}' + b" " * 4000
        slow = await (await connect(server)).says(head % len(body))
        for begin in range(0, len(body), 500):
            await slow.says(body[begin : begin + 500])
            await asyncio.sleep(0.12)  # longer than the timeout, all together
        assert (await slow.answer())[0] == 200

    with_server(story, HttpLimits(body_timeout_s=0.6))


def test_answers_that_are_not_read_yet_and_streams_are_no_silence() -> None:
    async def story(server: HttpServer) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(HANG)
        client = await (await connect(server)).says(head + HANG)
        await asyncio.sleep(0.5)
        assert not client._reader.at_eof()
        kept = await (await connect(server)).says(GET)
        assert await kept.status() == 200
        await asyncio.sleep(0.4)
        assert await (await kept.says(GET)).status() == 200  # silence between requests: keep-alive's affair

    with_server(story, SHORT)


@pytest.mark.slow
def test_silent_connections_keep_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    async def story(server: HttpServer) -> None:
        silent = [await connect(server) for _ in range(1100)]
        for _ in range(3):
            assert await (await (await connect(server)).says(GET)).status() == 200
        assert await silent[0].ended() == b""
        assert not silent[-1]._reader.at_eof()

    with_server(story, HttpLimits(max_connections_per_address=1000))
    lines = [record.getMessage() for record in caplog.records if "connections" in record.name]
    assert len(lines) == 1 and "1 closed while silent, for new ones; 1" in lines[0] and "from 127.0.0.1" in lines[0]


def test_a_connection_beyond_the_bound_is_refused_if_none_is_silent() -> None:
    async def story(server: HttpServer) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(HANG)
        busy = [await (await connect(server)).says(head + HANG) for _ in range(3)]
        for each in busy:
            await each._reader.readuntil(b"\r\n\r\n")
        refused = await (await connect(server)).says(GET)
        status, body = await refused.answer()
        assert status == 503 and b"too many connections" in body
        assert await refused.ended() == b""
        busy[0].writer.close()
        await asyncio.sleep(0.05)
        assert await (await (await connect(server)).says(GET)).status() == 200

    with_server(story, HttpLimits(max_connections=3))


REST = b"x" * 1_500_000


@pytest.mark.slow_but_every(4)  # each status, and each way to close
@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"POST /v1/completions", 401),
        (b"DELETE /health", 405),
        (b"POST /v1/completions?authorized", 413),
    ],
)
@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n", b"Expect: 100-continue\r\n"])
def test_an_early_answer_is_read_by_a_client_that_still_sends(request_line: bytes, status: int, close: bytes) -> None:
    key = b"x-api-key: k\r\n" if status == 413 else b""

    async def story(server: HttpServer) -> None:
        for _ in range(3):
            head = b"%s HTTP/1.1\r\nHost: x\r\n%s%sContent-Length: %d\r\n\r\n" % (request_line, key, close, len(REST))
            client = await connect(server)
            await client.says(head)
            for begin in range(0, len(REST), 100_000):
                await client.says(REST[begin : begin + 100_000])
                await asyncio.sleep(0)
            assert (await client.answer())[0] == status
            assert await client.ended() == b""
            client.writer.close()

    with_server(story, HttpLimits(), keys=ApiKeys({"k": "one"}), max_body_bytes=1_000_000)


def test_the_rest_of_an_answered_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_BYTES", 1_000_000)
    monkeypatch.setattr(connections, "LINGER_S", 0.2)
    head = b"POST /no/such HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (1 << 40)

    async def story(server: HttpServer) -> None:
        silent = await (await connect(server)).says(head)
        assert (await silent.answer())[0] == 404
        assert await silent.ended() == b""
        silent.writer.close()
        monkeypatch.setattr(connections, "LINGER_S", 30.0)
        endless = await (await connect(server)).says(head)
        assert (await endless.answer())[0] == 404
        with pytest.raises(ConnectionError):
            for _ in range(2000):
                await endless.says(b"x" * 100_000)

    with_server(story, HttpLimits())


def test_the_limit_of_open_files_is_raised_and_bounds_connections() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(before[1], 3000) if before[1] != resource.RLIM_INFINITY else 3000
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1000, most))
        assert raise_file_limit() == most
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most
        assert raise_file_limit() == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], most), most))
    assert Connections(HttpLimits(), most_files=300)._most == 44


class FakeConnection:
    def __init__(self, address: str) -> None:
        self.address = address
        self.is_closed = False

    def close_silent(self) -> None:
        self.is_closed = True


def test_the_longest_silent_one_of_the_same_address_goes_first() -> None:
    connections = Connections(HttpLimits(max_connections=6, max_connections_per_address=3), 10_000)
    mine = [FakeConnection("a") for _ in range(4)]
    others = [FakeConnection("b") for _ in range(3)]
    assert connections.opened(others[0]) and all(map(connections.opened, mine[:3]))
    connections.set_silent(mine[0], False)
    connections.set_silent(mine[1], False)
    connections.set_silent(mine[1], True)  # silent again, but not for as long as the third
    assert connections.opened(mine[3])
    assert [each.is_closed for each in (*mine, others[0])] == [False, False, True, False, False]
    assert all(map(connections.opened, others[1:]))
    last = FakeConnection("c")
    assert connections.opened(last) and others[0].is_closed  # in all: whoever has been silent longest
    for each in (*mine, *others, last):
        connections.closed(each)
        connections.closed(each)
    assert len(connections) == 0 and not connections._by_address and not connections._silent


def test_the_log_gets_one_line_for_many(caplog: pytest.LogCaptureFixture) -> None:
    async def story(server: HttpServer) -> None:
        async def silent() -> None:
            await (await connect(server)).ended()

        await asyncio.gather(*(silent() for _ in range(20)))

    with caplog.at_level(logging.WARNING):
        with_server(story, SHORT)
    assert len([record for record in caplog.records if "connections" in record.name]) == 1


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_an_upgrade_is_left_out_without_a_line_of_the_log(caplog: pytest.LogCaptureFixture, protocol: bytes) -> None:
    """Java's client asks for HTTP/2 with every connection."""

    async def story(server: HttpServer) -> None:
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: " + protocol
        assert await (await (await connect(server)).says(head + b"\r\n\r\n")).status() == 200

    with caplog.at_level(logging.WARNING):
        with_server(story, SHORT)
    assert not caplog.records


class Quiet:
    """A connection that notes that it was closed."""

    def __init__(self, address: str) -> None:
        self.address, self.is_closed = address, False

    def close_silent(self) -> None:
        self.is_closed = True


def test_a_connection_with_a_request_is_never_closed_for_a_new_one() -> None:
    connections = Connections(HttpLimits(max_connections=2), most_files=1024)
    first, second, third, last = (Quiet(name) for name in "abcd")
    assert connections.opened(first) and connections.opened(second)
    connections.set_silent(first, False)
    assert connections.opened(third) and (first.is_closed, second.is_closed) == (False, True)
    connections.set_silent(third, False)
    assert not connections.opened(last) and not (first.is_closed or third.is_closed)
    connections.set_silent(first, True)
    assert connections.opened(last) and first.is_closed
