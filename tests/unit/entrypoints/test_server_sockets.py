"""The server on a loopback port: the openai client, clients that go away, large bodies, stopping."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import h11
import httpx
import openai
import pytest
import uvloop
from support.fake_engine_client import INFO, FakeClient, healthy

from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.http_server import HttpServer
from overlap_spec.entrypoints.protection.http_protocol import BoundedConnection

MESSAGES: Any = [{"role": "user", "content": "one two three"}]
HANG = json.dumps({"messages": [{"role": "user", "content": "one hang"}], "stream": True}).encode()
SLEEP = json.dumps({"prompt": "sleep"}).encode()
ABORT_S = 2.0  # what is aborted would run for ever, or for 5 s
CONNECTIONS = 64
STALL_S = 2.0  # measured 20 ms; a busy machine must not fail the test


@asynccontextmanager
async def serving(client: FakeClient) -> AsyncIterator[HttpServer]:
    server = HttpServer(create_app(client, INFO, healthy), "127.0.0.1", 0)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(1.0)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("has_length", [False, True])
def test_an_answer_is_written_as_h11_writes_it(version: str, has_length: bool) -> None:
    parts = (b"data: 1\n\n", b"", b"data: a longer one")
    headers = [("content-length", str(sum(map(len, parts))))] if has_length else []
    events = [
        h11.Response(status_code=200, headers=headers),
        *(h11.Data(data=part) for part in parts),
        h11.EndOfMessage(),
    ]
    written = []
    for connection in (h11.Connection(h11.SERVER), BoundedConnection()):
        for _ in range(2 if version == "1.1" else 1):  # requests
            connection.receive_data(f"GET / HTTP/{version}\r\nHost: x\r\n\r\n".encode())
            while type(connection.next_event()) is not h11.EndOfMessage:
                pass
            written.append([connection.send(event) for event in events])
            if version == "1.1":
                connection.start_next_cycle()
    half = len(written) // 2
    assert written[:half] == written[half:]


def test_a_turn_of_a_busy_event_loop_accepts_many_connections() -> None:
    """Turns take milliseconds while hundreds of streams are written: a request must not wait for one of its own."""

    async def story() -> int:
        async with serving(FakeClient()) as server:
            clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(CONNECTIONS)]
            turns = 0
            while len(server._server.server_state.connections) < CONNECTIONS:
                await asyncio.sleep(0)
                turns += 1
            for client in clients:
                client.close()
            return turns

    assert uvloop.run(story()) <= CONNECTIONS // 4


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> float:
    """Seconds until the condition held."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "it did not happen"
        await asyncio.sleep(0.002)
    return time.monotonic() - started


async def post(
    server: HttpServer, path: str, body: bytes, method: str = "POST"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


def with_openai(use: Callable[[openai.AsyncOpenAI, FakeClient], Awaitable[None]]) -> None:
    async def inner() -> None:
        client = FakeClient()
        async with (
            serving(client) as server,
            openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0) as api,
        ):
            await use(api, client)

    asyncio.run(inner())


def test_openai_client_reads_chats() -> None:
    async def use(api: openai.AsyncOpenAI, client: FakeClient) -> None:
        whole = await api.chat.completions.create(model="tiny", messages=MESSAGES)
        assert whole.choices[0].message.content == "one two three"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None and whole.usage.total_tokens == 6

        chunks = await api.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        seen = [chunk async for chunk in chunks]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in seen[:-1]) == "one two three"
        assert seen[0].choices[0].delta.role == "assistant"
        assert seen[-2].choices[0].finish_reason == "stop"
        assert seen[-1].usage is not None and seen[-1].usage.completion_tokens == 3

        async with api.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "one two three"

    with_openai(use)


