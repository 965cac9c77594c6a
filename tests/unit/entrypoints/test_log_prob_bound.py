"""Choices x tokens x log-probs, counted over a whole request before any part of it is started."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from support.fake_engine_client import INFO, FakeClient, ask

from overlap_spec.client.link import pack_ids
from overlap_spec.entrypoints.http.body_fields import check_log_probs
from overlap_spec.errors import RequestError
from overlap_spec.messages import ChatPrompt, LogProbParams, Prompt, SamplingParams, TextPrompt, TokenPrompt

MAX_LEN = 1 << 17
LONG = replace(INFO, max_model_len=MAX_LEN)


def ids(count: int) -> TokenPrompt:
    return TokenPrompt(pack_ids(range(count)))


def check(prompts: Sequence[Prompt], most: int | None = 16, known: int = 0, **asked: Any) -> int:
    """Returns how many prompts had to be counted, each of `known` tokens."""
    counted: list[Prompt] = []

    async def prompt_ids(prompt: Prompt) -> Sequence[int]:
        counted.append(prompt)
        return range(known)

    keep = asked.pop("keep", None)
    sampling = SamplingParams(max_new_tokens=most, log_probs=LogProbParams(**asked), truncate_prompt_tokens=keep)
    asyncio.run(check_log_probs([(prompt, sampling) for prompt in prompts], MAX_LEN, prompt_ids))
    return len(counted)


def test_output_is_counted_for_every_choice() -> None:
    assert check([ids(5)] * 128, 780, top=20) == 0
    with pytest.raises(RequestError) as refused:
        check([ids(5)] * 128, 2048, top=20)
    assert refused.value.field == "log_probs"
    text = "log_probs: 128 answers x 2,048 tokens x 21 log-probs = 5,505,024: at most 2,097,152 are returned"
    assert str(refused.value).startswith(text)


def test_a_prompt_is_counted_where_its_log_probs_are_asked_for() -> None:
    prompts = [ids(10_000)] * 16
    assert check(prompts, top=20) == 0
    with pytest.raises(RequestError, match=r"16 answers x 10,016 tokens x 21"):
        check(prompts, top=20, prompt_from=0)
    assert check(prompts, top=20, prompt_from=9000) == 0


def test_texts_are_counted_only_if_they_may_be_too_long() -> None:
    text = TextPrompt("four" * 10_000)
    assert check([text] * 8, prompt_from=0, top=1) == 0, "40,000 tokens at the most"
    assert check([text] * 32, prompt_from=0, top=1, known=10_000) == 1, "choices of one prompt: counted once"
    with pytest.raises(RequestError, match="32 answers x 40,016 tokens x 2"):
        check([text] * 32, prompt_from=0, top=1, known=40_000)


def test_what_is_cut_off_is_not_counted() -> None:
    assert check([TextPrompt("a" * 1_000_000)] * 16, prompt_from=0, top=1, keep=1000) == 0


def test_a_conversation_is_counted_and_the_context_bounds_what_has_no_length() -> None:
    chat = ChatPrompt([{"role": "user", "content": "x"}])
    assert check([chat] * 4, prompt_from=0, top=20, most=100, known=50) == 1
    assert check([chat] * 3, most=None, top=4) == 0
    with pytest.raises(RequestError, match=r"4 answers x 131,0\d\d tokens x 5 log-probs = .* set max_tokens"):
        check([chat] * 4, most=None, top=4, known=50)


def test_a_batch_of_different_lengths_is_added_up() -> None:
    with pytest.raises(RequestError, match="log_probs: 300 answers = "):
        check([ids(count) for count in range(9000, 9300)], prompt_from=0)
    assert check([ids(count) for count in range(300, 600)], prompt_from=0, top=5) == 0


def test_what_lm_eval_sends_is_answered() -> None:
    """Prompts with echo, one log-prob and one token; the longest is the whole context."""
    for prompts in ([ids(MAX_LEN - 1)], [ids(2048)] * 64, [TextPrompt("word " * 2000)] * 32):
        assert check(prompts, 1, prompt_from=0, top=1) == 0


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 20}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "logprobs": 20, "stream": True}, "logprobs"),
        ("/v1/completions", {"prompt": [1] * 900, "prompt_logprobs": 20}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "x", "n": 1, "best_of": 128, "max_tokens": 20_000}, "best_of"),
        ("/v1/chat/completions", {"messages": [], "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": [], "logprobs": True, "max_tokens": 20_000}, "logprobs"),
        ("/generate", {"text": "x", "return_logprob": True, "top_logprobs_num": 20}, "return_logprob"),
    ],
)
def test_every_endpoint_names_its_field(path: str, body: dict[str, Any], field: str) -> None:
    client, many = FakeClient(), {"n": 128}
    if path == "/generate":
        body = {**body, "sampling_params": {**many, "max_new_tokens": 2048}}
    else:
        body = {"max_tokens": 2048, **many, **body}
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": "x"}]
    response = ask(client, "POST", path, LONG, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(f"{field}: 128 answers x ") and "at most 2,097,152" in error["message"]
    assert not client.asked, "nothing was started"
