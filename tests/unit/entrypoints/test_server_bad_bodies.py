"""Every bad body gets a status and the name of the field; every parameter that is not built is refused or neutral."""

import json
from typing import Any

import msgspec
import pytest
from support.fake_engine_client import INFO, MAX_LEN, FakeClient, ask

from overlap_spec.entrypoints.http.body_fields import UNSUPPORTED
from overlap_spec.entrypoints.http.request_runner import renamed
from overlap_spec.entrypoints.native import generate
from overlap_spec.entrypoints.openai import requests
from overlap_spec.errors import RequestError
from overlap_spec.messages import MAX_GRAMMAR_BYTES

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "one two"}]},
    COMPLETIONS: {"prompt": "one two"},
    GENERATE: {"text": "one two", "sampling_params": {"max_new_tokens": 8}},
}
USER = {"role": "user", "content": "x"}
NAN = float("nan")


def called(arguments: object) -> dict[str, Any]:
    """An assistant's call of a tool."""
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


OPENAI = [  # on both OpenAI endpoints: what is changed, the status, the param
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": NAN}, 400, "temperature"),
    ({"temperature": float("inf")}, 400, "temperature"),
    ({"temperature": True}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.01}, 400, "top_p"),
    ({"top_p": NAN}, 400, "top_p"),
    ({"top_k": 0}, 400, "top_k"),
    ({"top_k": -2}, 400, "top_k"),
    ({"top_k": 1.5}, 400, "top_k"),
    ({"top_k": NAN}, 400, "top_k"),
    ({"min_p": -0.5}, 400, "min_p"),
    ({"min_p": 1.5}, 400, "min_p"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": "10"}, 400, "max_tokens"),
    ({"max_tokens": MAX_LEN}, 400, "max_tokens"),
    ({"max_tokens": 2**70}, 400, "max_tokens"),
    ({"top_k": 2**70}, 400, "top_k"),
    ({"min_tokens": 2**70, "max_tokens": None}, 400, "min_tokens"),
    ({"temperature": 10**400}, 400, "temperature"),
    ({"min_tokens": -1}, 400, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens"),
    ({"seed": "lucky"}, 400, "seed"),
    ({"seed": 2**63}, 400, "seed"),
    ({"seed": 10**30}, 400, "seed"),
    ({"seed": 1.5}, 400, "seed"),
    ({"stop": 5}, 400, "stop"),
    ({"stop": ["a", 5]}, 400, "stop"),
    ({"stop": ["a", ""]}, 400, "stop"),
    ({"stop": ["x"] * 17}, 400, "stop"),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids"),
    ({"stop_token_ids": "2"}, 400, "stop_token_ids"),
    ({"stop_token_ids": [2**70]}, 400, "stop_token_ids"),
    ({"stop_token_ids": list(range(33))}, 400, "stop_token_ids"),
    ({"ignore_eos": 1}, 400, "ignore_eos"),
    ({"skip_special_tokens": "no"}, 400, "skip_special_tokens"),
    ({"no_stop_trim": 0}, 400, "no_stop_trim"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": True}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, 400, "stream_options"),
    ({"max_new_tokens": 2}, 400, "max_new_tokens"),
    ({"sampling_params": {"max_new_tokens": 2}}, 400, "sampling_params"),
    ({"regex": "", "guided_json": {}, "guided_whitespace_pattern": 0}, 400, "guided_whitespace_pattern"),
    ({"rid": 7}, 400, "rid"),
    ({"rid": "r" * 257}, 400, "rid"),
    ({"model": 7}, 400, "model"),
    ({"model": "gpt-4"}, 404, "model"),
    ({"model": ""}, 404, "model"),
    ({"n": 129}, 400, "n"),
    ({"n": 0}, 400, "n"),
    ({"n": True}, 400, "n"),
    ({"frequency_penalty": 2.1}, 400, "frequency_penalty"),
    ({"frequency_penalty": "1"}, 400, "frequency_penalty"),
    ({"presence_penalty": -2.5}, 400, "presence_penalty"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"repetition_penalty": 2.5}, 400, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, 400, "logit_bias"),
    ({"logit_bias": [1]}, 400, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias"),
    ({"bad_words": [" "]}, 400, "bad_words"),
    ({"bad_words": "x"}, 400, "bad_words"),
    ({"bad_words": ["x"] * 129}, 400, "bad_words"),
    ({"logprobs": 1.5}, 400, "logprobs"),
    ({"prompt_logprobs": 21}, 400, "prompt_logprobs"),
    ({"prompt_logprobs": True}, 400, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, 400, "prompt_logprobs"),
    ({"return_tokens_as_token_ids": 1}, 400, "return_tokens_as_token_ids"),
    ({"return_logprob": True}, 400, "return_logprob"),
    ({"token_ids_logprob": [1]}, 400, "token_ids_logprob"),
    ({"response_format": {"type": "yaml"}}, 400, "response_format"),
    ({"response_format": "text"}, 400, "response_format"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, 400, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, 400, "response_format"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "tag"}}}, 400, "response_format"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, 400, "ignore_eos"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 1, "max_tokens": 4}, 400, "min_tokens"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, 400, "regex"),
    ({"json_schema": "{"}, 400, "json_schema"),
    ({"json_schema": "[1]"}, 400, "json_schema"),
    ({"regex": 5}, 400, "regex"),
    ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, 400, "regex"),
    ({"ebnf": ["a"]}, 400, "ebnf"),
    ({"lark": {"start": "a"}}, 400, "lark"),
    ({"guided_choice": "a"}, 400, "guided_choice"),
    ({"guided_choice": [5]}, 400, "guided_choice"),
    ({"guided_json_object": "yes"}, 400, "guided_json_object"),
    ({"structured_outputs": "json"}, 400, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, 400, "structured_outputs"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, 400, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, 400, "structured_outputs"),
    ({"structured_outputs": {"yaml": "a"}}, 400, "structured_outputs"),
    ({"lora_path": "adapter"}, 400, "lora_path"),
    ({"priority": 1}, 400, "priority"),
    ({"return_hidden_states": True}, 400, "return_hidden_states"),
    ({"allowed_token_ids": []}, 400, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, 400, "allowed_token_ids"),
    ({"stop_regex": ["a", ""]}, 400, "stop_regex"),
    ({"stop_regex": 5}, 400, "stop_regex"),
    ({"stop_regex": ["a"] * 17}, 400, "stop_regex"),
    ({"include_stop_str_in_output": 1}, 400, "include_stop_str_in_output"),
    ({"spaces_between_special_tokens": "no"}, 400, "spaces_between_special_tokens"),
    ({"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 2**70}, 400, "truncate_prompt_tokens"),
    ({"truncation_side": "right"}, 400, "truncation_side"),
    ({"return_token_ids": "yes"}, 400, "return_token_ids"),
    ({"user": 5}, 400, "user"),
    ({"metadata": "a"}, 400, "metadata"),
    ({"store": True}, 400, "store"),
    ({"service_tier": "priority"}, 400, "service_tier"),
    ({"kv_transfer_params": {"a": 1}}, 400, "kv_transfer_params"),
    ({"cache_salt": 5}, 400, "cache_salt"),
    ({"extra_key": ["a"]}, 400, "extra_key"),
]
OF_CHAT = [
    ({"messages": None}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hello"}, 400, "messages"),
    ({"messages": ["hello"]}, 400, "messages"),
    ({"messages": [{"content": "x"}]}, 400, "messages"),
    ({"messages": [{"role": "user"}]}, 400, "messages"),
    ({"messages": [{"role": 5, "content": "x"}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [5]}]}, 400, "messages"),
    ({"messages": [{**USER, "weight": 10**30}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "bad"}]}, 400, "messages"),
    ({"messages": [USER] * (MAX_LEN + 1)}, 400, "messages"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, 400, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, 400, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]}, 400, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [called("{")]}]}, 400, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [called("[1]")]}]}, 400, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [called(5)]}]}, 400, "messages"),
    ({"messages": [{"role": "tool", "content": None}]}, 400, "messages"),
    ({"top_logprobs": -1}, 400, "top_logprobs"),
    ({"echo": True}, 400, "echo"),
    ({"reasoning": {"enabled": False}}, 400, "reasoning"),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ({"max_completion_tokens": MAX_LEN}, 400, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, 400, "max_tokens"),
    ({"tools": {"type": "function"}}, 400, "tools"),
    ({"tools": ["f"]}, 400, "tools"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, 400, "tool_choice"),
    ({"chat_template_kwargs": [1]}, 400, "chat_template_kwargs"),
    ({"continue_final_message": 1}, 400, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, 400, "continue_final_message"),
    ({"chat_template": 5}, 400, "chat_template"),
    ({"add_special_tokens": True}, 400, "add_special_tokens"),
    ({"modalities": ["audio"]}, 400, "modalities"),
]
OF_COMPLETIONS = [
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": 5}, 400, "prompt"),
    ({"prompt": {}}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": ["a", 5]}, 400, "prompt"),
    ({"prompt": [5, "a"]}, 400, "prompt"),
    ({"prompt": [[1], "a"]}, 400, "prompt"),
    ({"prompt": [1.5]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [2**31]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt"),
    ({"prompt": [1] * (MAX_LEN + 1)}, 400, "prompt"),
    ({"prompt": ["a"] * 2049}, 400, "prompt"),
    ({"prompt": "bad"}, 400, "prompt"),
    ({"continue_final_message": True}, 400, "continue_final_message"),
    ({"chat_template": "{{ x }}"}, 400, "chat_template"),
    ({"echo": "yes"}, 400, "echo"),
    ({"suffix": "tail"}, 400, "suffix"),
    ({"max_completion_tokens": MAX_LEN}, 400, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, 400, "max_tokens"),
    ({"tools": [{"type": "function"}]}, 400, "tools"),
    ({"best_of": 2, "stream": True}, 400, "best_of"),
    ({"best_of": 1, "n": 2}, 400, "best_of"),
    ({"best_of": 129}, 400, "best_of"),
    ({"prompt": ["a"] * 1025, "best_of": 2}, 400, "best_of"),
    ({"prompt": ["a"] * 1025, "n": 2}, 400, "n"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"logprobs": -1}, 400, "logprobs"),
]
OF_GENERATE = [
    ({"text": None}, 400, "text"),
    ({"input_ids": [1]}, 400, "text"),
    ({"text": 5}, 400, "text"),
    ({"text": []}, 400, "text"),
    ({"text": ["a", 5]}, 400, "text"),
    ({"text": None, "input_ids": "a"}, 400, "input_ids"),
    ({"text": None, "input_ids": ["a"]}, 400, "input_ids"),
    ({"text": None, "input_ids": []}, 400, "input_ids"),
    ({"text": None, "input_ids": [[]]}, 400, "input_ids"),
    ({"text": None, "input_ids": [1, [2]]}, 400, "input_ids"),
    ({"text": None, "input_ids": [-1]}, 400, "input_ids"),
    ({"text": None, "input_ids": [2**40]}, 400, "input_ids"),
    ({"text": None, "input_ids": [1] * (MAX_LEN + 1)}, 400, "input_ids"),
    ({"text": "bad"}, 400, "text"),
    ({"sampling_params": 5}, 400, "sampling_params"),
    ({"sampling_params": [{}, {}]}, 400, "sampling_params"),
    ({"sampling_params": {"temperature": -1}}, 400, "temperature"),
    ({"sampling_params": {"temperature": NAN}}, 400, "temperature"),
    ({"sampling_params": {"top_k": 0}}, 400, "top_k"),
    ({"sampling_params": {"top_p": 0}}, 400, "top_p"),
    ({"sampling_params": {"max_new_tokens": -1}}, 400, "max_new_tokens"),
    ({"sampling_params": {"max_new_tokens": MAX_LEN}}, 400, "max_new_tokens"),
    ({"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 8}}, 400, "min_new_tokens"),
    ({"sampling_params": {"seed": "x"}}, 400, "seed"),
    ({"sampling_params": {"seed": 2**63}}, 400, "seed"),
    ({"sampling_params": {"sampling_seed": 2**63}}, 400, "sampling_seed"),
    ({"sampling_params": {"seed": 1, "sampling_seed": 2}}, 400, "sampling_seed"),
    ({"sampling_params": {"n": 0}}, 400, "n"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 1}]}, 400, "n"),
    ({"rid": ["a"], "sampling_params": {"n": 2}}, 400, "rid"),
    ({"sampling_params": {"max_tokens": 2}}, 400, "max_tokens"),
    ({"max_tokens": 2}, 400, "max_tokens"),
    ({"max_thinking_tokens": 2}, 400, "max_thinking_tokens"),
    ({"sampling_params": {"thinking_budget": 2}}, 400, "thinking_budget"),
    ({"temperature": 0}, 400, "temperature"),
    ({"sampling_params": {"frequency_penalty": -3}}, 400, "frequency_penalty"),
    ({"sampling_params": {"regex": 5}}, 400, "regex"),
    ({"sampling_params": {"regex": "a", "ebnf": "b"}}, 400, "ebnf"),
    ({"regex": "a"}, 400, "regex"),
    ({"sampling_params": {"stop_regex": [""]}}, 400, "stop_regex"),
    ({"sampling_params": {"truncate_prompt_tokens": 0}}, 400, "truncate_prompt_tokens"),
    ({"return_token_ids": True}, 400, "return_token_ids"),
    ({"chat_template": "{{ x }}"}, 400, "chat_template"),
    ({"sampling_params": {"stream_interval": 2}}, 400, "stream_interval"),
    ({"return_logprob": 1}, 400, "return_logprob"),
    ({"return_logprob": [True, True]}, 400, "return_logprob"),
    ({"return_logprob": True, "top_logprobs_num": 21}, 400, "top_logprobs_num"),
    ({"return_logprob": True, "logprob_start_len": -2}, 400, "logprob_start_len"),
    ({"return_logprob": True, "token_ids_logprob": [-1]}, 400, "token_ids_logprob"),
    ({"return_logprob": True, "token_ids_logprob": [[1], [2]]}, 400, "token_ids_logprob"),
    ({"return_logprob": True, "token_ids_logprob": list(range(33))}, 400, "token_ids_logprob"),
    ({"sampling_params": {"return_logprob": True}}, 400, "return_logprob"),
    ({"logprobs": 1}, 400, "logprobs"),
    ({"input_embeds": [[0.5]]}, 400, "input_embeds"),
    ({"image_data": "http://image"}, 400, "image_data"),
    ({"custom_logit_processor": "code"}, 400, "custom_logit_processor"),
    ({"lora_path": ["a"]}, 400, "lora_path"),
    ({"rid": ["a", "b"]}, 400, "rid"),
    ({"rid": 5}, 400, "rid"),
    ({"stream": 1}, 400, "stream"),
]
ROWS = [
    *((CHAT, *row) for row in OPENAI + OF_CHAT),
    *((COMPLETIONS, *row) for row in OPENAI + OF_COMPLETIONS),
    *((GENERATE, *row) for row in OF_GENERATE),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, 400, "prompt"),
    ("/tokenize", {"messages": []}, 400, "messages"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "model": "gpt-4"}, 404, "model"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": [1, [2]]}, 400, "tokens"),
    ("/abort_request", {}, 400, "rid"),
    ("/abort_request", {"rid": 5}, 400, "rid"),
    ("/abort_request", {"abort_all": 1}, 400, "abort_all"),
]


