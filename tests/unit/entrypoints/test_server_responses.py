"""`/v1/responses`: what reaches the engine, whole responses, events, and what storage would be needed for."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from support.fake_engine_client import INFO, FakeClient, ask, named_events_of
from support.scripted_chats import ABORTED, CALLS, CUT, PLAIN, THOUGHT, ScriptedChats

from overlap_spec.entrypoints.http.request_body import convert
from overlap_spec.entrypoints.openai.chat import ChatDelta
from overlap_spec.entrypoints.responses import Responses
from overlap_spec.entrypoints.responses.requests import ResponsesRequest, chat_fields
from overlap_spec.messages import ChatPrompt, SamplingParams

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "tiny", "input": "one two three"}


def played(deltas: list[ChatDelta], **more: Any) -> httpx.Response:
    """The answer to a body, of a chat that says `deltas`."""
    app = Starlette(routes=[Route(PATH, Responses(ScriptedChats(deltas), INFO).post, methods=["POST"])])

    async def inner() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
            return await http.post(PATH, json={**BODY, **more})

    return asyncio.run(inner())


def test_a_whole_response() -> None:
    client = FakeClient()
    given = {"max_output_tokens": 9, "temperature": 0.5, "seed": 7, "metadata": {"a": "b"}}
    reply = ask(client, "POST", PATH, json={**BODY, "instructions": "be kind", **given}).json()
    name = reply["id"]
    assert name.startswith("resp_") and reply["completed_at"] >= reply["created_at"] > 1_700_000_000
    part = {"type": "output_text", "text": "one two three", "annotations": [], "logprobs": []}
    assert reply["output"] == [
        {
            "id": f"msg_{name.removeprefix('resp_')}_0",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [part],
        }
    ]
    assert reply["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 6,
    }
    assert (reply["object"], reply["status"], reply["store"]) == ("response", "completed", False)
    assert (reply["temperature"], reply["top_p"], reply["max_output_tokens"]) == (0.5, 1.0, 9)
    assert (reply["instructions"], reply["metadata"]) == ("be kind", {"a": "b"})
    ((_, prompt, sampling),) = client.asked
    assert prompt == ChatPrompt(
        [{"role": "system", "content": "be kind"}, {"role": "user", "content": "one two three"}]
    )
    assert sampling == SamplingParams(max_new_tokens=9, temperature=0.5, seed=7)


def test_a_response_that_is_cut_is_incomplete() -> None:
    reply = ask(FakeClient(), "POST", PATH, json={**BODY, "max_output_tokens": 2}).json()
    assert (reply["status"], reply["completed_at"]) == ("incomplete", None)
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply["output"][0]["status"] == "incomplete"
    whole, cut = played([*PLAIN, *CUT]).json()["output"]
    assert (whole["status"], cut["status"], cut["arguments"]) == ("completed", "incomplete", '{"ci')


def test_a_stream_of_text() -> None:
    events = named_events_of(ask(FakeClient(), "POST", PATH, json={**BODY, "stream": True}))
    assert [name.removeprefix("response.") for name, _ in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * 3),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert all(name == event["type"] for name, event in events)
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    (_, first), (_, last) = events[0], events[-1]
    assert (first["response"]["status"], first["response"]["output"]) == ("in_progress", [])
    assert first["response"]["id"] == last["response"]["id"]
    assert last["response"]["output"] == [events[-2][1]["item"]]
    assert last["response"]["output"][0]["content"][0]["text"] == "one two three"


def test_reasoning_text_and_calls_are_items() -> None:
    reply = played([*THOUGHT, *PLAIN, *CALLS], include=["reasoning.encrypted_content"]).json()
    reasoning, message, weather, clock = reply["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm, so"}] and reasoning["summary"] == []
    assert message["content"][0]["text"] == "I look"
    assert (weather["call_id"], weather["name"], weather["arguments"]) == ("call_0", "weather", '{"city": "Oslo"}')
    assert (clock["type"], clock["call_id"], clock["arguments"]) == ("function_call", "call_1", "")
    assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    again = chat_fields(convert({"input": [*reply["output"], result("call_0")]}, ResponsesRequest))["messages"]
    assert again[0]["reasoning_content"] == "hm, so" and again[0]["content"] == "I look"
    assert [call["function"]["name"] for call in again[0]["tool_calls"]] == ["weather", "time"]
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]}
    assert chat_fields(convert({"input": [hidden]}, ResponsesRequest))["messages"] == [
        {"role": "assistant", "content": "", "reasoning_content": "hm, so"}
    ]


def test_a_stream_of_reasoning_text_and_calls_ends_as_the_whole_response() -> None:
    events = [event for _, event in named_events_of(played([*THOUGHT, *PLAIN, *CALLS], stream=True))]
    grown: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            grown[event["output_index"]] = grown.get(event["output_index"], "") + event["delta"]
    assert grown == {0: "hm, so", 1: "I look", 2: '{"city": "Oslo"}'}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert events[-1]["type"] == "response.completed" and events[-1]["response"]["output"] == done
    assert added == [item["id"] for item in done]
    whole = played([*THOUGHT, *PLAIN, *CALLS]).json()["output"]
    assert [{**item, "id": ""} for item in whole] == [{**item, "id": ""} for item in done]


def test_what_begins_in_a_stream_is_empty_so_that_a_client_may_add_its_deltas() -> None:
    events = [event for _, event in named_events_of(played([*THOUGHT, *PLAIN, *CALLS], stream=True))]
    items = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("content", item.get("arguments")) for item in items] == [[], [], "", ""]
    parts = [event["part"]["text"] for event in events if event["type"] == "response.content_part.added"]
    assert parts == ["", ""]


def test_the_last_item_of_a_stream_that_is_cut_is_incomplete() -> None:
    events = [event for _, event in named_events_of(played([*PLAIN, *CUT], stream=True))]
    done = [event["item"]["status"] for event in events if event["type"] == "response.output_item.done"]
    assert done == ["completed", "incomplete"] and events[-1]["type"] == "response.incomplete"


def result(call_id: str) -> dict[str, str]:
    return {"type": "function_call_output", "call_id": call_id, "output": "snow"}


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1", "caller": None}
    items = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
        {"role": "assistant", "content": "y"},
        call,
        result("c"),
        {"role": "user", "content": "and?"},
    ]
    made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert chat_fields(convert({"input": items}, ResponsesRequest))["messages"] == [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "y", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c", "content": "snow"},
        {"role": "user", "content": "and?"},
    ]


def test_reasoning_after_a_call_begins_another_turn() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}
    first, second = chat_fields(convert({"input": [call, thought]}, ResponsesRequest))["messages"]
    assert "reasoning_content" not in first and first["tool_calls"][0]["id"] == "c"
    assert second == {"role": "assistant", "content": "", "reasoning_content": "so"}


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"a": None}, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"a": None}, "strict": True},
                }
            },
        ),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False},
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"type": "object"}, "strict": True},
                    }
                ],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
        ({"tool_choice": "required"}, {"tools": [], "tool_choice": "required"}),
        ({"max_output_tokens": 3, "top_p": 0.5}, {"max_completion_tokens": 3, "top_p": 0.5}),
        ({"store": False, "user": "u", "prompt_cache_key": "k", "truncation": "disabled"}, {}),
    ],
)
def test_parameters_become_those_of_chat_completions(given: dict[str, Any], made: dict[str, Any]) -> None:
    plain = chat_fields(convert(BODY, ResponsesRequest))
    assert chat_fields(convert({**BODY, **given}, ResponsesRequest)) == {**plain, **made}


def test_errors_name_the_fields_of_the_api() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    for change, param, words in (
        ({"store": True}, "store", "nothing is stored here"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"background": True}, "background", "stream it"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"max_output_tokens": 999}, "max_output_tokens", "max_output_tokens: this model"),
        ({"input": []}, "input", "input: at least one"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
        ({"input": [{"type": "reasoning", "encrypted_content": "?"}]}, "input", "not of this server"),
        ({"input": [call, {**call, "arguments": "{"}]}, "input", "input[1].arguments: not valid JSON"),
        (
            {"input": [{**call, "arguments": "[1]"}], "instructions": "a"},
            "input",
            "input[0].arguments: expected a JSON",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0]"),
        ({"tools": [FUNCTION, FUNCTION | {"name": "a b"}]}, "tools", "tools[1].name: up to 128"),
        ({"truncation": "auto"}, "truncation", "auto"),
        ({"include": ["message.output_text.logprobs"]}, "include", "include[0]"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning", "detailed"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"messages": []}, "messages", "here it is input"),
        ({"logprobs": True}, "logprobs", "not of /v1/responses"),
        ({"max_new_tokens": 3}, "max_new_tokens", "here it is max_output_tokens"),
    ):
        for stream in (False, True):
            reply = ask(FakeClient(), "POST", PATH, json={**BODY, **change, "stream": stream})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, param), error
            assert words in error["message"]


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    for reply in (
        ask(FakeClient(), "POST", PATH, json={"input": "one fail", "stream": True}),
        played(ABORTED, stream=True),
    ):
        events = named_events_of(reply)
        name, last = events[-1]
        assert (name, last["type"], last["sequence_number"]) == ("error", "error", len(events) - 1)
        assert last["code"] in ("engine_failed", "aborted")
