"""What one client sends is parsed in turns, within bounds, and not at all once its request is refused."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import h11
import pytest
from msgspec.structs import replace
from support.fake_engine_client import INFO, FakeClient, healthy

from overlap_spec.config import ApiKeys
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.http_server import HttpServer
from overlap_spec.entrypoints.protection.http_protocol import (
    BLANKS,
    CHUNKED_BYTES,
    FREE_CHUNKS,
    HEAD_BYTES,
    MEAN_CHUNK_BYTES,
    MOST_HEADER_LINES,
    TURN_BYTES,
    BoundedConnection,
    HttpProtocol,
)

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-api-key: k\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
TIMEOUT_S = 60.0
STATUS = b"HTTP/1.1 "
TURN_S = 0.1  # of a thread's CPU time; measured 3 ms at most, and 200 ms or more without turns


class Parsed:
    """What every connection gave its parser in one go, in bytes, and the longest turn, in seconds of CPU time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.longest_s = 0.0
        receive, run = BoundedConnection.receive_data, asyncio.Handle._run

        def counted(connection: BoundedConnection, data: bytes) -> None:
            self.sizes.append(len(data))
            receive(connection, data)

        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            run(handle)
            self.longest_s = max(self.longest_s, time.thread_time() - began)

        monkeypatch.setattr(BoundedConnection, "receive_data", counted)
        monkeypatch.setattr(asyncio.Handle, "_run", timed)


@pytest.fixture
def parsed(no_collections: None, monkeypatch: pytest.MonkeyPatch) -> Parsed:
    return Parsed(monkeypatch)


@asynccontextmanager
async def serving() -> AsyncIterator[HttpServer]:
    app = create_app(FakeClient(), replace(INFO, keys=ApiKeys({"k": "one"}), max_body_bytes=1 << 20), healthy)
    server = HttpServer(app, "127.0.0.1", 0)
    await server.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield server
    finally:
        await server.stop(0.2)


async def exchange(server: HttpServer, said: bytes, answers: int = 1) -> bytes:
    """All that comes back until the server ends the connection, or 0.2 s after the last byte of the last answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    heard = b""
    try:
        for begin in range(0, len(said), 100_000):
            writer.write(said[begin : begin + 100_000])
            await asyncio.sleep(0)
        while part := await asyncio.wait_for(reader.read(1 << 16), TIMEOUT_S if heard.count(STATUS) < answers else 0.2):
            heard += part
    except (TimeoutError, ConnectionError):
        pass
    writer.transport.abort()
    return heard


def with_server(story: Callable[[HttpServer], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serving() as server:
            await story(server)

    asyncio.run(run())


def in_chunks(body: bytes, size: int, extension: bytes = b"") -> bytes:
    parts = [body[begin : begin + size] for begin in range(0, len(body), size)]
    return b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n\r\n"


def statuses(heard: bytes) -> list[int]:
    return [int(part[:3]) for part in heard.split(STATUS)[1:]]


def error_of(heard: bytes) -> tuple[int, str]:
    (status,) = statuses(heard)
    return status, json.loads(heard.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_turn_gives_the_parser_little_and_other_clients_take_theirs(parsed: Parsed) -> None:
    body = json.dumps({"prompt": "a" * 900_000}).encode()

    async def story(server: HttpServer) -> None:
        for sent in (HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body, CHUNKED + in_chunks(body, 4096)):
            parsed.sizes.clear()
            large = asyncio.create_task(exchange(server, sent))
            between = 0
            while not large.done() and sum(parsed.sizes) < 800_000:
                seen = len(parsed.sizes)
                await asyncio.sleep(0)
                between += 1
                assert sum(parsed.sizes[seen:]) <= TURN_BYTES
            assert between > 800_000 // TURN_BYTES
            assert statuses(await large) == [200]

    with_server(story)


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        (b"POST /v1/completions", b"", 401),
        (b"POST /no/such", b"x-api-key: k\r\n", 404),
        (b"DELETE /health", b"", 405),
        (b"POST /v1/completions", b"x-api-key: k\r\nContent-Length: %d\r\n" % (3 << 20), 413),
    ],
)
def test_nothing_is_parsed_after_a_request_is_refused(
    request_line: bytes, headers: bytes, status: int, parsed: Parsed
) -> None:
    framing = b"" if b"Length" in headers else b"Transfer-Encoding: chunked\r\n"
    rest = b"1\r\n \r\n" * 500_000

    async def story(server: HttpServer) -> None:
        heard = await exchange(server, request_line + b" HTTP/1.1\r\nHost: x\r\n" + headers + framing + b"\r\n" + rest)
        assert statuses(heard) == [status] and b"connection: close" in heard.lower()
        assert sum(parsed.sizes) <= 2 * TURN_BYTES
        assert parsed.longest_s < TURN_S

    with_server(story)


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        (CHUNKED + b"1\r\n \r\n" * 100_000, 400, f"{MEAN_CHUNK_BYTES} bytes or more on average, got 5"),
        (CHUNKED + in_chunks(b" " * 500_000, MEAN_CHUNK_BYTES - 1), 400, "send larger chunks, or a Content-Length"),
        (
            CHUNKED + b"1;" + b"x" * 2 * CHUNKED_BYTES,
            431,
            f"the head of a chunk, or the trailers, may have {CHUNKED_BYTES}",
        ),
        (CHUNKED + b"0\r\n" + b"a: b\r\n" * CHUNKED_BYTES, 431, "the trailers, may have"),
        (CHUNKED + b"x\r\n", 400, "not valid HTTP"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 5000, 431, f"{HEAD_BYTES} bytes"),
        (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 129 + b"\r\n", 431, f"{MOST_HEADER_LINES} header lines, got 129"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\na:" + b" \t" * 7000 + b"\0\r\n\r\n", 400, f"fewer than {BLANKS} spaces"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\na" * 2 + b"\r\n\r\n", 400, "not valid HTTP"),
    ],
)
def test_what_takes_the_parser_long_is_refused_by_name(said: bytes, status: int, words: str, parsed: Parsed) -> None:
    async def story(server: HttpServer) -> None:
        found, text = error_of(await exchange(server, said))
        assert found == status and words in text, text
        assert parsed.longest_s < TURN_S

    with_server(story)


def test_a_body_of_two_lengths_ends_the_connection() -> None:
    """What a proxy took for the body's end may be another request's begin."""

    async def story(server: HttpServer) -> None:
        heard = await exchange(server, CHUNKED[:-2] + b"Content-Length: 5\r\n\r\n0\r\n\r\n" + GET, 2)
        assert statuses(heard) == [400] and b"got both" in heard and b"connection: close" in heard

    with_server(story)


def test_a_target_may_have_the_host() -> None:
    """As proxies write it. It is the Host's."""

    async def story(server: HttpServer) -> None:
        for target in (b"http://x/health", b"HTTPS://X/health?a=http://y"):
            assert statuses(await exchange(server, GET.replace(b"/health", target))) == [200]
        assert statuses(await exchange(server, GET.replace(b"/health", b"http://x?a"))) == [401]  # of /
        old = GET.replace(b"/health", b"http://x/health").replace(b"1.1", b"1.0")
        assert statuses(await exchange(server, old + GET)) == [200]  # the version stays: such a connection ends
        for said in (
            old.replace(b"Host: x\r\n", b""),
            *(GET.replace(b"/health", b"http://" + y) for y in (b"y/", b"x:1/")),
        ):
            status, text = error_of(await exchange(server, said))
            assert status == 400 and "needs a Host header" in text

    with_server(story)