def post(path: str, body: dict[str, Any] | bytes, client: FakeClient | None = None) -> tuple[int, dict[str, Any]]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = ask(client or FakeClient(), "POST", path, content=content)
    return response.status_code, response.json()


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize(("path", "change", "status", "param"), ROWS, ids=[f"{r[0]}-{str(r[1])[:50]}" for r in ROWS])
def test_bad_body(path: str, change: dict[str, Any], status: int, param: str) -> None:
    client = FakeClient()
    found, reply = post(path, {**GOOD.get(path, {}), **change}, client)
    error = reply["error"]
    assert (found, error["param"]) == (status, param), error
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert not client.running


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"nonsense",
        b"[]",
        b'"text"',
        b"5",
        b'{"prompt": "a"} x',
        b"\xff\xfe",
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_a_body_that_is_no_object(path: str, body: bytes) -> None:
    status, reply = post(path, body)
    assert (status, reply["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("path", GOOD)
def test_an_empty_body_lacks_the_prompt(path: str) -> None:
    status, reply = post(path, b"")
    assert status == 400
    assert reply["error"]["code"] == "missing_required_parameter"


@pytest.mark.parametrize("path", GOOD)
def test_a_compressed_body_is_refused_by_the_name_of_its_encoding(path: str) -> None:
    for encoding, status in (("gzip", 415), ("br, gzip", 415), ("Identity", 200)):
        answer = ask(FakeClient(), "POST", path, json=GOOD[path], headers={"content-encoding": encoding})
        assert answer.status_code == status
        assert status == 200 or encoding in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", GOOD)
def test_too_large_a_body_is_refused_unread(path: str) -> None:
    status, reply = post(path, b" " * (INFO.max_body_bytes + 1))
    assert (status, reply["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("path", GOOD)
def test_too_long_a_prompt_says_maximum_context_length(path: str) -> None:
    limits = {"max_tokens": MAX_LEN} if path != GENERATE else {"sampling_params": {"max_new_tokens": MAX_LEN}}
    status, reply = post(path, {**GOOD[path], **limits})
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert f"maximum context length is {MAX_LEN} tokens" in reply["error"]["message"]


@pytest.mark.parametrize("path", GOOD)
def test_neutral_values_null_and_unknown_fields_are_accepted(path: str) -> None:
    neutral = {name: values[0] for name, values in UNSUPPORTED.items() if values}
    client = FakeClient()
    status, reply = post(path, {**GOOD[path], **neutral, "no_such_field": {"a": 1}}, client)
    assert status == 200, reply
    known = set(UNSUPPORTED) | {"model", "temperature", "stop", "stream_options", "rid", "min_p", "stream", "seed"}
    status, reply = post(path, {**GOOD[path], **dict.fromkeys(known - set(GOOD[path]))}, client)
    assert status == 200, reply
    (_, prompt, sampling), (_, same_prompt, same_sampling) = client.asked
    assert (prompt, sampling) == (same_prompt, same_sampling)


def test_nested_nulls_and_neutral_values_are_accepted() -> None:
    sampling = {"temperature": None, "n": 1, "frequency_penalty": 0.0, "regex": None, "max_new_tokens": None}
    assert post(GENERATE, {"text": "a", "sampling_params": sampling})[0] == 200
    assert post(GENERATE, {"text": ["a", "b"], "sampling_params": [None, sampling], "lora_path": [None, ""]})[0] == 200
    options = {"include_usage": None, "continuous_usage_stats": None}
    assert post(CHAT, {**GOOD[CHAT], "stream_options": options})[0] == 200


def test_a_parameter_of_another_endpoint_is_refused() -> None:
    """Unless it asks for nothing: it would have no effect."""
    chats, completions = (set(shape.__struct_fields__) for shape in (requests.ChatRequest, requests.CompletionRequest))
    assert requests.OF_CHATS.keys() == chats - completions and requests.OF_COMPLETIONS.keys() == completions - chats
    assert {"thinking_budget", "tools", "echo"} < generate.OF_OPENAI.keys()
    tables = {COMPLETIONS: requests.OF_CHATS, CHAT: requests.OF_COMPLETIONS, GENERATE: generate.OF_OPENAI}
    for path, fields in tables.items():
        neutral = {name: values[0] for name, values in fields.items() if values}
        assert post(path, {**GOOD[path], **neutral})[0] == 200
        for name in fields:
            status, reply = post(path, {**GOOD[path], name: "something else"})
            assert (status, reply["error"]["param"]) == (400, name)


def test_every_unsupported_parameter_is_refused_by_name() -> None:
    for name in UNSUPPORTED:
        status, reply = post(COMPLETIONS, {**GOOD[COMPLETIONS], name: "something else"})
        assert (status, reply["error"]["param"]) == (400, name)


def test_a_sentence_uses_the_names_of_its_api() -> None:
    for path, field, change, sentence in (
        (CHAT, "min_tokens", {"min_tokens": 9, "max_tokens": 8}, "min_tokens must not exceed the limit of 8 new"),
        (COMPLETIONS, "max_tokens", {"max_tokens": -1}, "max_tokens must be at least 0"),
        (CHAT, "max_tokens", {"max_tokens": 0}, "max_tokens must be at least 1 in a chat"),
        (GENERATE, "json_schema", {"json_schema": "{}"}, "json_schema belongs in sampling_params"),
        (CHAT, "regex", {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, f"regex has {MAX_GRAMMAR_BYTES + 1} bytes: at most"),
        (CHAT, "tool_choice", {"tool_choice": "required"}, "there are no tools to choose from"),
        (CHAT, "top_logprobs", {"top_logprobs": 3}, "logprobs must be true if it is used"),
        (CHAT, "top_logprobs", {"logprobs": True, "top_logprobs": 21}, "top_logprobs must be 0 to 20, got 21"),
        (COMPLETIONS, "logprobs", {"logprobs": 21}, "logprobs must be 0 to 20, got 21"),
    ):
        error = post(path, {**GOOD[path], **change})[1]["error"]
        assert error["param"] == field and sentence in error["message"]
    refused = RequestError("prompt", "the prompt must have at least one token")
    assert str(renamed(refused, {"prompt": "input_ids"})) == str(refused)  # a word, not the name of a field


def test_half_a_character_is_named_as_what_is_wrong() -> None:
    message = post(CHAT, b'{"model": "\\ud800"}')[1]["error"]["message"]
    assert "surrogates not allowed" in message


@pytest.mark.parametrize("path", GOOD)
def test_any_content_type_will_do(path: str) -> None:
    body = json.dumps(GOOD[path])
    response = ask(FakeClient(), "POST", path, content=body, headers={"content-type": "text/plain"})
    assert response.status_code == 200


def test_text_is_refused_without_a_tokenizer() -> None:
    info = msgspec.structs.replace(INFO, skip_tokenizer_init=True)
    for path, body, param in (
        (CHAT, GOOD[CHAT], "messages"),
        (COMPLETIONS, GOOD[COMPLETIONS], "prompt"),
        (COMPLETIONS, {"prompt": [1], "stop": "x"}, "stop"),
        (GENERATE, GOOD[GENERATE], "text"),
        ("/tokenize", {"prompt": "a"}, "prompt"),
        ("/detokenize", {"tokens": [1]}, "tokens"),
    ):
        response = ask(FakeClient(), "POST", path, info, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert ask(FakeClient(), "POST", GENERATE, info, json={"input_ids": [1]}).status_code == 200
