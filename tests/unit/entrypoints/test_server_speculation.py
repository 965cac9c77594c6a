"""Speculation by request: what bodies and headers ask for, and what replies report, streamed and whole."""

import json
from typing import Any

import pytest
from msgspec.structs import replace
from support.fake_engine_client import INFO, FakeClient, ask, events_of

from overlap_spec.messages import MetricsLevel, Speculative

KNOWN = replace(INFO, num_steps=3)
CHAT = {"messages": [{"role": "user", "content": "one two three four"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "one two three four"},
    "/generate": {"text": "one two three four"},
}
every_endpoint = pytest.mark.parametrize("path", BODIES)
# The fake engine verifies 3 guesses in every step but the first, and accepts 1 of the third step's.
ORIGINS = [("plain", 1), ("bonus", 2), ("accepted", 3), ("bonus", 4)]
METRICS = {
    "mean_acceptance_length": 1 + 1 / 3,
    "draft_acceptance_rate": 1 / 9,
    "acceptance_histogram": [2, 1, 0, 0],
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 1,
    "num_draft_tokens": 9,
    "num_spec_tokens": 3,
}
DETAILS = {
    "spec_accept_rate": 1 / 9,
    "spec_accept_length": 4 / 3,
    "spec_num_correct_drafts": 1,
    "spec_num_proposed_drafts": 9,
    "spec_verify_ct": 3,
    "spec_correct_drafts_histogram": [2, 1, 0, 0],
}


def asked_of(path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Speculative:
    """What the engine is asked for."""
    client = FakeClient()
    response = ask(client, "POST", path, KNOWN, json={**BODIES[path], **body}, headers=headers)
    assert response.status_code == 200, response.text
    return client.asked[0][2].speculative


@every_endpoint
def test_a_body_limits_speculation(path: str) -> None:
    asked = {"method": "eagle3", "num_steps": 2, "provenance": True, "metrics": "detailed"}
    expected = Speculative(method="eagle3", num_steps=2, provenance=True, metrics=MetricsLevel.DETAILED)
    assert asked_of(path, {"speculative": asked}) == expected
    assert asked_of(path, {"speculative": {"method": "NONE", "num_steps": None}}) == Speculative(method="NONE")
    assert asked_of(path, {}) == Speculative()


@every_endpoint
def test_headers_complete_a_body(path: str) -> None:
    headers = {"X-Speculative-Method": "EAGLE3", "X-Speculative-Num-Steps": "2"}
    assert asked_of(path, {}, headers) == Speculative(method="EAGLE3", num_steps=2)
    assert asked_of(path, {"speculative": {"num_steps": 0}}, headers) == Speculative(method="EAGLE3", num_steps=0)


def test_a_prompt_of_a_batch_has_speculation_of_its_own() -> None:
    client = FakeClient()
    own = [{"speculative": {"num_steps": 0}}, None]
    body = {"text": ["one", "two"], "sampling_params": own, "speculative": {"num_steps": 2}}
    assert ask(client, "POST", "/generate", KNOWN, json=body).status_code == 200
    assert [asked[2].speculative.num_steps for asked in client.asked] == [0, 2]


@every_endpoint
@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"num_steps": -1}, "num_steps must be at least 0, got -1"),
        ({"num_steps": "2"}, "speculative.num_steps: expected `int | null`, got `str`"),
        ({"method": "none", "num_steps": 2}, "num_steps must be 0, or left out, with the method NONE"),
        ({"depth": 2}, "unknown field `depth`"),
        ({"metrics": "all"}, "invalid enum value 'all'"),
        ("NONE", "expected `object`, got `str`"),
    ],
)
def test_bad_speculation_is_refused_by_name(path: str, asked: Any, text: str) -> None:
    response = ask(FakeClient(), "POST", path, KNOWN, json={**BODIES[path], "speculative": asked})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "speculative"
    assert text in response.json()["error"]["message"]


def test_a_bad_header_is_refused_by_name() -> None:
    headers = {"X-Speculative-Num-Steps": "two"}
    response = ask(FakeClient(), "POST", "/generate", KNOWN, json=BODIES["/generate"], headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-speculative-num-steps")


def origins(entries: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(entry["origin"], entry["step"]) for entry in entries]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_whole_reply_reports_what_was_asked_for(path: str) -> None:
    body = {**BODIES[path], "speculative": {"provenance": True, "metrics": "detailed"}}
    reply = ask(FakeClient(), "POST", path, KNOWN, json=body).json()
    assert origins(reply["choices"][0]["provenance"]) == ORIGINS
    per_step = {"per_step_accepted": [0, 1, 0], "per_step_drafted": [3, 3, 3]}
    assert reply["metrics"]["speculative_decoding"] == {**METRICS, **per_step}
    assert reply["sglext"]["spec_tokens_details"] == DETAILS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_sglangs_switch_asks_for_counts_alone(path: str) -> None:
    body = {**BODIES[path], "return_spec_tokens_details": True, "n": 2}
    reply = ask(FakeClient(), "POST", path, KNOWN, json=body).json()
    assert reply["sglext"]["spec_tokens_details"] == [DETAILS, DETAILS]
    assert reply["metrics"]["speculative_decoding"] == [METRICS, METRICS]
    assert all("provenance" not in choice for choice in reply["choices"])


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_reports_token_by_token_and_counts_at_its_end(path: str, include_usage: bool) -> None:
    body = {**BODIES[path], "stream": True, "stream_options": {"include_usage": include_usage}}
    body["speculative"] = {"provenance": True, "metrics": "summary"}
    *chunks, done = events_of(ask(FakeClient(), "POST", path, KNOWN, json=body))
    *parts, last = map(json.loads, chunks)
    assert done == "[DONE]"
    entries = [entry for part in parts for entry in part["choices"][0].get("provenance", [])]
    assert origins(entries) == ORIGINS
    assert last["choices"] == [] and last["metrics"]["speculative_decoding"] == METRICS
    assert last["sglext"]["spec_tokens_details"] == DETAILS
    assert ("usage" in last) == include_usage


def test_generate_reports_in_meta_info() -> None:
    body = {**BODIES["/generate"], "speculative": {"provenance": True}, "return_spec_tokens_details": True}
    meta = ask(FakeClient(), "POST", "/generate", KNOWN, json=body).json()["meta_info"]
    assert origins(meta["provenance"]) == ORIGINS
    assert {name: meta[name] for name in DETAILS} == DETAILS
    assert meta["speculative_decoding"] == METRICS
    *events, _ = events_of(ask(FakeClient(), "POST", "/generate", KNOWN, json={**body, "stream": True}))
    lengths = [len(json.loads(event)["meta_info"]["provenance"]) for event in events]
    assert lengths == [1, 2, 3, 4], "events are cumulative"


@every_endpoint
def test_nothing_is_reported_that_was_not_asked_for(path: str) -> None:
    text = ask(FakeClient(), "POST", path, KNOWN, json=BODIES[path]).text
    assert not any(name in text for name in ("provenance", "speculative_decoding", "spec_tokens_details"))
