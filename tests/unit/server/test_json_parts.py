"""Large answers are the bytes that they would be if they were written at once, and others have their turn meanwhile."""

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.fake_engine_client import FakeClient, ask, events_of

from overlap_spec.server import json_parts
from overlap_spec.server.json_parts import AT_ONCE, CHUNK_BYTES, JsonParts, list_parts, object_parts

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
        monkeypatch.setattr(json_parts, "AT_ONCE", at_once)
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


def test_a_small_answer_is_one_chunk() -> None:
    parts = JsonParts(AT_ONCE)
    assert not parts.is_large and written(parts, b"{}") == [b"{}"]
    response = parts.response({"a": math.pi})
    assert response.body == msgspec.json.encode({"a": math.pi})
