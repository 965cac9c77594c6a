"""Numbers of thousands of digits and values nested a hundred thousand deep: a 400 at every endpoint, never a 500."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from support.fake_engine_client import INFO, FakeClient, ask, healthy

from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.body_fields import MOST_DEPTH
from overlap_spec.entrypoints.parsers.formats import call_format, reasoning_format

FORMATS = {"call_format": call_format("hermes", ""), "reasoning_format": reasoning_format("qwen3", "")}
SERVED = replace(INFO, **FORMATS)
USER = {"role": "user", "content": "one two"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "tools": [TOOL]},
    "/v1/completions": {"prompt": "one two"},
    "/v1/responses": {"input": [USER], "tools": [{"type": "function", "name": "f", "parameters": {}}]},
    "/v1/messages": {"messages": [USER], "max_tokens": 8, "tools": [{"name": "f", "input_schema": {}}]},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/generate": {"text": "one two", "sampling_params": {"max_new_tokens": 8}},
    "/tokenize": {"prompt": "one two"},
    "/detokenize": {"tokens": [1, 2]},
    "/abort_request": {"rid": "a"},
}
FIELDS = (
    *("max_tokens", "temperature", "n", "seed", "stop", "top_k", "messages", "prompt", "input", "input_ids", "tokens"),
    *("metadata", "thinking", "tools", "tool_choice", "response_format", "logit_bias", "sampling_params", "timeout"),
    *("rid", "stop_token_ids", "speculative", "chat_template_kwargs", "image_data", "logprobs", "json_schema"),
    *("structured_outputs", "documents", "unknown"),
)
DIGITS = "1" * 5000
DEEPEST = "[" * MOST_DEPTH + "1" + "]" * MOST_DEPTH


def answers_to(path: str, bodies: Iterable[bytes], **headers: str) -> list[httpx.Response]:
    """Of one app to many requests."""

    async def inner() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(FakeClient(), SERVED, healthy))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return [await http.post(path, content=body, headers=headers) for body in bodies]

    return asyncio.run(inner())


def with_field(path: str, field: str, value: str) -> bytes:
    """A good body with one more field, or another value for one."""
    rest = {name: known for name, known in BODIES[path].items() if name != field}
    return (json.dumps(rest)[:-1] + (", " if rest else "") + f'"{field}": {value}' + "}").encode()


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("path", BODIES)
def test_numbers_of_many_digits_and_deep_values_are_a_400(path: str) -> None:
    deep = [f"[{DEEPEST}]", "[" * 200_000, '{"a":' * 120_000, '[{"a":' * 100_000]
    numbers = [DIGITS, "-" + DIGITS, f"{DIGITS}.5e{DIGITS}", f"[{DIGITS}]", f'{{"a": {DIGITS}}}']
    bodies = [with_field(path, "unknown", each) for each in deep] + [each.encode() for each in deep]
    bodies += [with_field(path, field, number) for field in FIELDS for number in numbers]
    for body, answer in zip(bodies, answers_to(path, bodies), strict=True):
        assert answer.status_code == 400 and answer.json()["error"]["message"], body[:100]


@pytest.mark.full_but_every(5)
@pytest.mark.slow_but_every(8)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", ["1" * 4000, "-" + "1" * 4000, "1e999", DEEPEST])
def test_what_can_be_parsed_is_no_error_of_the_server(path: str, value: str) -> None:
    """As many digits as Python reads, and as many brackets as are taken."""
    inner = value.removeprefix("[[").removesuffix("]]")
    wrapped = (value, f"[{inner}]", f'{{"type": {inner}}}', f'{{"type": "function", "function": {inner}}}')
    bodies = [with_field(path, field, each) for field in FIELDS for each in wrapped]
    for body, answer in zip(bodies, answers_to(path, bodies), strict=True):
        assert answer.status_code in (200, 400), (body[:100], answer.text[:300])
        assert len(answer.text) < 20_000


def test_numbers_of_many_digits_in_headers_and_queries_are_a_400() -> None:
    for path, body in BODIES.items():
        (answer,) = answers_to(path, [json.dumps(body).encode()], **{"x-speculative-num-steps": DIGITS})
        error = answer.json()["error"]["message"]
        assert answer.status_code == 400
        assert "x-speculative-num-steps must be an integer >= 0 of at most 18 digits, got 5000 characters" in error
    for path in ("/ui/timeline?steps=", "/flush_cache?timeout="):
        method = "GET" if "ui" in path else "POST"
        for number in (DIGITS, "-" + DIGITS, "1" * 5000 + ".5"):
            answer = ask(FakeClient(), method, path + number)
            assert answer.status_code == 400 and len(answer.text) < 1000, path
    for header in ("x-stainless-read-timeout", "x-stainless-timeout"):
        for number in (DIGITS, "nan", "-" + DIGITS, "inf"):
            answer = ask(FakeClient(), "POST", "/generate", json=BODIES["/generate"], headers={header: number})
            assert answer.status_code in (200, 400), (header, number)
