"""Large bodies: parsed beside other requests, bounded in what is in them, and in bytes of an address and in all."""

import asyncio
import gc
import json
import threading
import time
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send
from support.fake_engine_client import INFO, FakeClient, ask, healthy

from overlap_spec.config import HttpLimits
from overlap_spec.server import bodies
from overlap_spec.server.app import create_app
from overlap_spec.server.bodies import LARGE_BODY_BYTES, MOST_NESTED
from overlap_spec.server.body_bounds import BodyBounds
from overlap_spec.server.problems import Problem

TEXT = 'word[{\\"[' * (LARGE_BODY_BYTES // 4)
NESTED = b'{"input_ids": [' + b"[1], " * 1_600_000 + b"[1]]}"


def test_a_large_body_is_read_like_a_small_one() -> None:
    for path, body in [
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/responses", {"model": "tiny", "input": TEXT}),
        ("/generate", {"text": TEXT}),
        ("/tokenize", {"prompt": [TEXT, "a"]}),
        ("/detokenize", {"tokens": [[1, 2], [3] * LARGE_BODY_BYTES]}),
    ]:
        answer = ask(FakeClient(), "POST", path, json=body)
        assert answer.status_code == 200, (path, answer.text)


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        ("/generate", NESTED[: 15 + 5 * MOST_NESTED] + b"[1]]}", "input_ids", f"at most {MOST_NESTED} lists"),
        ("/generate", b'{"input_ids": [' + b"[1]," * 100_000 + b"[1]]}", "input_ids", "at most 2048 prompts"),
        ("/v1/completions", json.dumps({"prompt": ["a"] * 100_000}).encode(), "prompt", "at most 2048 prompts"),
        ("/tokenize", json.dumps({"prompt": ["a"] * 100_000}).encode(), "prompt", "at most 2048 prompts"),
        ("/v1/completions", json.dumps({"prompt": TEXT, "top_p": 7}).encode(), "top_p", "top_p"),
        ("/generate", b"[" * LARGE_BODY_BYTES, None, "not valid JSON"),
        ("/generate", b'{"text": "' + b"x" * LARGE_BODY_BYTES, None, "not valid JSON"),
        ("/generate", b'{"text": "' + b"x" * LARGE_BODY_BYTES + b'", "top_k": [[[]]]', None, "not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_large_body_is_named(path: str, body: bytes, field: str | None, words: str) -> None:
    answer = ask(FakeClient(), "POST", path, content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field and words in error["message"]


def test_other_requests_go_on_while_a_large_body_is_parsed_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    release, parse = threading.Event(), bodies._parse

    def slow_parse(body: bytes) -> Any:
        assert threading.current_thread() is not threading.main_thread() or len(body) < 1000
        if len(body) > LARGE_BODY_BYTES:
            assert release.wait(60.0)
        return parse(body)

    monkeypatch.setattr(bodies, "_parse", slow_parse)

    async def story() -> None:
        transport = httpx.ASGITransport(create_app(FakeClient(), INFO, healthy))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            large = [asyncio.create_task(http.post("/generate", json={"text": TEXT})) for _ in range(3)]
            await asyncio.sleep(0.05)
            for _ in range(5):
                assert (await http.post("/generate", json={"text": "a"})).status_code == 200
            release.set()
            assert [(await each).status_code for each in large] == [200] * 3

    asyncio.run(story())


def test_many_lists_are_refused_before_they_are_made() -> None:
    began = time.process_time()
    with pytest.raises(Problem, match="input_ids: at most"):
        bodies._checked_apart(NESTED, {}, lambda fields: fields)
    assert time.process_time() - began < 1.0  # measured 60 ms; made and checked they take 2.2 s
    bodies._check_nesting(json.dumps({"text": "[" * 1_000_000, "a": 'b"[' * 100_000}).encode())
    assert gc.isenabled()


async def nothing(_: Any) -> None:
    pass


class Holding:
    """An app that reads its body and answers when it is told to."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.num_read = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        self.num_read += 1
        await self.release.wait()


async def post(app: BodyBounds, address: str, *sizes: int) -> None:
    sent = list(sizes)

    async def receive() -> Any:
        size = sent.pop(0)
        return {"type": "http.request", "body": b"x" * size, "more_body": bool(sent)}

    await app({"type": "http", "client": (address, 1)}, receive, nothing)


def test_bytes_of_bodies_are_bounded_until_their_requests_are_answered() -> None:
    async def story() -> None:
        inner = Holding()
        app = BodyBounds(inner, HttpLimits(max_bytes=250, max_bytes_per_address=100))
        held = [asyncio.create_task(post(app, address, 40, 40)) for address in "abc"]
        await asyncio.sleep(0)
        for address, words in (("a", "100 bytes of bodies from this address"), ("d", "250 bytes of bodies wait")):
            with pytest.raises(Problem, match="wait") as caught:
                await post(app, address, 10, 11)
            assert caught.value.status == 503 and (words[:3] != "100" or "from this address" in str(caught.value))
        inner.release.set()
        await asyncio.gather(*held)
        assert (inner.num_read, app._total, app._by_address) == (3, 0, {})
        await post(app, "a", 100)

    asyncio.run(story())


def test_the_endpoints_answer_503_where_there_is_no_room() -> None:
    async def story() -> httpx.Response:
        app = create_app(FakeClient(), replace(INFO, http=HttpLimits(max_bytes=50)), healthy)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.post("/generate", json={"text": "a" * 60})

    answer = asyncio.run(story())
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "overloaded"
