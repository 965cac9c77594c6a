"""Large answers are the bytes that they would be if they were written at once, and others have their turn meanwhile."""

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
from starlette.types import Message
from support.fake_engine_client import FakeClient, ask, events_of

from overlap_spec.entrypoints.http import streams
from overlap_spec.entrypoints.http.streams import AT_ONCE, CHUNK_BYTES, JsonParts, list_parts, object_parts
from overlap_spec.runtime.turns import Turns

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES = [{"role": "user", "content": "one two \0 three"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, "n": 2}),
    "chat without top": (CHAT, {"messages": MESSAGES, "logprobs": True}),
    "chat's prompt": (CHAT, {"messages": MESSAGES, "prompt_logprobs": 2}),
    "completion": (COMPLETIONS, {"prompt": "say one two", "logprobs": 2, "n": 2}),
    "echo": (COMPLETIONS, {"prompt": ["say one", "two"], "logprobs": 1, "echo": True}),
    "ids": (COMPLETIONS, {"prompt": "a b", "logprobs": 0, "echo": True, "return_tokens_as_token_ids": True}),
    "completion's prompt": (COMPLETIONS, {"prompt": "say one", "prompt_logprobs": 1}),
    "best of": (COMPLETIONS, {"prompt": "say one", "logprobs": 1, "best_of": 3}),
    "generate": (GENERATE, {"text": "say one", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}),
    "batch": (
        GENERATE,
        {"text": ["a b", "c"], "return_logprob": True, "token_ids_logprob": [4], "return_text_in_logprobs": True},
    ),
}
CHANGING = ("created", "e2e_latency")


def fields_of(text: str) -> Any:
    """In order."""
    return json.loads(text, object_pairs_hook=lambda pairs: [pair for pair in pairs if pair[0] not in CHANGING])


NOT_STREAMED = ("best of", "chat's prompt", "completion's prompt")  # they are refused


