"""Every string and list of a body is bounded, and the error tells field, limit and what was sent, but not all of it."""

from typing import Any

import pytest
from support.fake_engine_client import FakeClient, ask

from overlap_spec.entrypoints.http.body_fields import LENGTHS, check_lengths

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TURN = {"role": "user", "content": "one two"}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [TURN]},
    COMPLETIONS: {"prompt": "one two"},
    GENERATE: {"text": "one two"},
    MESSAGES: {"messages": [TURN], "max_tokens": 8},
    RESPONSES: {"input": "one two"},
}
LONG = "z" * 3_000_000
FAR_TOO_LONG = [  # what is sent, and what the error says of it
    ({"stop": LONG}, "1000 characters", "3000000"),
    ({"stop": [LONG, "x"]}, "1000 characters", "3000000"),
    ({"stop": ["x"] * 100_000}, "16 items", "100000"),
    ({"stop_regex": ["a", LONG]}, "1000 characters", "3000000"),
    ({"bad_words": [LONG]}, "2048 characters", "3000000"),
    ({"bad_words": ["x"] * 129}, "128 items", "129"),
    ({"logit_bias": {str(i): 1 for i in range(20_000)}}, "1024 items", "20000"),
    ({"logit_bias": {LONG: 1}}, "256 characters", "3000000"),
    ({"stop_token_ids": [5] * 100_000}, "32 items", "100000"),
]
OF_CHATS = [
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1025)]}, "1024 items", "1025"),
    ({"tool_choice": LONG}, "256 characters", "3000000"),
    ({"chat_template_kwargs": {f"k{i}": 1 for i in range(100_000)}}, "64 items", "100000"),
    ({"chat_template": LONG}, "65536 characters", "3000000"),
    ({"metadata": {f"k{i}": 1 for i in range(100_000)}}, "64 items", "100000"),
    ({"model": LONG}, "256 characters", "3000000"),
    ({"user": LONG}, "256 characters", "3000000"),
    ({"reasoning_effort": LONG}, "256 characters", "3000000"),
    ({"guided_choice": ["x"] * 20_000}, "16384 items", "20000"),
    ({"guided_json": {"enum": [LONG]}}, "262144", "3000013"),
    ({"regex": LONG}, "262144", "3000000"),
]


def refusal(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The error of a body that is refused before the engine hears of it."""
    client = FakeClient()
    reply = ask(client, "POST", path, json={**GOOD[path], **body})
    assert reply.status_code == 400 and not client.asked, reply.text[:200]
    error: dict[str, Any] = reply.json()["error"]
    return error


@pytest.mark.parametrize(("body", "limit", "sent"), FAR_TOO_LONG)
def test_a_long_list_or_string_is_named_with_its_limit_and_what_was_sent(
    body: dict[str, Any], limit: str, sent: str
) -> None:
    field = next(iter(body))
    for path in (CHAT, COMPLETIONS, GENERATE):
        error = refusal(path, {"sampling_params": body} if path == GENERATE else body)
        assert error["param"] == field
        assert error["message"].startswith(field) and limit in error["message"] and sent in error["message"]
        assert len(error["message"]) < 300


@pytest.mark.parametrize(("body", "limit", "sent"), OF_CHATS)
def test_so_is_what_chats_alone_have(body: dict[str, Any], limit: str, sent: str) -> None:
    error = refusal(CHAT, body)
    assert error["param"] == next(iter(body)) and limit in error["message"] and sent in error["message"]
    assert len(error["message"]) < 300


def test_other_apis_name_their_own_fields() -> None:
    assert "stop_sequences: at most 1000 characters" in refusal(MESSAGES, {"stop_sequences": [LONG]})["message"]
    assert "bad_words: at most 2048 characters" in refusal(RESPONSES, {"bad_words": [LONG]})["message"]
    assert "rid: at most 2048 items" in refusal(GENERATE, {"rid": ["x"] * 3000})["message"]


@pytest.mark.parametrize("name", LENGTHS)
def test_what_is_as_long_as_it_may_be_is_taken(name: str) -> None:
    items, chars = LENGTHS[name]
    check_lengths({name: "x" * chars})
    if items:
        check_lengths({name: ["x" * chars] * items})
        check_lengths({name: {f"{i:0{min(chars, 9) or 1}}": None for i in range(items)}})
    check_lengths({name: 5, "unknown": "x" * 10_000})
