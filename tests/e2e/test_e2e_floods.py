"""One client's flood, of any kind, leaves the others their service. Each flood is timed against a user's requests."""

import asyncio
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.command_line import Service

from overlap_spec import SamplingParams
from overlap_spec.client.link import ClientDealer, pack_ids
from overlap_spec.entrypoints.protection.connections import raise_file_limit
from overlap_spec.messages import Generate, TextPrompt, Tokenize, TokenPrompt

pytestmark = pytest.mark.slow

USER: Any = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
ANSWER_S = 4.0  # for a user's request during a flood; alone it takes 0.1 s, and machines that test are busy


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory, tiny_flags: tuple[str, ...]) -> Iterator[Service]:
    flags = (*tiny_flags, "--max-connections-per-address", "1000", "--no-recover")
    with Service(tmp_path_factory.mktemp("flooded"), *flags) as service:
        yield service


def during(service: Service, flood: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """While a flood goes on a user's requests are answered, one after another, and a stream goes on to its end."""

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=service.url, timeout=30, limits=limits) as http:
            stream = asyncio.create_task(read_stream(http))
            flooding, times = asyncio.create_task(flood(http)), list[float]()
            while not flooding.done() or len(times) < 3:
                began = time.monotonic()
                answer = await http.post("/v1/completions", json=USER)
                assert answer.status_code == 200, answer.text
                assert (await http.get("/health")).status_code == 200
                times.append(time.monotonic() - began)
                await asyncio.sleep(0.02)
            await flooding
            assert await stream == 300
            assert max(times) < ANSWER_S

    asyncio.run(run())
    assert "client 1 " not in service.log() and "has failed" not in service.log()  # client 1: the HTTP server


async def read_stream(http: httpx.AsyncClient) -> int:
    body = {**USER, "max_tokens": 300, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        events = [line[6:] async for line in reply.aiter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    usage: dict[str, int] = json.loads(events[-2])["usage"]
    return usage["completion_tokens"]


def test_silent_connections(flooded: Service) -> None:
    raise_file_limit()
    port = int(flooded.url.rpartition(":")[2])

    async def flood(_: httpx.AsyncClient) -> None:
        opened: list[socket.socket] = []
        for index in range(1100):
            opened.append(await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port)))
            if index % 2:
                opened[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
        await asyncio.sleep(0.5)
        for each in opened:
            each.close()

    during(flooded, flood)
    assert flooded.logs("closed while silent, for new ones")


def test_large_bodies(flooded: Service) -> None:
    body = b'{"input_ids":[' + b"[1]," * 2_000_000 + b"[1]]}"

    async def flood(http: httpx.AsyncClient) -> None:
        for answer in await asyncio.gather(*(http.post("/generate", content=body) for _ in range(4))):
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "input_ids"

    during(flooded, flood)


def test_long_texts(flooded: Service) -> None:
    async def flood(http: httpx.AsyncClient) -> None:
        began = time.monotonic()
        refused = await http.post("/tokenize", json={"prompt": "a" * 8_150_000})
        assert refused.status_code == 400 and "characters" in refused.json()["error"]["message"]
        assert time.monotonic() - began < ANSWER_S
        long = [asyncio.create_task(http.post("/tokenize", json={"prompt": "a" * 150_000})) for _ in range(2)]
        left = [asyncio.create_task(http.post("/tokenize", json={"prompt": "a" * 150_000})) for _ in range(4)]
        await asyncio.sleep(0.3)
        for task in left:
            task.cancel()  # what has not begun never does
        assert {(await task).status_code for task in long} == {200}

    during(flooded, flood)
    assert resident_mb(flooded.actors()["frontend"]) < 200  # one of them takes 100 MB while it is encoded


def test_a_zmq_client_that_floods(flooded: Service) -> None:
    async def flood(_: httpx.AsyncClient) -> None:
        dealer = ClientDealer(flooded.endpoint, None)
        params = SamplingParams(max_new_tokens=1)
        for index in range(10_000):
            dealer.send(Tokenize(f"t{index}", TextPrompt("a b c")))
            if index % 40 == 0:
                dealer.send(Generate(f"g{index}", TokenPrompt(pack_ids([1, 2])), params))
            if index % 100 == 0:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.5)
        await dealer.close()  # and it is gone, its answers unread

    during(flooded, flood)
    during(flooded, lambda _: asyncio.sleep(0.3))


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
