"""Several choices: their seeds, their order, what waits for what, usage, aborts; and messages as clients send them."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest
from support.fake_engine_client import INFO, FakeClient, ask, events_of, healthy

from overlap_spec.client.log_probs import TokenLogProb
from overlap_spec.config import SamplingDefaults
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.request_runner import Collected
from overlap_spec.entrypoints.openai.replies import best_answers
from overlap_spec.entrypoints.openai.requests import choice_seed
from overlap_spec.messages import ChatPrompt, LogProbParams, SamplingParams, Speculative

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES = [{"role": "user", "content": "one two three"}]


def test_choice_0_has_the_seed_itself_and_the_others_have_seeds_of_their_own() -> None:
    seeds = [choice_seed(seed, index) for seed in (-5, 0, 1, 2**62) for index in range(50)]
    assert seeds[::50] == [-5, 0, 1, 2**62]
    assert len(set(seeds)) == len(seeds)
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds)
    assert choice_seed(7, 1) == 2776804601523485429, "a seed of last year still gives the same answer"
    assert choice_seed(None, 3) is None


def test_every_choice_is_asked_for_once_with_its_seed() -> None:
    for path, body, params in (
        (CHAT, {"messages": MESSAGES}, {}),
        (COMPLETIONS, {"prompt": "one two three"}, {}),
        (GENERATE, {"text": "one two three", "sampling_params": {"n": 3, "seed": 11}}, None),
    ):
        client = FakeClient()
        more = {} if params is None else {"n": 3, "seed": 11}
        assert ask(client, "POST", path, json={**body, **more}).status_code == 200
        assert [sampling.seed for _, _, sampling in client.asked] == [choice_seed(11, index) for index in range(3)]
        assert len({name for name, _, _ in client.asked}) == 3


def test_choices_are_numbered_prompt_by_prompt_and_a_prompt_counts_once() -> None:
    reply = ask(FakeClient(), "POST", COMPLETIONS, json={"prompt": ["a b", "c"], "n": 2}).json()
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [
        (0, "a b"),
        (1, "a b"),
        (2, "c"),
        (3, "c"),
    ]
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    native = ask(FakeClient(), "POST", GENERATE, json={"text": "a b", "rid": "x", "sampling_params": {"n": 2}}).json()
    assert [(each["text"], each["meta_info"]["id"]) for each in native] == [("a b", "x_0"), ("a b", "x_1")]


@pytest.mark.parametrize("scores", [[-1.0, -0.5, -2.0, -0.5], [-math.inf, None, -1.0, -math.inf]])
def test_the_best_answers_come_best_first_and_equals_in_their_order(scores: list[float | None]) -> None:
    """A score is the mean of an answer's tokens: longer answers are not worse for it. None: no tokens."""
    answers = []
    for index, score in enumerate(scores):
        answer = Collected(Speculative())
        answer.text = str(index)
        each = [] if score is None else [score] * (index + 1)
        answer.log_probs = [TokenLogProb(7, log_prob, b"", [], []) for log_prob in each]
        answers.append(answer)
    ordered = sorted(range(4), key=lambda index: (-(-math.inf if scores[index] is None else scores[index]), index))
    assert [answer.text for answer in asyncio.run(best_answers(answers, 4, 3))] == [str(index) for index in ordered[:3]]
    by_prompt = [answer.text for answer in asyncio.run(best_answers(answers, 2, 1))]
    assert by_prompt == [str(min(pair, key=ordered.index)) for pair in ((0, 1), (2, 3))]
    assert asyncio.run(best_answers(answers, 2, 2)) == answers


def test_candidates_have_log_probs_only_to_be_ranked() -> None:
    for best_of, log_probs in ((3, LogProbParams()), (2, None)):
        client = FakeClient()
        reply = ask(client, "POST", COMPLETIONS, json={"prompt": "a b", "n": 2, "best_of": best_of, "seed": 5}).json()
        assert [sampling.log_probs for _, _, sampling in client.asked] == [log_probs] * best_of
        assert [sampling.seed for _, _, sampling in client.asked] == [choice_seed(5, i) for i in range(best_of)]
        assert len(reply["choices"]) == 2 and reply["usage"]["completion_tokens"] == 2 * best_of


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_streamed_choices_add_up_to_whole_ones(path: str) -> None:
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "one two three"}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, done = events_of(ask(FakeClient(), "POST", path, json={**body, "n": 3, **options}))
    assert done == "[DONE]"
    *chunks, last = [json.loads(event) for event in events]
    texts, ends = {0: "", 1: "", 2: ""}, {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content", "")
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"]
    assert texts == dict.fromkeys(range(3), "one two three")
    assert ends == dict.fromkeys(range(3), "stop")
    assert (last["choices"], last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == ([], 3, 9)
    roles = [chunk["choices"][0]["index"] for chunk in chunks if "role" in chunk["choices"][0].get("delta", {})]
    assert sorted(roles) == ([0, 1, 2] if path == CHAT else [])


def test_a_prompt_is_computed_by_its_first_choice() -> None:
    async def use(http: httpx.AsyncClient, client: FakeClient) -> None:
        body = {"prompt": ["one sleep", "sleep"], "n": 2, "rid": "r"}
        task = asyncio.create_task(http.post(COMPLETIONS, json=body))
        await until(lambda: len(client.asked) == 3)
        assert set(client.running) == {"r_0", "r_1", "r_2"}, "r_3 waits for r_2's first token"
        await http.post("/abort_request", json={"rid": "r"})
        reply = (await task).json()
        assert [choice["finish_reason"] for choice in reply["choices"]] == ["abort"] * 4
        assert not client.running

    with_app(use)


def test_one_choice_can_be_aborted_before_and_after_it_starts() -> None:
    async def use(http: httpx.AsyncClient, client: FakeClient) -> None:
        body = {"prompt": "one hang", "n": 2, "rid": "r"}
        task = asyncio.create_task(http.post(COMPLETIONS, json=body))
        await until(lambda: len(client.running) == 2)
        await http.post("/abort_request", json={"rid": "r_1"})
        await until(lambda: len(client.running) == 1)
        assert set(client.running) == {"r_0"} and not task.done()
        await http.post("/abort_request", json={"rid": "r_0"})
        assert [choice["finish_reason"] for choice in (await task).json()["choices"]] == ["abort"] * 2

        task = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "sleep", "n": 2, "rid": "q"}))
        await until(lambda: "q_0" in client.running)
        await http.post("/abort_request", json={"rid": "q_1"})
        await http.post("/abort_request", json={"rid": "q_0"})
        assert [choice["finish_reason"] for choice in (await task).json()["choices"]] == ["abort"] * 2
        assert "q_1" not in [name for name, _, _ in client.asked]

    with_app(use)


