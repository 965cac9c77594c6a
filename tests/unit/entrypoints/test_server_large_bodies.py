"""Large bodies: parsed beside other requests, bounded in what is in them, and in bytes of an address and in all."""

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send
from support.fake_engine_client import INFO, FakeClient, ask, healthy

from overlap_spec.client.link import id_array
from overlap_spec.config import HttpLimits
from overlap_spec.entrypoints.http import app, request_body as bodies
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.body_fields import MOST_DEPTH, without_strings
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_body import (
    LARGE_BODY_BYTES,
    MANY_OBJECTS,
    MOST_CONTAINERS,
    MOST_ENTRIES,
    MOST_IDS,
    MOST_VALUES,
    decode_apart,
    unpacked,
)
from overlap_spec.entrypoints.native import generate as native
from overlap_spec.entrypoints.openai import prompts
from overlap_spec.entrypoints.protection.connections import BodyBounds

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
        ("/generate", NESTED.replace(b"input_ids", b"text"), "text", f"at most {MOST_CONTAINERS} lists"),
        ("/generate", b'{"input_ids": [' + b"[1]," * 100_000 + b"[1]]}", "input_ids", "at most 2048 prompts"),
        ("/v1/completions", json.dumps({"prompt": ["a"] * 100_000}).encode(), "prompt", "at most 2048 prompts"),
        ("/tokenize", json.dumps({"prompt": ["a"] * 100_000}).encode(), "prompt", "at most 2048 prompts"),
        ("/v1/completions", json.dumps({"prompt": TEXT, "top_p": 7}).encode(), "top_p", "top_p"),
        ("/generate", b"[" * LARGE_BODY_BYTES, None, f"the body: lists and objects may be nested {MOST_DEPTH} deep"),
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
    release, check = threading.Event(), prompts.read_prompts

    def slow_check(value: Any, *more: Any, **options: Any) -> Any:
        if value != "a":
            assert threading.current_thread() is not threading.main_thread()
            assert release.wait(60.0)
        return check(value, *more, **options)

    monkeypatch.setattr(native, "read_prompts", slow_check)

    async def story() -> None:
        transport = httpx.ASGITransport(create_app(FakeClient(), INFO, healthy))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            large = [asyncio.create_task(http.post("/generate", json={"text": TEXT})) for _ in range(3)]
            many = {"text": ["b"] * MANY_OBJECTS * 2, "sampling_params": [{}] * MANY_OBJECTS * 2}
            large.append(asyncio.create_task(http.post("/generate", json=many)))
            await asyncio.sleep(0.05)
            for _ in range(5):
                assert (await http.post("/generate", json={"text": "a"})).status_code == 200
            release.set()
            assert [(await each).status_code for each in large] == [200] * 4

    asyncio.run(story())


@pytest.mark.parametrize(
    ("body", "has_many"),
    [
        (json.dumps({"messages": [{"role": "user", "content": "f() {x} [y]" * 1000}]}), False),
        (json.dumps({"messages": [{"role": "user", "content": "x"}] * 300}), True),
        (json.dumps({"sampling_params": [{}] * 300}), True),
        ('{"sampling_params": [' + "{ \n}," * 300 + "{}]}", True),
        (json.dumps({"messages": [{"role": "user", "content": "x"}] * 100}), False),
    ],
)
def test_braces_in_texts_are_no_objects(body: str, has_many: bool) -> None:
    assert bodies._has_many_objects(body.encode()) is has_many


def decoded(body: bytes) -> Any:
    """A large body's fields as its endpoint gets them, or the error."""
    try:
        return unpacked(decode_apart(body))
    except Problem as problem:
        return problem


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (NESTED, "input_ids", "at most 2048 prompts, got 1600001"),
        (NESTED.replace(b"input_ids", b"a"), "a", f"at most {MOST_CONTAINERS} lists and objects are taken in a body"),
        (b'{"a": 1, "b": [%b1]}' % (b"1," * MOST_VALUES), "b", f"at most {MOST_VALUES} values are taken in a body"),
        (b'{"a": ["x",1.5,"%b"]}' % (b"a" * MOST_VALUES), None, ""),
        (b'{"prompt": [%b1]}' % (b"1," * MOST_IDS), "prompt", f"at most {MOST_IDS} token ids are taken in a body"),
        (b'{"a": %b1%b}' % (b"[" * MOST_DEPTH, b"]" * MOST_DEPTH), None, ""),
        (b'{"a": [%b1%b]}' % (b"[" * MOST_DEPTH, b"]" * MOST_DEPTH), "a", f"may be nested {MOST_DEPTH} deep, got more"),
        (b'{"a": %b' % (b"[" * 200_000), None, f"the body: lists and objects may be nested {MOST_DEPTH} deep"),
        (b"{%b}" % b",".join(b'"%d":1' % number for number in range(2000)), None, "at most 1024 fields are taken"),
        (b'{"a": 1%b}' % (b"0" * 30), "a", "an integer needs more than 64 bits"),
        (b'{"prompt": [1, -1]}', "prompt", "not a list of token ids: Expected `int` >= 0"),
        (b'{"prompt": [1, 2147483648]}', "prompt", "Expected `int` <= 2147483647"),
        (b'{"prompt": [1, "a"]}', "prompt", "Expected `int`, got `str`"),
        (b'{"prompt": [[1], 2]}', "prompt", "Expected `array`"),
        (b'{"prompt": [[1], [[2]]]}', "prompt", "Expected `int`, got `array`"),
        (b"[1]", None, "must be a JSON object"),
    ],
)
def test_what_large_bodies_may_hold_is_bounded(body: bytes, param: str | None, words: str) -> None:
    found = decoded(body)
    if words:
        assert isinstance(found, Problem) and found.status == 400 and found.param == param and words in str(found)
    else:
        assert found == json.loads(body)


