"""Further attacks on what is read from connections and bodies (rules 1, 2, 3 and 10)."""

import asyncio
import json
from typing import Any

from overlap_spec.entrypoints.http.request_body import MOST_ENTRIES
from support.attacks.attacker import Attacker
from support.attacks.case import Cases, all_the_same, answered, answered_or_refused, refused
from support.attacks.findings import HASHES
from support.attacks.servers import ADMIN_KEY

HTTP = Cases()
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


def head(attacker: Attacker, path: str, last: bytes, key: str | None = None) -> bytes:
    """Of a POST, to its end."""
    fields = "".join(f"{name}: {value}\r\n" for name, value in attacker.headers(key).items())
    lines = f"POST {path} HTTP/1.1\r\nHost: {attacker.host}\r\nContent-Type: application/json\r\n{fields}"
    return lines.encode() + last


@HTTP.add(1, servers=("ngram",))
async def pipelined_requests(attacker: Attacker) -> str:
    """Without a key, as fast as the server takes them."""
    one, answers = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 0
    async for _ in attacker.for_seconds():
        async with attacker.connection() as connection:
            reading = asyncio.create_task(connection.read(3.0))
            for _ in range(20):
                if not await connection.send(one * 2000):
                    break
            answers += (await reading).count(b"HTTP/1.1 401")
    assert answers, "no answer"
    return "401"


@HTTP.add(1, servers=("eagle3",))
async def conversation_of_100_000_messages(attacker: Attacker) -> str:
    body = {"messages": [{"role": "user", "content": "x"}] * 100_000, "max_tokens": 1}
    replies = [await attacker.post(path, body) for path in ("/v1/chat/completions", "/tokenize")]
    assert all(400 <= reply.status < 500 or reply.status == 200 for reply in replies), [r.short() for r in replies]
    return refused(replies[0], "")


@HTTP.add(1)
async def message_of_200_000_entries(attacker: Attacker) -> str:
    content = {f"k{i}": i for i in range(200_000)}
    body = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()
    outcomes = []
    async for _ in attacker.for_seconds():
        outcomes.append(refused(await attacker.post("/v1/chat/completions", body), "messages", str(MOST_ENTRIES)))
    return all_the_same(outcomes)


@HTTP.add(2)
async def extensions_of_chunks(attacker: Attacker) -> str:
    async for _ in attacker.for_seconds():
        async with attacker.connection() as connection:
            alive = await connection.send(head(attacker, "/v1/completions", CHUNKED))
            for _ in range(60):
                alive = alive and await connection.send((b"1;" + b"a" * 15_000 + b"\r\n \r\n") * 10)
            assert await connection.is_closed_within(15), "the connection stays open"
    return "the connection closed"


@HTTP.add(2, servers=("eagle3",))
async def small_chunks_after_a_404(attacker: Attacker) -> str:
    async for _ in attacker.for_seconds():
        async with attacker.connection() as connection:
            alive = await connection.send(head(attacker, "/no/such/path", CHUNKED))
            for _ in range(10):
                alive = alive and await connection.send(b"1\r\n \r\n" * 40_000)
            assert await connection.is_closed_within(15), "the connection stays open"
    return "the connection closed"


@HTTP.add(2, servers=("ngram",))
async def endless_body_after_a_413(attacker: Attacker) -> str:
    async for _ in attacker.for_seconds():
        async with attacker.connection() as connection:
            alive = await connection.send(head(attacker, "/v1/completions", b"Content-Length: 9000000000\r\n\r\n"))
            while alive:
                alive = await connection.send(b'{"a":[' * (1 << 14))
            assert await connection.is_closed_within(15), "the connection stays open"
    return "the connection closed"


def many_prompts(**more: Any) -> dict[str, Any]:
    return {"prompt": ["x"] * 2048, "max_tokens": 1, **more}


async def honest_prompts(attacker: Attacker) -> str:
    return answered(await attacker.post("/v1/completions", many_prompts()))


BIASES = {str(token): 0.5 for token in range(1000, 2024)}