def test_openai_client_reads_completions_and_models() -> None:
    async def use(api: openai.AsyncOpenAI, client: FakeClient) -> None:
        whole = await api.completions.create(model="tiny", prompt=["a b", "c"], max_tokens=5)
        assert [choice.text for choice in whole.choices] == ["a b", "c"]
        chunks = await api.completions.create(model="tiny", prompt="a b", stream=True)
        assert [chunk.choices[0].text async for chunk in chunks] == ["a", " b"]
        assert [model.id async for model in api.models.list()] == ["tiny"]
        assert (await api.models.retrieve("tiny")).id == "tiny"

    with_openai(use)


def test_openai_client_understands_errors() -> None:
    async def use(api: openai.AsyncOpenAI, client: FakeClient) -> None:
        with pytest.raises(openai.BadRequestError) as bad:
            await api.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            await api.chat.completions.create(model="gpt-4", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.InternalServerError) as busy:
            await api.completions.create(model="tiny", prompt="busy", stream=True)
        assert busy.value.status_code == 503
        chunks = await api.completions.create(model="tiny", prompt="one fail", stream=True)
        with pytest.raises(openai.APIError, match="killed by signal 9"):
            async for _ in chunks:
                pass

    with_openai(use)


def test_openai_client_leaving_its_loop_aborts() -> None:
    async def use(api: openai.AsyncOpenAI, client: FakeClient) -> None:
        chunks = await api.completions.create(model="tiny", prompt="one hang", stream=True)
        async for _ in chunks:
            break
        await chunks.close()
        assert await until(lambda: not client.running) < ABORT_S

    with_openai(use)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", HANG),  # streaming, after its first token
        ("/v1/chat/completions", HANG.replace(b"one hang", b"sleep")),  # streaming, before it
        ("/v1/completions", SLEEP),  # not streaming
        ("/generate", json.dumps({"text": ["one hang", "sleep"], "stream": True}).encode()),
        ("/generate", json.dumps({"text": ["one hang", "sleep"]}).encode()),
        ("/health_generate", b""),
    ],
)
@pytest.mark.parametrize("politely", [True, False])
def test_a_client_that_goes_away_aborts_its_requests(path: str, body: bytes, politely: bool) -> None:
    async def inner() -> None:
        client = FakeClient(step_s=5.0 if path == "/health_generate" else 0.0)
        async with serving(client) as server:
            _, writer = await post(server, path, body, "POST" if body else "GET")
            await until(lambda: len(client.running) == (2 if path == "/generate" else 1))
            await asyncio.sleep(0.02)
            if politely:
                writer.close()
            else:
                writer.transport.abort()
            assert await until(lambda: not client.running) < ABORT_S
            assert (await _get(server, "/v1/models")).status_code == 200

    asyncio.run(inner())


@pytest.mark.parametrize(
    ("words", "streams", "status"), [("sleep", True, 499), ("sleep", False, 499), ("a hang", True, 200)]
)
def test_a_client_that_leaves_is_counted_as_one_that_left_unless_its_answer_had_begun(
    words: str, streams: bool, status: int
) -> None:
    async def inner() -> None:
        client = FakeClient()
        async with serving(client) as server:
            body = json.dumps({"prompt": words, "stream": streams}).encode()
            _, writer = await post(server, "/v1/completions", body)
            await until(lambda: bool(client.running))
            await asyncio.sleep(0.02)
            writer.close()
            await until(lambda: not client.running)
            counts = (await _get(server, "/metrics")).text
            assert f'http_responses_total{{status="{status}"}} 1.0' in counts and 'status="0"' not in counts

    asyncio.run(inner())


