"""Log-probs in the shapes of each API, whole and streamed; the fake engine's numbers are known."""

import json
from typing import Any

import pytest
from support.fake_engine_client import FakeClient, ask, events_of

from overlap_spec.messages import LogProbParams

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES = [{"role": "user", "content": "one two three"}]


def asked(client: FakeClient) -> LogProbParams | None:
    return client.asked[-1][2].log_probs


def post(path: str, **body: Any) -> tuple[FakeClient, Any]:
    client = FakeClient()
    response = ask(client, "POST", path, json=body)
    assert response.status_code == 200, response.text
    return client, response.json()


def chunks_of(path: str, **body: Any) -> list[dict[str, Any]]:
    *events, done = events_of(ask(FakeClient(), "POST", path, json={**body, "stream": True}))
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_chat() -> None:
    client, reply = post(CHAT, messages=MESSAGES, logprobs=True, top_logprobs=3)
    assert asked(client) == LogProbParams(top=3)
    content = reply["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["one", " two", " three"]
    assert content[1] == {
        "token": " two",
        "logprob": -0.5,
        "bytes": list(b" two"),
        "top_logprobs": [
            {"token": "t0", "logprob": -0.25, "bytes": list(b"t0")},
            {"token": "t1", "logprob": -0.5, "bytes": list(b"t1")},
            {"token": "bytes:\\xe2", "logprob": -0.75, "bytes": [0xE2]},
        ],
    }


def test_chat_without_top_and_without_any() -> None:
    client, reply = post(CHAT, messages=MESSAGES, logprobs=True)
    assert asked(client) == LogProbParams()
    assert [entry["top_logprobs"] for entry in reply["choices"][0]["logprobs"]["content"]] == [[], [], []]
    client, reply = post(CHAT, messages=MESSAGES, logprobs=False, top_logprobs=0)
    assert asked(client) is None and reply["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("more", [{"logprobs": True, "top_logprobs": 2}, {"logprobs": True}])
def test_a_streamed_chat_has_the_entries_of_the_whole_one(more: dict[str, Any]) -> None:
    _, whole = post(CHAT, messages=MESSAGES, **more)
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks_of(CHAT, messages=MESSAGES, **more)]
    streamed = [entry for each in found if each is not None for entry in each["content"]]
    assert streamed == whole["choices"][0]["logprobs"]["content"]


def test_prompt_logprobs_of_a_chat() -> None:
    client, reply = post(CHAT, messages=MESSAGES, prompt_logprobs=1)
    assert asked(client) == LogProbParams(top=1, prompt_from=0)
    assert reply["prompt_logprobs"] == [
        None,
        {
            "7": {"logprob": -0.25, "rank": 1, "decoded_token": "t0"},
            "2": {"logprob": -3.0, "rank": None, "decoded_token": "say"},
        },
    ]
    assert reply["choices"][0]["logprobs"] is None


def test_a_completion_has_four_columns_of_equal_length() -> None:
    client, reply = post(COMPLETIONS, prompt="say one two", logprobs=2)
    assert asked(client) == LogProbParams(top=2)
    assert reply["choices"][0]["logprobs"] == {
        "tokens": ["say", " one", " two"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"t0": -0.25, "t1": -0.5, text: -0.5} for text in ("say", " one", " two")],
        "text_offset": [0, 3, 7],
    }


def test_echo_puts_the_prompt_first() -> None:
    client, reply = post(COMPLETIONS, prompt=[5, 6], logprobs=0, echo=True, max_tokens=1)
    assert asked(client) == LogProbParams(prompt_from=0)
    choice = reply["choices"][0]
    found = choice["logprobs"]
    assert choice["text"].startswith("5 6")
    assert found["token_logprobs"] == [None, -3.0, -0.5]
    assert found["top_logprobs"][:2] == [None, {"say": -3.0}]
    assert found["text_offset"] == [0, 3, 6] and found["tokens"][:2] == ["<s>", "say"]


def test_echo_alone_returns_text_alone() -> None:
    client, reply = post(COMPLETIONS, prompt="say one", echo=True)
    assert asked(client) is None
    assert reply["choices"][0]["text"] == "say onesay one" and reply["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("more", [{"echo": True}, {"n": 2}, {"echo": True, "n": 2}, {}])
def test_a_streamed_completion_has_the_columns_of_the_whole_one(more: dict[str, Any]) -> None:
    body = {"prompt": "say one two", "logprobs": 1, **more}
    _, whole = post(COMPLETIONS, **body)
    texts: dict[int, str] = {}
    columns: dict[int, dict[str, list[Any]]] = {}
    for chunk in chunks_of(COMPLETIONS, **body):
        (choice,) = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        for name, values in choice["logprobs"].items():
            columns.setdefault(choice["index"], {}).setdefault(name, []).extend(values)
    for choice in whole["choices"]:
        assert texts[choice["index"]] == choice["text"]
        assert columns[choice["index"]] == choice["logprobs"]


def test_prompt_logprobs_of_a_completion_and_tokens_as_ids() -> None:
    client, reply = post(COMPLETIONS, prompt="say one", logprobs=1, prompt_logprobs=2, return_tokens_as_token_ids=True)
    assert asked(client) == LogProbParams(top=2, prompt_from=0)
    choice = reply["choices"][0]
    assert choice["logprobs"]["top_logprobs"][0] == {"token_id:7": -0.25, "token_id:101": -0.5}
    assert choice["logprobs"]["tokens"] == ["token_id:101", "token_id:102"]
    assert list(choice["prompt_logprobs"][1]) == ["7", "8", "2"]


def test_generate() -> None:
    client, reply = post(
        GENERATE,
        text="say one",
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        token_ids_logprob=[4],
        return_text_in_logprobs=True,
    )
    assert asked(client) == LogProbParams(top=1, token_ids=(4,), prompt_from=0)
    meta = reply["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 1, "<s>"], [-3.0, 2, "say"]]
    assert meta["output_token_logprobs"] == [[-0.5, 101, "say"], [-0.5, 102, " one"]]
    assert meta["output_token_logprobs_length"] == 2
    assert meta["input_top_logprobs"] == [None, [[-0.25, 7, "t0"]]]
    assert meta["output_top_logprobs"] == [[[-0.25, 7, "t0"]], [[-0.25, 7, "t0"]]]
    assert meta["output_token_ids_logprobs"][0] == [[-9999.0, 4, ""]], "JSON has no infinity"
    assert meta["input_token_ids_logprobs"][0] is None


def test_generate_for_a_batch_and_in_a_stream() -> None:
    client, replies = post(
        GENERATE,
        text=["say one", "say two"],
        return_logprob=[True, False],
        top_logprobs_num=[2, 0],
        token_ids_logprob=[[3], None],
    )
    assert [sampling.log_probs for _, _, sampling in client.asked] == [LogProbParams(top=2, token_ids=(3,)), None]
    assert replies[0]["meta_info"]["input_token_logprobs"] == []
    assert replies[0]["meta_info"]["output_token_logprobs"] == [[-0.5, 101, None], [-0.5, 102, None]]
    assert "output_token_logprobs" not in replies[1]["meta_info"]
    events = chunks_of(GENERATE, text="say one", return_logprob=True)
    assert [event["meta_info"]["output_token_logprobs_length"] for event in events] == [1, 2], "events are cumulative"
