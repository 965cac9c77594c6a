"""SGLang's `/generate`: single and batched, whole and streamed, ids and aborts."""

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
from support.fake_engine_client import INFO, FakeClient, ask, events_of, healthy

from overlap_spec.config import ApiKeys
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.messages import SamplingParams, TokenPrompt

GENERATE = "/generate"


def generate(client: FakeClient | None = None, **body: Any) -> Any:
    response = ask(client or FakeClient(), "POST", GENERATE, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(**body: Any) -> list[dict[str, Any]]:
    *events, done = events_of(ask(FakeClient(), "POST", GENERATE, json={**body, "stream": True}))
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_whole() -> None:
    reply = generate(text="one two three", rid="me")
    assert reply["meta_info"].pop("e2e_latency") > 0
    assert reply == {
        "text": "one two three",
        "output_ids": [101, 102, 103],
        "meta_info": {
            "id": "me",
            "finish_reason": {"type": "stop", "matched": "</s>"},
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "cached_tokens": 1,
            "spec_verify_ct": 2,
            "spec_accept_length": 1.5,
        },
    }


def test_length_and_no_verify_step() -> None:
    meta = generate(input_ids=[7, 8], sampling_params={"max_new_tokens": 1})["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 1}
    assert meta["spec_verify_ct"] == 0
    assert "spec_accept_length" not in meta


def test_batches_are_lists_even_of_one() -> None:
    assert [each["text"] for each in generate(text=["a b", "c"])] == ["a b", "c"]
    assert [each["text"] for each in generate(input_ids=[[5], [6, 7]])] == ["<5>", "<6> <7>"]
    assert len(generate(text=["a"])) == 1
    client = FakeClient()
    replies = generate(client, input_ids=[[5], [6]], rid=["x", "y"], sampling_params=[{"top_k": 3}, {"top_k": 4}])
    assert [each["meta_info"]["id"] for each in replies] == ["x", "y"]
    assert sorted((name, sampling.top_k) for name, _, sampling in client.asked) == [("x", 3), ("y", 4)]
    assert [each["meta_info"]["id"] for each in generate(text=["a", "b"], rid="r")] == ["r_0", "r_1"]


def test_latencies_of_a_batch_are_each_ones_own() -> None:
    long, short = generate(FakeClient(step_s=0.05), text=["a b c d", "e"])
    assert long["meta_info"]["e2e_latency"] > short["meta_info"]["e2e_latency"] + 0.1


def test_sampling_reaches_the_engine() -> None:
    client = FakeClient()
    given = {"max_new_tokens": 5, "min_new_tokens": 1, "temperature": 0, "top_p": 0.5, "min_p": 0.5, "ignore_eos": True}
    given |= {"presence_penalty": 0.25, "frequency_penalty": -1.5, "repetition_penalty": 1.25}
    generate(client, input_ids=[7], sampling_params={**given, "sampling_seed": 11, "stop": "x", "stop_token_ids": [3]})
    generate(client, input_ids=[7], sampling_params={**given, "seed": 11, "stop": ["x"], "stop_token_ids": [3]})
    generate(client, input_ids=[7])
    want = SamplingParams(**{**given, "temperature": 0.0}, seed=11, stop=("x",), stop_token_ids=(3,))
    assert [sampling for _, _, sampling in client.asked] == [want, want, SamplingParams()]
    assert client.asked[0][1] == TokenPrompt(b"\7\0\0\0")


def test_rows_that_differ_in_their_seeds_are_each_as_they_would_be_alone() -> None:
    client = FakeClient()
    rows: list[Any] = [{"top_k": 3, "sampling_seed": row} for row in range(3)]
    rows += [{"top_k": 3, "seed": 7}, {"top_k": 3}, None, {"top_k": 4, "sampling_seed": 1}]
    rows += [{"top_k": top_k, "seed": 5, "unknown": 1 << 70} for top_k in (8, 9)]  # more than messages take
    generate(client, input_ids=[[5]] * len(rows), rid=[str(row) for row in range(len(rows))], sampling_params=rows)
    asked = {name: (sampling.top_k, sampling.seed) for name, _, sampling in client.asked}
    drawn = [(3, 0), (3, 1), (3, 2), (3, 7), (3, None), (-1, None), (4, 1), (8, 5), (9, 5)]
    assert [asked[str(row)] for row in range(len(rows))] == drawn


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"top_k": True, "seed": 2}, "top_k"),  # equal to 1 in Python
        ({"top_k": 1, "seed": True}, "seed"),
        ({"top_k": 1, "seed": 1 << 63}, "seed"),
        ({"top_k": 1, "seed": 3, "sampling_seed": 4}, "sampling_seed"),
        ({"top_k": 1, "seed": 3, "max_tokens": 4}, "max_tokens"),
    ],
)
def test_a_bad_row_is_refused_after_a_sound_one_that_is_like_it(row: dict[str, Any], field: str) -> None:
    body = {"input_ids": [[5], [6]], "sampling_params": [{"top_k": 1, "seed": 1}, row]}
    response = ask(FakeClient(), "POST", GENERATE, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_stream_is_cumulative_and_begins_with_one_token() -> None:
    events = stream(text="one two three")
    assert [event["text"] for event in events] == ["one", "one two", "one two three"]
    assert [event["output_ids"] for event in events] == [[101], [101, 102], [101, 102, 103]]
    assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 2, 3]
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons == [None, None, {"type": "stop", "matched": "</s>"}]
    assert all("index" not in event for event in events)