def test_a_client_that_does_not_read_delays_nobody_and_can_leave() -> None:
    async def inner() -> None:
        client = FakeClient()
        async with serving(client) as server:
            words = " ".join(["w" * 20_000] * 100)  # cumulative events: 100 MB
            body = json.dumps({"text": words, "stream": True, "sampling_params": {"max_new_tokens": 100}}).encode()
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", server.port))
            slow.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(
                slow, f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            await until(lambda: bool(client.running))
            for _ in range(3):
                assert (await _get(server, "/v1/models")).status_code == 200
                await asyncio.sleep(0.05)
            assert client.running
            slow.close()
            assert await until(lambda: not client.running) < ABORT_S

    asyncio.run(inner())


@pytest.mark.slow
def test_a_body_of_ten_megabytes_is_refused_and_the_server_goes_on() -> None:
    async def inner() -> None:
        async with (
            serving(FakeClient()) as server,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as http,
        ):
            large = json.dumps({"prompt": "a" * (10 << 20)}).encode()

            async def chunked() -> AsyncIterator[bytes]:
                for start in range(0, len(large), 1 << 16):
                    yield large[start : start + (1 << 16)]

            for content in (large, chunked()):
                longest = asyncio.create_task(_longest_stall())
                response = await http.post("/v1/completions", content=content)
                assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
                longest.cancel()
                assert await longest < STALL_S
                assert (await http.get("/v1/models")).status_code == 200
            ids = json.dumps({"input_ids": [1] * 2_000_000}).encode()
            response = await http.post("/generate", content=ids)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "input_ids")

    asyncio.run(inner())


def test_stop_waits_for_open_answers() -> None:
    async def inner() -> None:
        client = FakeClient(step_s=0.1)
        server = HttpServer(create_app(client, INFO, healthy), "127.0.0.1", 0)
        await server.start()
        reader, writer = await post(server, "/v1/completions", b'{"prompt": "a b c", "stream": true}')
        await until(lambda: bool(client.running))
        await server.stop(5.0)
        assert b"data: [DONE]" in await reader.read()
        writer.close()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", server.port)

    asyncio.run(inner())


def test_stop_is_bounded() -> None:
    async def inner() -> None:
        client = FakeClient()
        server = HttpServer(create_app(client, INFO, healthy), "127.0.0.1", 0)
        await server.start()
        half = await asyncio.open_connection("127.0.0.1", server.port)
        half[1].write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        idle = await asyncio.open_connection("127.0.0.1", server.port)
        hanging = await post(server, "/v1/chat/completions", HANG)
        waiting = await post(server, "/v1/completions", SLEEP)
        await until(lambda: len(client.running) == 2)
        started = time.monotonic()
        await server.stop(0.3)
        assert time.monotonic() - started < 5.0  # the requests would run for ever
        assert not client.running
        for _, writer in (half, idle, hanging, waiting):
            writer.close()
        await server.stop(0.3)

    asyncio.run(inner())


def test_a_taken_port_is_an_error_of_its_own() -> None:
    async def inner() -> None:
        async with serving(FakeClient()) as server:
            other = HttpServer(create_app(FakeClient(), INFO, healthy), "127.0.0.1", server.port)
            with pytest.raises(OSError):
                await other.start()

    asyncio.run(inner())


def test_keep_alive_connections_are_reused() -> None:
    async def inner() -> None:
        async with serving(FakeClient()) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            for _ in range(3):
                body = b'{"prompt": "one fail", "stream": true}'
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                answer = await reader.readuntil(b"0\r\n\r\n")
                assert answer.count(b"data: ") == 2
            writer.close()

    asyncio.run(inner())


async def _get(server: HttpServer, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as http:
        return await http.get(path)


async def _longest_stall() -> float:
    """Until cancelled: the longest time that the loop did not come back to us, in seconds."""
    longest, last = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return longest


def test_a_client_that_offers_http2_is_answered_by_http1() -> None:
    """Java's client offers it in every first request, and its body follows the head at once."""

    async def story() -> None:
        async with serving(FakeClient()) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            body = b'{"prompt": "one two"}'
            offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 21\r\n" + offer + b"\r\n" + body)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()

    asyncio.run(story())


def test_a_head_without_an_end_is_cut_off() -> None:
    async def story() -> None:
        async with serving(FakeClient()) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
            try:
                for _ in range(100):
                    writer.write(b"a" * 20_000)
                    await writer.drain()
                async with asyncio.timeout(20):
                    answer = await reader.read(100)
            except ConnectionError:
                return
            assert answer.startswith(b"HTTP/1.1 431")
            writer.close()

    asyncio.run(story())
