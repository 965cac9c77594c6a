"""Requests to a running service, whose effect shows in the answer's tokens: choices, limits, sampling defaults."""

import json
import re
from typing import Any

import httpx
import openai
import pytest
from support.command_line import Service
from support.junk_bodies import BODIES, bodies

from overlap_spec.entrypoints.openai.requests import choice_seed

LONG_PROMPT = list(range(5, 45))  # two whole pages of 16 tokens, and half a page


def generate(service: Service, **body: Any) -> Any:
    reply = httpx.post(f"{service.url}/generate", json={"input_ids": LONG_PROMPT, **body}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("seed", [3, -1])
def test_a_choice_is_what_a_request_with_its_seed_gets(service: Service, seed: int) -> None:
    drawn = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
    choices = generate(service, sampling_params={**drawn, "n": 3, "seed": seed})
    alone = [generate(service, sampling_params={**drawn, "seed": choice_seed(seed, index)}) for index in range(3)]
    assert [choice["output_ids"] for choice in choices] == [each["output_ids"] for each in alone]
    assert len({tuple(choice["output_ids"]) for choice in choices}) == 3


def test_the_prefill_of_choices_is_shared(service: Service) -> None:
    fresh = [7, *LONG_PROMPT]
    choices = generate(service, input_ids=fresh, sampling_params={"n": 4, "max_new_tokens": 5, "ignore_eos": True})
    assert [choice["meta_info"]["cached_tokens"] for choice in choices] == [0, 32, 32, 32]


def test_the_openai_client_streams_choices(service: Service) -> None:
    options: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 12, "seed": 5}
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(**options, n=3)
        texts = ["", "", ""]
        usage = None
        for chunk in client.chat.completions.create(
            **options, n=3, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    assert whole.usage is not None and usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_no_new_tokens_compute_the_prompt_only(service: Service) -> None:
    for stop in ("", "x"):
        reply = generate(service, sampling_params={"max_new_tokens": 0, "stop": stop})
        assert (reply["text"], reply["output_ids"], reply["meta_info"]["completion_tokens"]) == ("", [], 0)
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert reply["meta_info"]["prompt_tokens"] == len(LONG_PROMPT)


@pytest.mark.slow
def test_a_flush_right_after_an_answer_succeeds(service: Service) -> None:
    for attempt in range(10):
        prompt = [attempt, *LONG_PROMPT]
        ended = {"max_new_tokens": 9, "ignore_eos": True}
        generate(service, input_ids=prompt, sampling_params=ended)
        assert httpx.post(f"{service.url}/flush_cache").status_code == 200
        assert generate(service, input_ids=prompt, sampling_params=ended)["meta_info"]["cached_tokens"] == 0


def test_refused_requests_are_in_the_log_with_their_reason(service: Service) -> None:
    body = {"prompt": "a", "top_p": 7}
    refused = httpx.post(f"{service.url}/v1/completions", json=body, headers={"x-request-id": "from-a-client"})
    assert refused.status_code == 400
    assert service.logs("id=from-a-client: top_p must be in (0, 1], got 7.0"), service.log()


def complete(service: Service, **body: Any) -> Any:
    reply = httpx.post(f"{service.url}/v1/completions", json={"temperature": 0, "ignore_eos": True, **body}, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def test_a_stop_pattern_cuts_the_answer_where_it_begins(service: Service) -> None:
    prompt = {"prompt": "The sky is", "max_tokens": 60}
    whole = complete(service, **prompt)["text"]
    cut = whole[20:23]
    pattern = f"(?:{re.escape(cut[0])}){re.escape(cut[1:])}|never"
    ended = complete(service, **prompt, stop_regex=pattern)
    assert (ended["text"], ended["finish_reason"], ended["matched_stop"]) == (
        whole[: whole.index(cut)],
        "stop",
        pattern,
    )
    kept = complete(service, **prompt, stop_regex=pattern, include_stop_str_in_output=True)
    assert kept["text"] == whole[: whole.index(cut) + 3]


def test_a_truncated_prompt_is_answered_as_its_end_alone(service: Service) -> None:
    ended = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    alone = generate(service, input_ids=LONG_PROMPT[-9:], sampling_params=ended)
    kept = generate(service, sampling_params={**ended, "truncate_prompt_tokens": 9})
    assert (kept["output_ids"], kept["meta_info"]["prompt_tokens"]) == (alone["output_ids"], 9)
    beyond = generate(service, input_ids=LONG_PROMPT * 250, sampling_params={**ended, "truncate_prompt_tokens": -1})
    assert beyond["meta_info"]["prompt_tokens"] == 8192 - 12


def test_a_continued_message_is_the_end_of_the_prompt(service: Service) -> None:
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because "}]
    body = {"messages": messages, "continue_final_message": True}
    ids = httpx.post(f"{service.url}/tokenize", json=body).json()["tokens"]
    assert httpx.post(f"{service.url}/detokenize", json={"tokens": ids}).json()["text"].endswith("Because ")
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    chat = httpx.post(f"{service.url}/v1/chat/completions", json={**body, **options}).json()
    assert chat["prompt_token_ids"] == ids
    assert chat["choices"][0]["token_ids"] == complete(service, prompt=ids, **options)["token_ids"]


def test_a_template_of_a_request_is_refused_unless_the_engine_trusts_it(service: Service) -> None:
    body = {"messages": [{"role": "user", "content": "Why?"}], "chat_template": "{{ messages }}"}
    error = httpx.post(f"{service.url}/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "chat_template"
    assert "--trust-request-chat-template" in error["message"]


@pytest.mark.full
def test_junk_in_every_field_leaves_nothing_behind_in_the_engine(service: Service) -> None:
    few = {"/generate": {"sampling_params": {"max_new_tokens": 3}}}
    with httpx.Client(base_url=service.url, timeout=60) as http:
        for path in BODIES:
            limit = few.get(path, {"max_tokens": 3} if path.startswith("/v1") else {})
            for name, body in bodies(path, **limit)[:: 41 if path.startswith("/v1") else 13]:
                if name not in ("max_tokens", "max_completion_tokens"):  # the fake's tests have those
                    status = http.post(path, content=json.dumps(body)).status_code
                    assert status in (200, 400, 404), (path, body)
        assert http.post("/flush_cache?timeout=20").status_code == 200
        state = http.get("/metrics").text
    for gauge in ("num_running_reqs", "num_queue_reqs", "num_used_tokens", "kv_evictable_tokens"):
        assert re.search(rf"^overlap_spec:{gauge} 0(\.0)?$", state, re.M), gauge
    assert complete(service, prompt="The sky is", max_tokens=5)["finish_reason"] == "length"