async def honest_biases(attacker: Attacker) -> str:
    """Two batches of them: what runs at once is as much."""
    return answered(await attacker.complete(prompt=["x"] * 96, logit_bias=BIASES))


@HTTP.add(3, honest=honest_biases, bounds_peak=True, answer_mib=60, servers=("plain", "eagle3"))
async def biases_of_2_048_prompts(attacker: Attacker) -> str:
    reply = await attacker.post("/v1/completions", many_prompts(logit_bias=BIASES))
    if reply.status == 200:
        assert len(reply.json["choices"]) == 2048
    return answered_or_refused(reply, "logit_bias")


@HTTP.add(3, servers=("ngram",), honest=honest_prompts, bounds_peak=True, answer_mib=60)
async def large_schema_of_2_048_prompts(attacker: Attacker) -> str:
    schema = json.dumps({"type": "object", "description": "d" * 200_000, "maxProperties": 0})
    reply = await attacker.post("/v1/completions", many_prompts(json_schema=schema))
    return answered_or_refused(reply, "json_schema")


@HTTP.add(3, seconds=2, bounds_peak=True)
async def a_million_stop_tokens_of_128_choices(attacker: Attacker) -> str:
    return refused(await attacker.complete(n=128, stop_token_ids=[7] * 1_000_000), "stop_token_ids", "262144")


async def choices_of_a_long_prompt(attacker: Attacker) -> str:
    return answered(await attacker.complete(prompt=[HASHES] * 7500, n=128))


@HTTP.add(3, servers=("eagle3",), honest=choices_of_a_long_prompt, bounds_peak=True, answer_mib=20, pool_mib=340)
async def long_text_of_128_choices(attacker: Attacker) -> str:
    """480 kB, which are 7,500 tokens: the longest run of '#' that is not cut has 64."""
    reply = await attacker.complete(prompt="#" * 480_000, n=128)
    outcome = answered(reply)
    assert len(reply.json["choices"]) == 128
    return outcome


ENDPOINTS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/generate", "/tokenize", "/detokenize", "/abort_request"),
)


@HTTP.add(10, servers=("ngram",), seconds=2)
async def brackets_at_every_endpoint(attacker: Attacker) -> str:
    outcomes = []
    for path in ENDPOINTS:
        for body in (b"[" * 200_000, b'{"prompt":' + b"[" * 200_000, b'{"x":' * 100_000, b"[" * 5000 + b"]" * 5000):
            reply = await attacker.post(path, body)
            assert reply.status == 400, f"{path}: {reply.short()}"
            outcomes.append("400")
    return all_the_same(outcomes)


NUMBERS = (
    *("max_tokens", "seed", "n", "temperature", "top_k", "rid", "prompt", "ids", "timeout", "stop_token_ids", "user"),
    *("messages", "input", "text", "model", "max_output_tokens", "sampling_params", "speculative", "logit_bias"),
)


@HTTP.add(10, servers=("eagle3",), seconds=2)
async def long_numbers_at_every_endpoint(attacker: Attacker) -> str:
    good = {"prompt": "x", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "input": "x", "text": "x"}
    for path in ENDPOINTS:
        for name in NUMBERS:
            for long in (b"1" * 5000, b"-" + b"9" * 5000, b"1e" + b"9" * 5000, b'{"5":' + b"1" * 5000 + b"}"):
                others = json.dumps({key: value for key, value in good.items() if key != name}).encode()
                reply = await attacker.post(path, others[:-1] + b', "%s": %s}' % (name.encode(), long))
                assert 200 <= reply.status < 500, f"{path} {name}: {reply.short()}"
    long_text = "1" * 5000
    for path in ("/flush_cache?timeout=", "/ui/timeline?steps=", "/v1/models?limit=", "/metrics?x="):
        reply = await attacker.get(path + long_text, key=ADMIN_KEY)
        assert 200 <= reply.status < 500, f"{path}: {reply.short()}"
    for name in ("x-speculative-num-steps", "content-length", "x-request-id", "traceparent", "last-event-id"):
        reply = await attacker.get("/v1/models", headers={name: long_text})
        assert reply.status < 500, f"{name}: {reply.short()}"
    return "400"
