"""Measures batches of requests through the whole HTTP server.

Step time is measured from outside, as for other engines: the time of one batched, non-streamed /generate of token ids,
minus the smallest of three such calls for one token, divided by the largest verify count in the batch. The better of
two runs counts; the report has both, and a streamed run of the same batch. Sampling comes after that, one run for each
way of sampling. Before every call the engine's caches are emptied, the log of n-grams included, so that no call
finds an earlier call's answers.
"""

import asyncio
import http.client
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from overlap_spec.bench.workload import GREEDY, SamplingMode

TIMEOUT_S = 1200
SETTLE_S = 10.0  # timeout for the last step to settle after the answers are complete
POLL_S = 0.005
NUM_RUNS = 2
NUM_SAMPLED_RUNS = 1
NUM_ONE_TOKEN_CALLS = 3
WARM_UP_TOKENS = 24
FIRST_TOKEN_ANSWER = 8  # tokens of an answer whose first one is timed

Prompts = Sequence[list[int]]
Json = dict[str, Any]


@dataclass(frozen=True)
class Endpoint:
    """The measured server. `clock`: seconds; only differences count."""

    host: str
    port: int
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class Batch:
    """The measured prompts, with `num_tokens` per answer. `warm_up`: as many unmeasured prompts of the same lengths."""

    prompts: Prompts
    warm_up: Prompts
    num_tokens: int


async def measure_batch(endpoint: Endpoint, batch: Batch, sampled: Sequence[SamplingMode] = ()) -> Json:
    """Measure one batch size: greedy runs, then a streamed run, then a run for each of `sampled`.

    The top-level figures are those of the better greedy run.
    """
    greedy = await measure_steps(endpoint, batch, GREEDY, NUM_RUNS)
    streamed_wall = await asyncio.to_thread(_stream_all, endpoint, batch)
    figures = {
        "batch": len(batch.prompts),
        **greedy,
        "streamed_tokens_per_second": round(greedy["num_tokens"] / streamed_wall, 1),
    }
    if sampled:
        figures["sampled"] = [
            {**asdict(way), **await measure_steps(endpoint, batch, way, NUM_SAMPLED_RUNS)} for way in sampled
        ]
    return figures


async def measure_first_token(endpoint: Endpoint, prompts: Prompts, warm_up: Prompts) -> Json:
    """Time to first token of streamed answers, one request at a time, after the requests of `warm_up`."""
    for prompt in warm_up:
        await asyncio.to_thread(_time_first_token, endpoint, prompt)
    rows = [await asyncio.to_thread(_time_first_token, endpoint, prompt) for prompt in prompts]
    return {
        "prompt_tokens": len(prompts[0]),
        "num_requests": len(rows),
        "first_token_ms_median": round(1000 * statistics.median(rows), 3),
        "first_token_ms_min": round(1000 * min(rows), 3),
        "first_token_ms_max": round(1000 * max(rows), 3),
    }


async def measure_steps(
    endpoint: Endpoint, batch: Batch, sampling: SamplingMode = GREEDY, num_runs: int = NUM_RUNS
) -> Json:
    """Warm up, make the one-token calls, then the runs. The top-level figures are those of the better run."""
    await answer_batch(endpoint, batch.warm_up, WARM_UP_TOKENS, sampling)
    walls = [(await answer_batch(endpoint, batch.prompts, 1, sampling))[0] for _ in range(NUM_ONE_TOKEN_CALLS)]
    runs = []
    for _ in range(num_runs):
        wall, metas = await answer_batch(endpoint, batch.prompts, batch.num_tokens, sampling)
        runs.append(_figures(metas, wall, min(walls)))
    best = min(runs, key=lambda run: float(run["wall_s"]))
    return {**best, "one_token_walls_s": [round(wall, 5) for wall in walls], "runs": runs}


def _figures(metas: Sequence[Json], wall: float, one_token_wall: float) -> Json:
    """Figures of one run. `metas`: each answer's `meta_info`; walls in seconds."""
    tokens = sum(meta["completion_tokens"] for meta in metas)
    verify_counts = [meta.get("spec_verify_ct", 0) for meta in metas]
    steps = max(verify_counts) or max(meta["completion_tokens"] for meta in metas) - 1
    return {
        "num_tokens": tokens,
        "wall_s": round(wall, 4),
        "one_token_wall_s": round(one_token_wall, 5),
        "steps": steps,
        "step_ms": round(1000 * (wall - one_token_wall) / steps, 4),
        "tokens_per_second": round(tokens / wall, 1),
        "accept_length": round((tokens - len(metas)) / sum(verify_counts), 3) if sum(verify_counts) else 0.0,
    }


async def answer_batch(
    endpoint: Endpoint, prompts: Prompts, num_tokens: int, sampling: SamplingMode = GREEDY
) -> tuple[float, list[Json]]:
    """One batched call with empty caches. Returns wall seconds and each answer's `meta_info`."""
    body = _body(prompts, num_tokens, sampling, stream=False)
    wall, answers = await asyncio.to_thread(_post, endpoint, body)
    return wall, [answer["meta_info"] for answer in answers]


def _body(prompts: Prompts, num_tokens: int, sampling: SamplingMode, stream: bool) -> bytes:
    """The request body of a batch; each row has its own seed."""
    rows = [
        {**asdict(sampling), "sampling_seed": row, "max_new_tokens": num_tokens, "ignore_eos": True}
        for row in range(len(prompts))
    ]
    return json.dumps({"input_ids": list(prompts), "sampling_params": rows, "stream": stream}).encode()


def _flush(endpoint: Endpoint) -> None:
    """Empty the engine's caches. Raises: RuntimeError if it stays busy."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=TIMEOUT_S)
        connection.request("POST", "/flush_cache")
        response = connection.getresponse()
        payload = response.read()
        connection.close()
        if response.status == 200:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"/flush_cache answered {response.status} for {SETTLE_S:.0f} s: {payload[:500]!r}")
        time.sleep(POLL_S)


def _ask(endpoint: Endpoint, body: bytes) -> tuple[float, http.client.HTTPConnection, http.client.HTTPResponse]:
    """Empty the caches and send a body. Returns the start time, the connection and the response.

    Raises: RuntimeError if it is refused.
    """
    _flush(endpoint)
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=TIMEOUT_S)
    started = endpoint.clock()
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        payload = response.read()
        connection.close()
        raise RuntimeError(f"/generate answered {response.status}: {payload[:500]!r}")
    return started, connection, response


def _post(endpoint: Endpoint, body: bytes) -> tuple[float, Any]:
    started, connection, response = _ask(endpoint, body)
    payload = response.read()
    wall = endpoint.clock() - started
    connection.close()
    return wall, json.loads(payload)


def _stream_all(endpoint: Endpoint, batch: Batch) -> float:
    """The same batch as one event stream. Returns wall seconds."""
    body = _body(batch.prompts, batch.num_tokens, GREEDY, stream=True)
    started, connection, response = _ask(endpoint, body)
    while response.read(1 << 16):
        pass
    wall = endpoint.clock() - started
    connection.close()
    return wall


def _time_first_token(endpoint: Endpoint, prompt: list[int]) -> float:
    """Seconds from sending to the first event; the answer is read to its end."""
    started, connection, response = _ask(endpoint, _body([prompt], FIRST_TOKEN_ANSWER, GREEDY, stream=True))
    event = response.readline()
    first = endpoint.clock() - started
    response.read()
    connection.close()
    if not event.startswith(b"data: {") or b'"error"' in event[:20]:
        raise RuntimeError(f"/generate streamed no token but {event[:500]!r}")
    return first