def test_batched_stream_has_an_index() -> None:
    events = stream(text=["a b", "c"])
    last = {event["index"]: event for event in events}
    assert {index: event["text"] for index, event in last.items()} == {0: "a b", 1: "c"}
    firsts = {event["index"]: event for event in reversed(events)}
    assert [event["meta_info"]["completion_tokens"] for event in firsts.values()] == [1, 1]


def test_abort_by_id_ends_that_request_with_what_it_has() -> None:
    async def inner() -> None:
        client = FakeClient()
        transport = httpx.ASGITransport(create_app(client, INFO, healthy))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:

            async def ask_for(**body: Any) -> httpx.Response:
                return await http.post(GENERATE, json=body)

            whole = asyncio.create_task(ask_for(text="one hang", rid="1"))
            other = asyncio.create_task(ask_for(text="one hang", rid="10"))
            batch = asyncio.create_task(ask_for(text=["one hang", "one sleep"], rid="pair", stream=True))
            while len(client.running) < 4:
                await asyncio.sleep(0)
            in_use = await ask_for(text="one", rid="1")
            assert (in_use.status_code, in_use.json()["error"]["param"]) == (400, "rid")
            assert (await http.post("/abort_request", json={"rid": "1"})).status_code == 200
            reply = (await whole).json()
            assert reply["text"] == "one"
            assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "on request"}
            assert not other.done()
            assert (await http.post("/abort_request", json={"rid": "pair"})).status_code == 200
            ended = [json.loads(event) for event in events_of(await batch)[:-1]]
            assert {event["index"] for event in ended if event["meta_info"]["finish_reason"]} == {0, 1}
            assert (await http.post("/abort_request", json={"rid": "unknown"})).status_code == 200
            assert client.cancelled[-1] == ("unknown", True, None)
            assert (await http.post("/abort_request", json={"abort_all": True})).status_code == 200
            assert (await other).json()["meta_info"]["finish_reason"]["type"] == "abort"
            assert not client.running
            assert (await ask_for(text="one", rid="1")).status_code == 200

    asyncio.run(inner())


KEYS = msgspec.structs.replace(INFO, keys=ApiKeys({"ka": "alice", "kb": "bob"}, "ko"))


def test_an_id_belongs_to_the_key_that_gave_it() -> None:
    async def inner() -> None:
        client = FakeClient()
        transport = httpx.ASGITransport(create_app(client, KEYS, healthy))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:

            async def post(key: str, path: str, **body: Any) -> httpx.Response:
                return await http.post(path, json=body, headers={"x-api-key": key})

            async def nightly(key: str, text: str = "one hang") -> asyncio.Task[httpx.Response]:
                before = len(client.running)
                task = asyncio.create_task(post(key, GENERATE, text=text, rid="nightly"))
                async with asyncio.timeout(5):
                    while len(client.running) == before:
                        await asyncio.sleep(0)
                return task

            def reason(reply: httpx.Response) -> str:
                meta = reply.json()["meta_info"]
                assert meta["id"] == "nightly", "as it was sent"
                return str(meta["finish_reason"]["type"])

            alices, bobs = await nightly("ka"), await nightly("kb")
            assert len(client.running) == 2, "side by side"
            assert {terms.key for terms in client.terms} == {"alice", "bob"}
            assert (await post("ka", GENERATE, text="one", rid="nightly")).status_code == 400, "twice of one key"
            assert (await post("kb", "/abort_request", rid="nightly")).status_code == 200
            assert reason(await bobs) == "abort" and not alices.done()
            for rid in ("nightly", "alice/nightly", "alice\nnightly"):
                assert (await post("kb", "/abort_request", rid=rid)).status_code == 200
            assert not alices.done()
            bobs = await nightly("kb")
            assert (await post("ko", "/abort_request", rid="nightly")).status_code == 200, "the operator: everyone's"
            assert [reason(await each) for each in (alices, bobs)] == ["abort", "abort"]
            assert not client.running

    asyncio.run(inner())


def test_without_an_operator_a_key_aborts_all_of_its_own_requests() -> None:
    async def inner(keys: ApiKeys) -> list[bool]:
        client = FakeClient()
        transport = httpx.ASGITransport(create_app(client, msgspec.structs.replace(INFO, keys=keys), healthy))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            tasks = []
            for key in keys.names:
                body = {"text": "one hang", "sampling_params": {"n": 2}}
                tasks.append(asyncio.create_task(http.post(GENERATE, json=body, headers={"x-api-key": key})))
            while len(client.running) < 2 * len(tasks):
                await asyncio.sleep(0)
            await http.post("/abort_request", json={"abort_all": True}, headers={"x-api-key": "kb"})
            await asyncio.sleep(0.05)
            done = [task.done() for task in tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return done

    assert asyncio.run(inner(ApiKeys({"ka": "alice", "kb": "bob"}))) == [False, True]
    assert asyncio.run(inner(ApiKeys({"ka": "team", "kb": "team"}))) == [True, True], "one name: one client"


def test_an_aborted_chat_ends_with_that_reason() -> None:
    async def inner() -> None:
        client = FakeClient()
        transport = httpx.ASGITransport(create_app(client, INFO, healthy))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            body = {"messages": [{"role": "user", "content": "one hang"}], "rid": "chat", "stream": True}
            task = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            while not client.running:
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
            await http.post("/abort_request", json={"rid": "chat"})
            *_, last, done = events_of(await task)
            assert done == "[DONE]"
            assert json.loads(last)["choices"][0]["finish_reason"] == "abort"

    asyncio.run(inner())