@pytest.mark.parametrize(
    ("body", "stream"), [(body, stream) for body in BODIES for stream in (False, True)[: 2 - (body in NOT_STREAMED)]]
)
def test_an_answer_in_parts_is_the_answer(body: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fields = BODIES[body]
    fields = {**fields, "rid": "r" if path != GENERATE or isinstance(fields["text"], str) else ["r", "s"]}
    answers = []
    for at_once in (AT_ONCE, 0):
        monkeypatch.setattr(streams, "AT_ONCE", at_once)
        response = ask(FakeClient(), "POST", path, json={**fields, "stream": stream})
        assert ("content-length" in response.headers) == (at_once > 0 and not stream)
        assert response.headers["content-type"] == ("text/event-stream" if stream else "application/json")
        texts = events_of(response)[:-1] if stream else [response.text]
        answers.append([fields_of(text) for text in texts])
    assert answers[0] == answers[1]
    assert "log" in str(answers[0])


def written(parts: JsonParts, text: bytes) -> list[bytes]:
    async def story() -> list[bytes]:
        return [chunk async for chunk in parts.written(text)]

    return asyncio.run(story())


@pytest.mark.parametrize("values", [[], [[]], [[1]], [[1, 2], [], [3]], [[None, "\0", 'a"'], [{"b": 1.5}]]])
def test_lists_and_objects(values: list[list[Any]]) -> None:
    parts = JsonParts(AT_ONCE + 1)
    reply = {"before": "\0", "a": parts.later(list_parts(values)), "between": 1}
    reply["b"] = parts.later(object_parts({"x": list_parts(values), "y": (b"null",)}))
    flat = [item for block in values for item in block]
    expected = {"before": "\0", "a": flat, "between": 1, "b": {"x": flat, "y": None}}
    assert b"".join(written(parts, msgspec.json.encode(reply))) == msgspec.json.encode(expected)


def test_others_have_their_turn_after_each_chunk() -> None:
    seen: list[int] = []

    def pieces() -> Iterator[bytes]:
        for index in range(10):
            seen.append(index)
            yield b"x" * CHUNK_BYTES

    async def story() -> None:
        parts, met = JsonParts(AT_ONCE + 1), []

        async def other() -> None:
            while len(seen) < 10:
                met.append(len(seen))
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        chunks = [chunk async for chunk in parts.written(msgspec.json.encode(parts.later(pieces())))]
        await task
        assert met == list(range(1, 10)), "one piece at a time"
        assert len(b"".join(chunks)) == 10 * CHUNK_BYTES

    asyncio.run(story())


@pytest.mark.parametrize("num_bytes", [CHUNK_BYTES, CHUNK_BYTES // 4])
def test_answers_that_are_written_at_once_share_the_turns_of_the_loop(num_bytes: int) -> None:
    """In one turn a part of one of them is made, and clients have one after the other, whatever each is sent."""
    made: list[str] = []

    def pieces(name: str) -> Iterator[bytes]:
        for _ in range(8):
            made.append(name)
            yield b"x" * num_bytes

    async def write(turns: Turns[str], name: str, client: str) -> int:
        parts = JsonParts(AT_ONCE + 1, partial(turns.turn, client))
        return len(b"".join([chunk async for chunk in parts.written(msgspec.json.encode(parts.later(pieces(name))))]))

    async def story() -> tuple[int, list[int]]:
        turns: Turns[str] = Turns(1)
        names = {"a": "one", "b": "one", "c": "one", "d": "two"}
        tasks = [asyncio.create_task(write(turns, name, client)) for name, client in names.items()]
        most = 0
        while not all(task.done() for task in tasks):
            before = len(made)
            await asyncio.sleep(0)
            most = max(most, len(made) - before)
        return most, [await task for task in tasks]

    most, sizes = asyncio.run(story())
    assert most <= CHUNK_BYTES // num_bytes and sizes == [8 * num_bytes] * 4
    assert made.index("d") <= 2 * CHUNK_BYTES // num_bytes
    assert "".join(made).rindex("d") < "".join(made).rindex("b"), "the other client has half of the turns"


def test_an_answer_whose_client_leaves_gives_its_turn_up() -> None:
    async def story() -> bytes:
        turns: Turns[str] = Turns(1)
        cut = JsonParts(AT_ONCE + 1, partial(turns.turn, "one"))
        chunks = cut.written(msgspec.json.encode(cut.later(iter([b"x" * CHUNK_BYTES] * 9))))
        await anext(chunks)
        await chunks.aclose()
        whole = JsonParts(AT_ONCE + 1, partial(turns.turn, "two"))
        return b"".join([chunk async for chunk in whole.written(msgspec.json.encode(whole.later(iter([b"7"]))))])

    assert asyncio.run(story()) == b"7"


LARGE_ANSWER = """
import asyncio, sys
from overlap_spec.entrypoints.http.streams import AT_ONCE, JsonParts, list_parts

async def story():
    sent = []
    async def receive():
        await asyncio.Event().wait()
    async def send(message):
        sent.append(message.get("body", b""))
    parts = JsonParts(AT_ONCE + 1)
    answer = parts.response({"a": parts.later(list_parts([[1]]))})
    await answer({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    print(b"".join(sent).decode(), "anyio._backends._asyncio" in sys.modules)

asyncio.run(story())
"""


def test_the_first_large_answer_imports_nothing() -> None:
    """It is on the event loop, where that took 20 to 30 ms of CPU time, and more where files are slow."""
    found = subprocess.run([sys.executable, "-c", LARGE_ANSWER], capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == '{"a":[1]} False', found.stderr


def test_a_large_answer_ends_when_its_client_has_gone() -> None:
    made: list[int] = []

    def pieces() -> Iterator[bytes]:
        for index in range(100):
            made.append(index)
            yield b"x" * CHUNK_BYTES

    async def story() -> None:
        gone = asyncio.Event()
        parts = JsonParts(AT_ONCE + 1)
        answer = parts.response(parts.later(pieces()))

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if len(made) == 3:
                gone.set()

        await answer({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)

    asyncio.run(story())
    assert 3 <= len(made) < 10


def test_a_small_answer_is_one_chunk() -> None:
    parts = JsonParts(AT_ONCE)
    assert not parts.is_large and written(parts, b"{}") == [b"{}"]
    response = parts.response({"a": math.pi})
    assert response.body == msgspec.json.encode({"a": math.pi})
