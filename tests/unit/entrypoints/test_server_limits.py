"""Time limits and overload as HTTP shows them; where limits come from, and whose request one is."""

import asyncio
import json

import httpx
import msgspec
import pytest
from support.fake_engine_client import INFO, FakeClient, ask, events_of, healthy

from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.messages import MOST_SECONDS, Terms

CHAT = {"messages": [{"role": "user", "content": "a b"}]}
BODIES = {
    "/v1/completions": {"prompt": "a b"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/v1/responses": {"input": "a b"},
    "/generate": {"text": "a b"},
}


def terms_of(path: str, headers: dict[str, str] | None = None, **fields: object) -> Terms:
    client = FakeClient()
    response = ask(client, "POST", path, json={**BODIES[path], **fields}, headers=headers or {})
    assert response.status_code == 200, response.text
    return msgspec.structs.replace(client.terms[0], age_s=0.0)


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/tokenize", {"prompt": ["a", "b"]}, 2),
        ("/tokenize", {"messages": CHAT["messages"]}, 1),
        ("/detokenize", {"tokens": [[1], [2]]}, 2),
        ("/v1/messages/count_tokens", CHAT, 1),
        ("/v1/completions", {"prompt": "a b", "return_token_ids": True}, 1),
        ("/v1/completions", {"prompt": [1, 2], "echo": True}, 1),
        ("/v1/chat/completions", {**CHAT, "return_token_ids": True}, 1),
    ],
)
def test_texts_and_ids_take_their_callers_turn(path: str, body: dict[str, object], count: int) -> None:
    client = FakeClient()
    response = ask(client, "POST", path, json=body)
    assert response.status_code == 200, response.text
    assert client.owners == ["address 127.0.0.1"] * count


def test_prompts_whose_log_probs_are_counted_take_their_callers_turn() -> None:
    client, body = FakeClient(), {"prompt": ["a b"] * 4 + ["a c"] * 4, "n": 128, "logprobs": 20, "max_tokens": 200}
    assert ask(client, "POST", "/v1/completions", json=body).status_code == 400, "too many of them"
    assert client.owners and set(client.owners) == {"address 127.0.0.1"}


@pytest.mark.parametrize(
    ("prompt", "code", "headers"),
    [
        ("a late", "request_timeout", {"x-should-retry": "false"}),
        ("slow", "first_token_timeout", {"retry-after": "1"}),
    ],
)
def test_a_time_limit_is_a_504_before_the_first_byte(prompt: str, code: str, headers: dict[str, str]) -> None:
    response = ask(FakeClient(), "POST", "/v1/completions", json={"prompt": prompt})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (504, "timeout_error", code)
    shown = {name: response.headers[name] for name in ("x-should-retry", "retry-after") if name in response.headers}
    assert shown == headers
    anthropic = ask(
        FakeClient(), "POST", "/v1/messages", json={"messages": [{"role": "user", "content": prompt}], "max_tokens": 9}
    )
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (504, "timeout_error")


def test_a_time_limit_is_the_last_event_of_a_stream() -> None:
    response = ask(FakeClient(), "POST", "/v1/completions", json={"prompt": "a late", "stream": True})
    *_, last = events_of(response)
    assert json.loads(last)["error"] == {
        "message": "the request was ended before its end: timeout is 5 s",
        "type": "timeout_error",
        "param": "timeout",
        "code": "request_timeout",
    }


@pytest.mark.parametrize("path", BODIES)
def test_limits_of_the_body_reach_the_engine(path: str) -> None:
    terms = terms_of(path, timeout=7, first_token_timeout=2.5)
    assert (terms.timeout_s, terms.first_token_timeout_s) == (7.0, 2.5)
    for field, value in {"timeout": 0, "first_token_timeout": -3}.items():
        refused = ask(FakeClient(), "POST", path, json={**BODIES[path], field: value})
        assert refused.status_code == 400
        assert field in refused.text and "must be seconds above 0" in refused.text


@pytest.mark.parametrize("header", ["x-stainless-read-timeout", "X-Stainless-Timeout"])
@pytest.mark.parametrize("path", BODIES)
def test_what_an_sdk_waits_for_the_first_byte_is_a_limit(path: str, header: str) -> None:
    assert terms_of(path, {header: "600"}).timeout_s == 600.0
    assert terms_of(path, {header: "600"}, timeout=5).timeout_s == 5.0
    streamed = terms_of(path, {header: "60.5"}, stream=True)
    assert (streamed.timeout_s, streamed.first_token_timeout_s) == (None, 60.5)
    assert terms_of(path, {header: "1e30"}).timeout_s == MOST_SECONDS
    for bad in ("soon", "nan", "0", "-3"):
        refused = ask(FakeClient(), "POST", path, json=BODIES[path], headers={header: bad})
        assert refused.status_code == 400 and f"{header.lower()} must be seconds above 0" in refused.text


def test_choices_that_follow_the_first_one_have_what_is_left_of_the_time() -> None:
    client = FakeClient(step_s=0.03)
    ask(client, "POST", "/v1/completions", json={"prompt": "a b c", "n": 2, "timeout": 9, "first_token_timeout": 1})
    first, second = client.terms
    assert not first.has_begun and second.has_begun
    assert first.age_s + 0.03 <= second.age_s and second.timeout_s == 9.0


def test_a_limit_among_the_sampling_parameters_is_misplaced() -> None:
    response = ask(FakeClient(), "POST", "/generate", json={"text": "a", "sampling_params": {"timeout": 5}})
    assert response.status_code == 400
    assert "timeout belongs beside sampling_params" in response.text


@pytest.mark.parametrize("path", BODIES)
def test_a_request_is_its_addresss(path: str) -> None:
    async def inner(client: FakeClient) -> None:
        app = create_app(client, INFO, healthy)
        for host in ("10.0.0.1", "10.0.0.2"):
            transport = httpx.ASGITransport(app, client=(host, 1234))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
                await http.post(path, json=BODIES[path])

    client = FakeClient()
    asyncio.run(inner(client))
    assert [terms.client for terms in client.terms] == ["address 10.0.0.1", "address 10.0.0.2"]
