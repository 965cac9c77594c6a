"""The two OpenAI endpoints: what reaches the engine, whole answers, and streams event by event."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from support.fake_engine_client import INFO, FakeClient, ask, events_of, healthy

from overlap_spec.client.link import pack_ids
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.body_fields import UNSUPPORTED
from overlap_spec.messages import ChatPrompt, SamplingParams, TextPrompt, TokenPrompt

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "one two three"}]


def usage(prompt: int, completion: int, cached: int = 1) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def stream(path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks, without what all of them share, which is checked here."""
    response = ask(FakeClient(), "POST", path, json={**body, "stream": True})
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *events, done = events_of(response)
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    heads = {(chunk.pop("id"), chunk.pop("object"), chunk.pop("created"), chunk.pop("model")) for chunk in chunks}
    ((_, found_kind, _, model),) = heads
    assert (found_kind, model) == (kind, "tiny")
    return chunks


def text_choice(text: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": None, "logprobs": None, **more}


def delta_choice(finish_reason: str | None = None, more: dict[str, Any] | None = None, **delta: str) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None, **(more or {})}


def test_chat_whole() -> None:
    client = FakeClient()
    reply = ask(client, "POST", CHAT, json={"messages": MESSAGES}).json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", reply.pop("id"))
    assert reply.pop("created") > 1_700_000_000
    assert reply == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "one two three"},
                "finish_reason": "stop",
                "matched_stop": "</s>",
                "logprobs": None,
            }
        ],
        "usage": usage(3, 3),
    }
    ((_, prompt, sampling),) = client.asked
    assert prompt == ChatPrompt(MESSAGES)
    assert sampling == SamplingParams(max_new_tokens=None)


def test_completion_whole_with_a_limit() -> None:
    client = FakeClient()
    reply = ask(client, "POST", COMPLETIONS, json={"model": "tiny", "prompt": "one two three", "max_tokens": 2}).json()
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", reply["id"])
    assert reply["object"] == "text_completion"
    assert reply["choices"] == [text_choice("one two", finish_reason="length", matched_stop=None)]
    assert reply["usage"] == usage(3, 2)
    assert client.asked[0][1] == TextPrompt("one two three")


def test_every_sampling_parameter_reaches_the_engine() -> None:
    given = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": -2.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 2.0,
        "logit_bias": {"7": 1.5, "9": -100},
        "allowed_token_ids": [7, 9, 11],
        "bad_words": ["x"],
        "seed": -3,
        "stop": ["x", "y"],
        "stop_token_ids": [4, 5],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    client = FakeClient()
    for fields in ({"prompt": "a"}, {"messages": MESSAGES}):
        path = COMPLETIONS if "prompt" in fields else CHAT
        for limit in ("max_tokens", "max_completion_tokens"):
            ask(client, "POST", path, json={**fields, limit: 9, "min_tokens": 2, **given})
    lists = {"stop": ("x", "y"), "stop_token_ids": (4, 5), "logit_bias": {7: 1.5, 9: -100.0}}
    lists |= {"allowed_token_ids": None, "allowed_ids": pack_ids((7, 9, 11)), "bad_words": ("x",)}
    want = SamplingParams(max_new_tokens=9, min_new_tokens=2, **{**given, **lists})
    assert [sampling for _, _, sampling in client.asked] == [want] * 4


def test_defaults_of_the_limits() -> None:
    client = FakeClient()
    ask(client, "POST", COMPLETIONS, json={"prompt": "a", "max_tokens": None, "stop": "end"})
    ask(client, "POST", CHAT, json={"messages": MESSAGES, "max_tokens": None, "stop": ""})
    assert [(s.max_new_tokens, s.stop) for _, _, s in client.asked] == [(16, ("end",)), (None, ())]


def test_what_the_template_is_given() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    client = FakeClient()
    body = {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "user", "content": "hi", "name": "Eve"},
        ],
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "add_generation_prompt": False,
    }
    ask(client, "POST", CHAT, json=body)
    ask(client, "POST", CHAT, json={**body, "tool_choice": "none"})
    (_, first, _), (_, second, _) = client.asked
    flat = [
        {"role": "system", "content": "be kind"},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "user", "content": "hi", "name": "Eve"},
    ]
    kwargs = {"enable_thinking": False, "reasoning_effort": "low"}
    assert first == ChatPrompt(flat, tools, kwargs, False)
    assert second == ChatPrompt(flat, None, kwargs, False)


def test_no_effort_switches_reasoning_off_unless_the_template_is_told_otherwise() -> None:
    client = FakeClient()
    for kwargs in ({}, {"enable_thinking": True}):
        ask(
            client,
            "POST",
            CHAT,
            json={"messages": MESSAGES, "reasoning_effort": "none", "chat_template_kwargs": kwargs},
        )
    given = [prompt.template_kwargs for _, prompt, _ in client.asked if isinstance(prompt, ChatPrompt)]
    off = {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}
    assert given == [off, off | {"enable_thinking": True}]


def test_chat_stream() -> None:
    assert stream(CHAT, messages=MESSAGES) == [
        {"choices": [delta_choice(role="assistant", content="")]},
        {"choices": [delta_choice(content="one")]},
        {"choices": [delta_choice(content=" two")]},
        {"choices": [delta_choice(content=" three")]},
        {"choices": [delta_choice("stop", {"matched_stop": "</s>"})]},
    ]


def test_completion_stream() -> None:
    assert stream(COMPLETIONS, prompt="one two three", max_tokens=2) == [
        {"choices": [text_choice("one")]},
        {"choices": [text_choice(" two", finish_reason="length", matched_stop=None)]},
    ]


