"""Parameters of the text, of the prompt and of what is returned: what reaches the engine, and what comes back."""

import json
from typing import Any

import pytest
from support.fake_engine_client import FakeClient, ask, events_of

from overlap_spec.messages import ChatPrompt, SamplingParams, TextPrompt

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES = [{"role": "user", "content": "one two"}]
GIVEN: dict[str, Any] = {
    "stop_regex": ["a+", "b"],
    "include_stop_str_in_output": True,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 7,
}
WANT = {
    "stop_regex": ("a+", "b"),
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 7,
}


def test_they_reach_the_engine_from_every_endpoint() -> None:
    client = FakeClient()
    ask(client, "POST", CHAT, json={"messages": MESSAGES, **GIVEN})
    ask(client, "POST", COMPLETIONS, json={"prompt": "a", **GIVEN, "stop_regex": "a+"})
    ask(client, "POST", GENERATE, json={"text": "a", "sampling_params": GIVEN})
    assert [sampling for _, _, sampling in client.asked] == [
        SamplingParams(max_new_tokens=None, **WANT),
        SamplingParams(max_new_tokens=16, **{**WANT, "stop_regex": ("a+",)}),
        SamplingParams(**WANT),
    ]


def test_an_engine_may_be_given_more_ids_than_it_holds_if_they_are_truncated() -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": [1] * 300, "truncate_prompt_tokens": 9, "max_tokens": 1}),
        (GENERATE, {"input_ids": [1] * 300, "sampling_params": {"truncate_prompt_tokens": 9, "max_new_tokens": 1}}),
    ):
        client = FakeClient()
        assert "this model's maximum" in ask(client, "POST", path, json=body).text, "the fake does not truncate"
        assert len(client.asked) == 1


def test_how_a_conversation_becomes_a_prompt() -> None:
    client = FakeClient()
    own = {"chat_template": "{{ x }}", "chat_template_kwargs": {"x": 1}}
    ask(client, "POST", CHAT, json={"messages": MESSAGES, "continue_final_message": True})
    ask(
        client,
        "POST",
        CHAT,
        json={"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": False},
    )
    ask(client, "POST", CHAT, json={"messages": MESSAGES, **own})
    assert [prompt for _, prompt, _ in client.asked] == [
        ChatPrompt(MESSAGES, None, {}, False, True),
        ChatPrompt(MESSAGES, None, {}, False, True),
        ChatPrompt(MESSAGES, None, {"x": 1}, True, False, "{{ x }}"),
    ]


def test_special_tokens_of_a_completion_can_be_left_out() -> None:
    client = FakeClient()
    ask(client, "POST", COMPLETIONS, json={"prompt": "a", "add_special_tokens": False})
    assert client.asked[0][1] == TextPrompt("a", add_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_if_asked_for(stream: bool) -> None:
    """The fake's ids of a text are 1 and the length of each word; of its answer 101, 102, .."""
    body = {"return_token_ids": True, "stream": stream, "n": 2}
    answer = ask(FakeClient(), "POST", COMPLETIONS, json={"prompt": ["ab c", "abc"], **body})
    replies = [json.loads(event) for event in events_of(answer)[:-1]] if stream else [answer.json()]
    ids: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}
    for choice in (choice for reply in replies for choice in reply["choices"]):
        ids[choice["index"]] = ids.get(choice["index"], []) + choice["token_ids"]
        prompts.setdefault(choice["index"], choice.get("prompt_token_ids"))
    assert ids == {0: [101, 102], 1: [101, 102], 2: [101], 3: [101]}
    assert prompts == {0: [2, 1], 1: [2, 1], 2: [3], 3: [3]}, "as many as the engine counts"

    answer = ask(FakeClient(), "POST", CHAT, json={"messages": MESSAGES, **body})
    replies = [json.loads(event) for event in events_of(answer)[:-1]] if stream else [answer.json()]
    assert [reply["prompt_token_ids"] for reply in replies if "prompt_token_ids" in reply] == [[3, 3]]
    for index in range(2):
        shown = [
            choice.get("token_ids", []) for reply in replies for choice in reply["choices"] if choice["index"] == index
        ]
        assert sum(shown, []) == [101, 102]


def test_fields_for_the_clients_own_records_change_nothing() -> None:
    client = FakeClient()
    records = {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}
    records |= {"prompt_cache_retention": "in_memory", "prompt_cache_options": {"ttl": "30m"}}
    neutral = {"store": False, "service_tier": "auto"}
    for more in ({}, records | neutral):
        assert ask(client, "POST", CHAT, json={"messages": MESSAGES, **more}).status_code == 200
    assert client.asked[0][1:] == client.asked[1][1:]


def test_documents_are_the_chat_templates() -> None:
    client, documents = FakeClient(), [{"title": "a", "text": "b"}]
    assert ask(client, "POST", CHAT, json={"messages": MESSAGES, "documents": documents}).status_code == 200
    (_, prompt, _) = client.asked[0]
    assert isinstance(prompt, ChatPrompt) and prompt.template_kwargs == {"documents": documents}