def test_an_error_of_the_first_choice_is_the_answer() -> None:
    client = FakeClient()
    reply = ask(client, "POST", COMPLETIONS, json={"prompt": "bad", "n": 3})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
    assert len(client.asked) == 1 and not client.running


def test_no_new_tokens_are_an_answer_where_the_api_has_it() -> None:
    client = FakeClient()
    ask(client, "POST", COMPLETIONS, json={"prompt": "a", "max_tokens": 0})
    ask(client, "POST", GENERATE, json={"text": "a", "sampling_params": {"max_new_tokens": 0}})
    assert [sampling.max_new_tokens for _, _, sampling in client.asked] == [0, 0]


def test_what_a_request_leaves_out_is_the_models() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, max_new_tokens=99)
    info = msgspec.structs.replace(INFO, sampling_defaults=defaults)
    client = FakeClient()
    ask(client, "POST", CHAT, info, json={"messages": MESSAGES, "top_k": None})
    ask(client, "POST", CHAT, info, json={"messages": MESSAGES, "temperature": 1.0, "top_k": -1, "max_tokens": 5})
    ask(client, "POST", COMPLETIONS, info, json={"prompt": "a"})
    ask(client, "POST", GENERATE, info, json={"text": "a"})
    assert [sampling for _, _, sampling in client.asked] == [
        SamplingParams(max_new_tokens=99, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05),
        SamplingParams(max_new_tokens=5, top_p=0.95, repetition_penalty=1.05),
        SamplingParams(max_new_tokens=16, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05),
        SamplingParams(),
    ]
    shown = ask(client, "GET", "/model_info", info).json()["preferred_sampling_params"]
    assert shown == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 99}


@pytest.mark.parametrize("arguments", ['{"city": "Rome", "days": [1, 2]}', {"city": "Rome", "days": [1, 2]}])
def test_calls_of_tools_reach_the_template_as_objects(arguments: object) -> None:
    """As langchain-openai sends a conversation after a tool was called."""
    call = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": arguments}}
    quiet = {"type": "function", "id": "c2", "function": {"name": "now", "arguments": ""}}
    messages = [
        {"role": "user", "content": "How is Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call, quiet]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "assistant", "tool_calls": None},
        {"role": "user", "content": "Thanks"},
    ]
    client = FakeClient()
    assert ask(client, "POST", CHAT, json={"messages": messages}).status_code == 200
    ((_, prompt, _),) = client.asked
    assert isinstance(prompt, ChatPrompt)
    assistant = prompt.messages[1]
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Rome", "days": [1, 2]}
    assert assistant["tool_calls"][1]["function"]["arguments"] == {}
    assert prompt.messages[3] == {"role": "assistant", "content": ""}


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


def with_app(use: Callable[[httpx.AsyncClient, FakeClient], Awaitable[None]]) -> None:
    async def inner() -> None:
        client = FakeClient()
        transport: Any = httpx.ASGITransport(create_app(client, INFO, healthy))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            await use(http, client)

    asyncio.run(inner())


def test_the_product_of_lists_and_answers_is_bounded_and_named() -> None:
    ids, schema = list(range(20_000)), {"type": "object", "description": "d" * 200_000}
    for path, body, field, n in (
        (COMPLETIONS, {"prompt": ["x"] * 400, "n": 3, "allowed_token_ids": ids}, "allowed_token_ids", 1200),
        (COMPLETIONS, {"prompt": ["x"] * 400, "guided_json": schema}, "guided_json", 400),
        (GENERATE, {"text": ["x"] * 1000, "sampling_params": {"allowed_token_ids": ids}}, "allowed_token_ids", 1000),
        (GENERATE, {"text": ["x"] * 400, "sampling_params": {"json_schema": schema}}, "json_schema", 400),
    ):
        client = FakeClient()
        reply = ask(client, "POST", path, json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, field) and not client.asked
        assert f"{field}: " in error["message"] and f"each of {n} answers" in error["message"], error["message"]
        assert "at most 67108864 are taken" in error["message"]


@pytest.mark.slow
def test_what_answers_share_is_no_reason_to_refuse_a_large_batch() -> None:
    biases = {str(i): 0.5 for i in range(256)}
    more = {"logit_bias": biases, "bad_words": [f"w{i}" for i in range(128)], "stop": ["z" * 1000] * 16}
    for path, body in (
        (COMPLETIONS, {"prompt": ["x"] * 2048, "max_tokens": 1, **more}),
        (GENERATE, {"text": ["x"] * 2048, "sampling_params": {"max_new_tokens": 1, **more}}),
    ):
        client = FakeClient()
        assert ask(client, "POST", path, json=body).status_code == 200 and len(client.asked) == 2048
