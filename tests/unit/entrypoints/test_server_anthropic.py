"""`/v1/messages`: what reaches the engine, whole answers, events, and errors in Anthropic's shape."""

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from support.fake_engine_client import INFO, FakeClient, ask, named_events_of
from support.scripted_chats import ABORTED, CALLS, CUT, PLAIN, THOUGHT, ScriptedChats

from overlap_spec.config import ApiKeys
from overlap_spec.entrypoints.anthropic import Messages
from overlap_spec.entrypoints.anthropic.requests import MessagesRequest, chat_fields
from overlap_spec.entrypoints.http.request_body import convert
from overlap_spec.entrypoints.openai.chat import ChatDelta
from overlap_spec.messages import ChatPrompt, SamplingParams

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TURNS = [{"role": "user", "content": "one two three"}]
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": TURNS}
INFO_WITH_KEY = msgspec.structs.replace(INFO, keys=ApiKeys({"secret": "one"}))
STEP = ["content_block_delta"]


def played(deltas: list[ChatDelta], **more: Any) -> httpx.Response:
    """The answer to a body, of a chat that says `deltas`."""
    app = Starlette(routes=Messages(FakeClient(), ScriptedChats(deltas), INFO).routes())

    async def inner() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
            return await http.post(PATH, json={**BODY, **more})

    return asyncio.run(inner())


def test_a_whole_message() -> None:
    client = FakeClient()
    reply = ask(client, "POST", PATH, json={**BODY, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7}).json()
    assert reply.pop("id").startswith("msg_")
    assert reply == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "one two three"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 3,
        },
    }
    ((_, prompt, sampling),) = client.asked
    assert prompt == ChatPrompt(TURNS)
    assert sampling == SamplingParams(max_new_tokens=9, temperature=0.5, top_k=3, top_p=0.9, seed=7)


def test_reasons_to_stop() -> None:
    for body, reason, sequence in (
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["</s>"]}, "stop_sequence", "</s>"),
        ({"stop_sequences": ["x"]}, "end_turn", None),
    ):
        reply = ask(FakeClient(), "POST", PATH, json={**BODY, **body}).json()
        assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, sequence)


def test_a_stream_of_text() -> None:
    events = named_events_of(ask(FakeClient(), "POST", PATH, json={**BODY, "stream": True}))
    assert [name for name, _ in events] == [
        *("message_start", "ping", "content_block_start", *STEP * 3),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert all(name == event["type"] for name, event in events)
    start, _, block, *deltas, stop, last, _ = [event for _, event in events]
    assert start["message"]["content"] == [] and start["message"]["usage"]["output_tokens"] == 0
    assert block == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert "".join(event["delta"]["text"] for event in deltas) == "one two three"
    assert stop == {"type": "content_block_stop", "index": 0}
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == 3


def test_thinking_text_and_calls_are_blocks() -> None:
    reply = played([*THOUGHT, *PLAIN, *CALLS]).json()
    assert reply["content"] == [
        {"type": "thinking", "thinking": "hm, so", "signature": ""},
        {"type": "text", "text": "I look"},
        {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "call_1", "name": "time", "input": {}},
    ]
    assert reply["stop_reason"] == "tool_use"


def test_a_stream_of_thinking_text_and_calls() -> None:
    events = [event for _, event in named_events_of(played([*THOUGHT, *PLAIN, *CALLS], stream=True))]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert starts[2] == {"type": "tool_use", "id": "call_0", "name": "weather", "input": {}}
    pieces: dict[int, list[dict[str, str]]] = {}
    open_block = None
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
            pieces.setdefault(event["index"], []).append(event["delta"])
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
    assert pieces[0] == [{"type": "thinking_delta", "thinking": text} for text in ("hm,", " so")]
    assert json.loads("".join(piece["partial_json"] for piece in pieces[2])) == {"city": "Oslo"}
    assert 3 not in pieces and events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_call_that_is_cut_is_not_called_done() -> None:
    reply = played([*PLAIN, *CUT]).json()
    assert [block["type"] for block in reply["content"]] == ["text"]
    assert reply["stop_reason"] == "max_tokens"


def test_blocks_become_messages() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "tool_result", "tool_use_id": "t2", "content": "yes", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    tools = [{"name": "f", "input_schema": {"properties": {}}, "description": "d", "cache_control": {}}]
    system = [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]
    fields = {"max_tokens": 5, "messages": turns, "tools": tools, "system": system}
    made = chat_fields(convert(fields, MessagesRequest), fields)
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x":"é"}'}}
    assert made["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "t2", "content": "yes"},
        {"role": "user", "content": "and?"},
    ]
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}, "description": "d"}
    assert made["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False},
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 8}},
            {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 8},
        ),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False, "a": 1}},
            {"chat_template_kwargs": {"enable_thinking": False, "a": 1}},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
        (
            {"messages": [*TURNS, {"role": "assistant", "content": "I"}]},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
    ],
)
def test_parameters_become_those_of_chat_completions(given: dict[str, Any], made: dict[str, Any]) -> None:
    fields = {**BODY, **given}
    found = chat_fields(convert(fields, MessagesRequest), fields)
    assert {name: found[name] for name in made} == made
    plain = chat_fields(convert(BODY, MessagesRequest), BODY)
    assert {name for name in found if name not in plain} | {"messages"} == set(made) | {"messages"}


