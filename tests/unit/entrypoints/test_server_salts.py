"""Salts of the prefix cache, as every endpoint takes them: two names of one, what is refused, and whose is whose."""

from typing import Any

import pytest
from support.fake_engine_client import FakeClient, ask

CHAT = {"messages": [{"role": "user", "content": "a b"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a b"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/v1/responses": {"input": "a b"},
    "/generate": {"text": "a b"},
}


def salts_of(path: str, **fields: object) -> list[str]:
    """The salts with which the engine is asked for the answers to one body."""
    client = FakeClient()
    response = ask(client, "POST", path, json={**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    return [terms.cache_salt for terms in client.terms]


@pytest.mark.parametrize("path", BODIES)
def test_either_name_gives_the_salt(path: str) -> None:
    assert salts_of(path) == salts_of(path, cache_salt=None, extra_key="") == [""]
    assert salts_of(path, cache_salt="pepper") == salts_of(path, extra_key="pepper") == ["pepper"]
    assert salts_of(path, cache_salt="pepper", extra_key="pepper", stream=True) == ["pepper"]
    assert salts_of(path, cache_salt="", extra_key="é" * 128) == ["é" * 128], "256 bytes"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"cache_salt": "é" * 129}, "cache_salt must be at most 256 bytes, got 258"),
        ({"extra_key": "x" * 257}, "extra_key must be at most 256 bytes, got 257"),
        ({"cache_salt": "a\0b"}, "cache_salt must have no NUL"),
        ({"extra_key": "\0"}, "extra_key must have no NUL"),
        ({"cache_salt": "a", "extra_key": "b"}, "extra_key and cache_salt differ"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"extra_key": {"a": "b"}}, "extra_key"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_a_bad_salt_is_refused_by_name(path: str, fields: dict[str, object], named: str) -> None:
    client = FakeClient()
    response = ask(client, "POST", path, json={**BODIES[path], **fields})
    assert response.status_code == 400 and named in response.text
    assert not client.asked
    if path != "/v1/messages":  # Anthropic's errors have no param
        assert response.json()["error"]["param"] == named.split()[0]


def test_a_salt_that_is_no_text_is_refused() -> None:
    body = b'{"prompt": "a b", "cache_salt": "\\ud800"}'
    response = ask(FakeClient(), "POST", "/v1/completions", content=body)
    assert response.status_code == 400, "half of a surrogate pair"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_all_choices_have_the_salt(path: str) -> None:
    assert salts_of(path, cache_salt="a", n=3) == ["a"] * 3


def test_each_prompt_may_have_its_own() -> None:
    """SGLang's `extra_key` may be a list; the choices of a prompt have its salt."""
    three = {"text": ["a", "b", "c"], "sampling_params": {"n": 2}}
    client = FakeClient()
    response = ask(client, "POST", "/generate", json={**three, "extra_key": ["x", "", "z"]})
    assert response.status_code == 200
    salts = {(prompt.text, terms.cache_salt) for (_, prompt, _), terms in zip(client.asked, client.terms, strict=True)}
    assert salts == {("a", "x"), ("b", ""), ("c", "z")} and len(client.terms) == 6
    for keys, named in {("x",): "extra_key: 1 for 3 prompts", ("x", "y", "z\0"): "extra_key must have no NUL"}.items():
        refused = ask(FakeClient(), "POST", "/generate", json={**three, "extra_key": keys})
        assert refused.status_code == 400 and named in refused.text


def test_a_salt_among_the_sampling_parameters_is_misplaced() -> None:
    for name in ("cache_salt", "extra_key"):
        response = ask(FakeClient(), "POST", "/generate", json={"text": "a", "sampling_params": {name: "x"}})
        assert response.status_code == 400
        assert f"{name} belongs beside sampling_params" in response.text
