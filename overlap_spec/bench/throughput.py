"""Batches of requests through the whole HTTP server. Not here: one user's latency (`latency.py`).

Step time is measured from outside, as other engines can be: one batched, non-streamed /generate of token ids,
less the same call with one token, over the largest verify count in the batch. The better of two runs counts and both
are reported. A streamed run of the same batch stands beside it.
"""

import asyncio
import http.client
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

TIMEOUT_S = 1200
NUM_RUNS = 2
FIRST_TOKEN_ANSWER = 8  # tokens of an answer whose first one is timed

Prompts = Sequence[list[int]]


async def measure_batch(host: str, port: int, prompts: Prompts, num_tokens: int) -> dict[str, Any]:
    """Run one batch size: warm up, then one token and all tokens, twice; then streamed. The top figures are the better
    run's."""
    await _generate(host, port, prompts, 2)
    runs = [await _run_batch(host, port, prompts, num_tokens) for _ in range(NUM_RUNS)]
    best = min(runs, key=lambda run: float(run["wall_s"]))
    streamed_wall = await asyncio.to_thread(_stream_all, host, port, prompts, num_tokens)
    return {
        "batch": len(prompts),
        **best,
        "streamed_tokens_per_second": round(best["num_tokens"] / streamed_wall, 1),
        "runs": runs,
    }


async def measure_first_token(host: str, port: int, prompts: Prompts) -> dict[str, Any]:
    """Time to first token of a streamed answer, one request at a time, each with a prompt that is new."""
    await asyncio.to_thread(_time_first_token, host, port, prompts[0])
    rows = [await asyncio.to_thread(_time_first_token, host, port, prompt) for prompt in prompts]
    return {
        "prompt_tokens": len(prompts[0]),
        "num_requests": len(rows),
        "first_token_ms_median": round(1000 * statistics.median(rows), 3),
        "first_token_ms_min": round(1000 * min(rows), 3),
        "first_token_ms_max": round(1000 * max(rows), 3),
    }


async def _run_batch(host: str, port: int, prompts: Prompts, num_tokens: int) -> dict[str, Any]:
    first_wall, _ = await _generate(host, port, prompts, 1)
    wall, answers = await _generate(host, port, prompts, num_tokens)
    metas = [answer["meta_info"] for answer in answers]
    tokens = sum(meta["completion_tokens"] for meta in metas)
    verify_counts = [meta.get("spec_verify_ct", 0) for meta in metas]
    steps = max(verify_counts) or max(meta["completion_tokens"] for meta in metas) - 1
    return {
        "num_tokens": tokens,
        "wall_s": round(wall, 4),
        "one_token_wall_s": round(first_wall, 4),
        "steps": steps,
        "step_ms": round(1000 * (wall - first_wall) / steps, 4),
        "tokens_per_second": round(tokens / wall, 1),
        "accept_length": round((tokens - len(prompts)) / sum(verify_counts), 3) if sum(verify_counts) else 0.0,
    }


async def _generate(host: str, port: int, prompts: Prompts, num_tokens: int) -> tuple[float, Any]:
    """One batched call. Returns wall seconds and the answers."""
    return await asyncio.to_thread(_post, host, port, _body(prompts, num_tokens, stream=False))


def _body(prompts: Prompts | list[int], num_tokens: int, stream: bool) -> bytes:
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return json.dumps({"input_ids": list(prompts), "sampling_params": sampling, "stream": stream}).encode()


def _ask(host: str, port: int, body: bytes) -> tuple[float, http.client.HTTPConnection, http.client.HTTPResponse]:
    """Send a body. Returns when it began, and what to read and to close. Raises: RuntimeError if it is refused."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    started = time.perf_counter()
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        payload = response.read()
        connection.close()
        raise RuntimeError(f"/generate answered {response.status}: {payload[:500]!r}")
    return started, connection, response


def _post(host: str, port: int, body: bytes) -> tuple[float, Any]:
    started, connection, response = _ask(host, port, body)
    payload = response.read()
    wall = time.perf_counter() - started
    connection.close()
    return wall, json.loads(payload)


def _stream_all(host: str, port: int, prompts: Prompts, num_tokens: int) -> float:
    """The same batch as one event stream. Returns wall seconds."""
    started, connection, response = _ask(host, port, _body(prompts, num_tokens, stream=True))
    while response.read(1 << 16):
        pass
    wall = time.perf_counter() - started
    connection.close()
    return wall


def _time_first_token(host: str, port: int, prompt: list[int]) -> float:
    """Seconds from sending to the first event; the answer is read to its end."""
    started, connection, response = _ask(host, port, _body(prompt, FIRST_TOKEN_ANSWER, stream=True))
    event = response.readline()
    first = time.perf_counter() - started
    response.read()
    connection.close()
    if not event.startswith(b"data: {") or b'"error"' in event[:20]:
        raise RuntimeError(f"/generate streamed no token but {event[:500]!r}")
    return first