def test_errors_have_the_shape_and_the_names_of_the_api() -> None:
    for change, status, kind, words in (
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens: must be at least 1"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages: at least one"),
        ({"model": "claude"}, 404, "not_found_error", "claude"),
        ({"temperature": -1}, 400, "invalid_request_error", "temperature"),
        ({"stop_sequences": ["x"] * 999}, 400, "invalid_request_error", "stop_sequences"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers is not supported"),
        ({"n": 2}, 400, "invalid_request_error", "n is a parameter of /v1/chat/completions"),
        ({"max_completion_tokens": 2}, 400, "invalid_request_error", "here it is max_tokens"),
        (
            {"max_new_tokens": 2},
            400,
            "invalid_request_error",
            "is of another API; here it is max_tokens",
        ),
        ({"sampling_params": {"top_k": 2}}, 400, "invalid_request_error", "sampling_params is of another API"),
        (
            {"thinking": {"type": "disabled", "budget_tokens": 8}},
            400,
            "invalid_request_error",
            "thinking: budget_tokens",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "tools"),
        ({"messages": [{"role": "user", "content": "busy"}]}, 503, "overloaded_error", "open"),
        ({"messages": [{"role": "user", "content": "dead"}]}, 500, "api_error", "failed"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "image"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "", "name": "", "input": {}}]}]},
            *(400, "invalid_request_error", "messages[0].content[0]: tool_use belongs"),
        ),
    ):
        for stream in (False, True):
            reply = ask(FakeClient(), "POST", PATH, json={**BODY, **change, "stream": stream})
            assert reply.status_code == status, reply.text
            assert reply.json()["type"] == "error" and reply.json()["error"]["type"] == kind
            assert words in reply.json()["error"]["message"]


def test_an_engine_that_fails_ends_the_stream_with_an_error_event() -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "one fail"}], "stream": True}
    *_, (name, last) = named_events_of(ask(FakeClient(), "POST", PATH, json=body))
    assert (name, last["error"]["type"]) == ("error", "api_error")
    *_, (name, last) = named_events_of(played(ABORTED, stream=True))
    assert (name, last["error"]["type"]) == ("error", "overloaded_error")


def test_tokens_are_counted_as_the_prompt_is() -> None:
    reply = ask(FakeClient(), "POST", COUNT, json={"model": "tiny", "messages": TURNS})
    assert reply.json() == {"input_tokens": 4}
    assert ask(FakeClient(), "POST", COUNT, json={"messages": []}).json()["type"] == "error"


def test_anthropics_header_has_the_key() -> None:
    for headers, status in (({"x-api-key": "secret"}, 200), ({"x-api-key": "wrong"}, 401), ({}, 401)):
        reply = ask(FakeClient(), "POST", PATH, INFO_WITH_KEY, json=BODY, headers=headers)
        assert reply.status_code == status
        if status == 401:
            assert reply.json()["error"]["type"] == "authentication_error"