def test_golden_bytes_of_a_stream() -> None:
    response = ask(FakeClient(), "POST", COMPLETIONS, json={"prompt": 'say "ü"\n', "stream": True, "rid": "me"})
    text = re.sub(r'"created":\d+', '"created":0', response.text)
    head = 'data: {"id":"me","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,'
    assert text == (
        head + '"text":"say","finish_reason":null,"logprobs":null}]}\n\n'
        + head + '"text":" \\"ü\\"","finish_reason":"stop","matched_stop":"</s>","logprobs":null}]}\n\n'
        "data: [DONE]\n\n"
    )  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_in_streams(path: str) -> None:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "one two three"}
    plain = stream(path, **prompt)
    assert all("usage" not in chunk for chunk in plain)

    *chunks, last = stream(path, **prompt, stream_options={"include_usage": True})
    assert last == {"choices": [], "usage": usage(3, 3)}
    assert chunks == [{**chunk, "usage": None} for chunk in plain]

    *chunks, last = stream(path, **prompt, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert last == {"choices": [], "usage": usage(3, 3)}
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == ([0, 1, 2, 3, 3] if path == CHAT else [1, 2, 3])

    chunks = stream(path, **prompt, stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == counts


@pytest.mark.parametrize("prompt", ["a b", ["a b", "c"], [5, 6], [[5, 6], [7]]])
def test_prompts_of_every_shape(prompt: Any) -> None:
    client = FakeClient()
    reply = ask(client, "POST", COMPLETIONS, json={"prompt": prompt}).json()
    asked = [given for _, given, _ in client.asked]
    match prompt:
        case "a b":
            texts, want = ["a b"], [TextPrompt("a b")]
        case ["a b", "c"]:
            texts, want = ["a b", "c"], [TextPrompt("a b"), TextPrompt("c")]
        case [5, 6]:
            texts, want = ["<5> <6>"], [TokenPrompt(b"\5\0\0\0\6\0\0\0")]
        case _:
            texts, want = ["<5> <6>", "<7>"], [TokenPrompt(b"\5\0\0\0\6\0\0\0"), TokenPrompt(b"\7\0\0\0")]
    assert asked == want
    assert [choice["text"] for choice in reply["choices"]] == texts
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(texts)))
    num_tokens = sum(len(text.split()) for text in texts)
    assert reply["usage"] == usage(num_tokens, num_tokens, len(texts))


def test_a_batch_streams_choices_by_index() -> None:
    *chunks, last = stream(COMPLETIONS, prompt=["a b c", "d"], stream_options={"include_usage": True})
    texts = {0: "", 1: ""}
    finished = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        finished += [choice["index"]] * (choice["finish_reason"] == "stop")
    assert texts == {0: "a b c", 1: "d"}
    assert sorted(finished) == [0, 1]
    assert last == {"choices": [], "usage": usage(4, 4, 2)}


@pytest.mark.parametrize(("word", "status", "code"), [("busy", 503, "overloaded"), ("dead", 500, "engine_failed")])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", ["{}", ["a b c d e f", "{}"]])
def test_an_error_before_the_first_token_has_a_status(
    word: str, status: int, code: str, streamed: bool, prompt: str | list[str]
) -> None:
    filled = prompt.format(word) if isinstance(prompt, str) else [each.format(word) for each in prompt]
    client = FakeClient(step_s=0.001)
    response = ask(client, "POST", COMPLETIONS, json={"prompt": filled, "stream": streamed})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert response.headers.get("retry-after") == ("1" if status == 503 else None)
    assert not client.running


def test_an_error_after_the_first_token_is_the_last_event() -> None:
    client = FakeClient()
    response = ask(client, "POST", COMPLETIONS, json={"prompt": "one fail three", "stream": True})
    first, last = events_of(response)
    assert json.loads(first)["choices"] == [text_choice("one")]
    assert json.loads(last) == {
        "error": {
            "message": "the engine has failed: worker: killed by signal 9",
            "type": "server_error",
            "param": None,
            "code": "engine_failed",
        }
    }
    assert ask(client, "POST", COMPLETIONS, json={"prompt": "one fail three"}).status_code == 500


def test_a_request_that_alone_has_failed_has_a_code_of_its_own() -> None:
    client = FakeClient()
    error = {"message": "the model's logits are NaN", "type": "server_error", "param": None, "code": "not_finite"}
    streamed = ask(client, "POST", COMPLETIONS, json={"prompt": "one nan three", "stream": True})
    assert json.loads(events_of(streamed)[-1]) == {"error": error}
    whole = ask(client, "POST", COMPLETIONS, json={"prompt": "one nan three"})
    assert (whole.status_code, whole.json()) == (500, {"error": error})


def test_a_bug_is_a_500_without_details_or_the_last_event(caplog: pytest.LogCaptureFixture) -> None:
    async def inner(streamed: bool) -> httpx.Response:
        transport = httpx.ASGITransport(create_app(FakeClient(), INFO, healthy), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.post(COMPLETIONS, json={"prompt": "one mute", "stream": streamed})

    error = {"message": "internal server error", "type": "server_error", "param": None, "code": "internal_error"}
    whole = asyncio.run(inner(False))
    assert (whole.status_code, whole.json()) == (500, {"error": error})
    assert json.loads(events_of(asyncio.run(inner(True)))[-1]) == {"error": error}
    assert "no finish" in caplog.text


def test_one_failure_ends_a_batch() -> None:
    client = FakeClient(step_s=0.001)
    response = ask(client, "POST", COMPLETIONS, json={"prompt": ["one hang", "one two fail"], "stream": True})
    assert json.loads(events_of(response)[-1])["error"]["code"] == "engine_failed"
    assert len(client.left) == 2
    assert not client.running


def test_the_table_leaves_supported_parameters_alone() -> None:
    assert not UNSUPPORTED.keys() & set(SamplingParams.__struct_fields__)