def test_token_ids_are_packed_and_all_else_is_as_it_was_sent() -> None:
    ids = [[1, 2, 3], [], list(range(200_000))]
    sent = {
        "prompt": ids,
        "tokens": ids[2],
        "input_ids": ["a", "b"],
        "n": 2,
        "user": 'a"[{,\\"' * 80_000,
        "x": [{}, [], None, 0.5],
    }
    found = decoded(json.dumps(sent, separators=(",", " :\n")).encode())
    assert [id_array(each.data).tolist() for each in found.pop("prompt")] == sent.pop("prompt")
    assert id_array(found.pop("tokens").data).tolist() == sent.pop("tokens") and found == sent


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b"[" * 131_080 + b" " * 60_000 + b'\\"' * 40_000,  # once 31 s
        b'{"prompt":' + b'"' * 270_000,
        b'{"prompt":["' + b'\\"' * 135_000,
        b'{"prompt":[' + b'"",' * 90_000 + b'""]}',
        b'{"prompt":"' + b"\\u0000" * 45_000 + b'"}',
        NESTED,
    ],
)
def test_decoding_is_linear(body: bytes) -> None:
    for work in (decoded, without_strings):
        began = time.thread_time()
        work(body)
        assert time.thread_time() - began < 2.0  # measured 50 ms at most


def test_a_body_at_the_limits_is_decoded_within_its_memory_and_one_beyond_is_refused() -> None:
    async def story() -> None:
        large = app.LargeBodies()
        at_limit = b'{"prompt": [' + b"1000," * (MOST_IDS // 2 - 1) + b'1000], "user": "' + b"u" * (2 << 20) + b'"}'
        fields = await large.read(at_limit, "", lambda fields: fields)
        assert len(fields["prompt"]) == MOST_IDS // 2 and len(fields["user"]) == 2 << 20
        with pytest.raises(Problem, match="take more than 96 MiB of memory when|its process was ended by signal 11"):
            await large.read(b'{"user": "' + b"u" * (48 << 20) + b'"}', "", lambda fields: fields)

    asyncio.run(story())


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


async def post(bounds: BodyBounds, address: str, *sizes: int) -> None:
    sent = list(sizes)

    async def receive() -> Any:
        size = sent.pop(0)
        return {"type": "http.request", "body": b"x" * size, "more_body": bool(sent)}

    await bounds({"type": "http", "client": (address, 1)}, receive, nothing)


def test_bytes_of_bodies_are_bounded_until_their_requests_are_answered() -> None:
    async def story() -> None:
        inner = Holding()
        bounds = BodyBounds(inner, HttpLimits(max_bytes=250, max_bytes_per_address=100))
        held = [asyncio.create_task(post(bounds, address, 40, 40)) for address in "abc"]
        await asyncio.sleep(0)
        for address, words in (("a", "100 bytes of bodies from this address"), ("d", "250 bytes of bodies wait")):
            with pytest.raises(Problem, match="wait") as caught:
                await post(bounds, address, 10, 11)
            assert caught.value.status == 503 and (words[:3] != "100" or "from this address" in str(caught.value))
        inner.release.set()
        await asyncio.gather(*held)
        assert (inner.num_read, bounds._total, bounds._by_address) == (3, 0, {})
        await post(bounds, "a", 100)

    asyncio.run(story())


def test_the_endpoints_answer_503_where_there_is_no_room() -> None:
    async def story() -> httpx.Response:
        bounded = create_app(FakeClient(), replace(INFO, http=HttpLimits(max_bytes=50)), healthy)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(bounded), base_url="http://test") as http:
            return await http.post("/generate", json={"text": "a" * 60})

    answer = asyncio.run(story())
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "overloaded"


def test_entries_of_objects_are_bounded() -> None:
    """Each takes as long as several values of a list, and Python's lock is held until the last one is made."""
    entries = {f"k{i}": i for i in range(MOST_ENTRIES - 2)}
    message = {"role": "user", "content": entries}
    found = decoded(json.dumps({"messages": [message], "user": "a:b," * 80_000}).encode())
    assert found["messages"] == [message]
    more = decoded(json.dumps({"messages": [{**message, "name": "x"}], "model": "m"}).encode())
    assert isinstance(more, Problem) and more.param == "messages"
    assert str(more) == f"messages: at most {MOST_ENTRIES} entries of objects are taken in a body, there are 65537"