def test_real_clients_chunks_are_taken() -> None:
    body = json.dumps({"prompt": "a b", "unknown": "u" * 200_000}).encode()

    async def story(server: HttpServer) -> None:
        for chunks in (in_chunks(body, 1024), in_chunks(body, MEAN_CHUNK_BYTES, b';name="value"')):
            assert statuses(await exchange(server, CHUNKED + chunks)) == [200]
        small = json.dumps({"prompt": "a b", "unknown": "u" * (FREE_CHUNKS - 50)}).encode()
        assert statuses(
            await exchange(server, CHUNKED + in_chunks(small[:FREE_CHUNKS], 1)[:-5] + in_chunks(small[FREE_CHUNKS:], 9))
        ) == [200]

    with_server(story)


def test_a_refused_request_keeps_nothing_of_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error's traceback has the frames that read, and connections are cycles: 250 KB stayed of each."""
    refused: list[Problem] = []
    refuse = HttpProtocol._refuse

    def noted(protocol: HttpProtocol, problem: Problem) -> None:
        refused.append(problem)
        refuse(protocol, problem)

    monkeypatch.setattr(HttpProtocol, "_refuse", noted)

    async def story(server: HttpServer) -> None:
        await exchange(server, CHUNKED + in_chunks(b" " * (2 * FREE_CHUNKS), 1))
        await exchange(server, b"GET / HTTP/1.1\r\nx: " + b" " * (2 * BLANKS) + b"!\r\n\r\n")

    with_server(story)
    assert len(refused) == 2 and not any(problem.__traceback__ for problem in refused)


def test_pipelined_requests_are_answered_one_a_turn(parsed: Parsed) -> None:
    async def story(server: HttpServer) -> None:
        answers = await exchange(server, GET * 300, 300)
        assert statuses(answers) == [200] * 300
        assert max(parsed.sizes) <= len(GET)
        assert parsed.longest_s < TURN_S

    with_server(story)


def test_a_client_that_leaves_with_bytes_unparsed_is_noticed() -> None:
    hang = json.dumps({"prompt": "one hang", "stream": True}).encode()

    async def story() -> None:
        client = FakeClient()
        server = HttpServer(create_app(client, INFO, healthy), "127.0.0.1", 0)
        await server.start()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(hang) + hang + GET)
        async with asyncio.timeout(TIMEOUT_S):
            while not client.running:
                await asyncio.sleep(0.005)
            writer.close()
            while client.running:
                await asyncio.sleep(0.005)
        await server.stop(0.2)

    asyncio.run(story())


def test_a_head_in_pieces_of_one_byte_is_read() -> None:
    connection, taken = BoundedConnection(), b""
    for byte in GET + GET:
        arrived = bytearray([byte])
        if connection.parses and (count := connection.num_taken(arrived, TURN_BYTES)):
            taken += arrived[:count]
            connection.receive_data(bytes(arrived[:count]))
            event = connection.next_event()
            assert event is h11.NEED_DATA or taken == GET
    assert taken == GET
