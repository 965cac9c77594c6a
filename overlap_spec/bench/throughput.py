"""A batch of requests through the whole HTTP server. Not here: one user's latency (`latency.py`).

Step time is measured from outside, as other engines can be: one batched, non-streamed /generate of token ids,
less the same call with one token, over the largest verify count in the batch. A streamed run of the same batch
stands beside it.
"""

import asyncio
import http.client
import json
import time
from collections.abc import Sequence
from typing import Any

TIMEOUT_S = 1200


async def measure_batch(host: str, port: int, prompts: Sequence[list[int]], num_tokens: int) -> dict[str, Any]:
    """Run one batch size: warm up, one token, all tokens, streamed."""
    await _generate(host, port, prompts, 2)
    first_wall, _ = await _generate(host, port, prompts, 1)
    wall, answers = await _generate(host, port, prompts, num_tokens)
    metas = [answer["meta_info"] for answer in answers]
    tokens = sum(meta["completion_tokens"] for meta in metas)
    verify_counts = [meta.get("spec_verify_ct", 0) for meta in metas]
    steps = max(verify_counts) or max(meta["completion_tokens"] for meta in metas) - 1
    streamed_wall = await asyncio.to_thread(_stream_all, host, port, prompts, num_tokens)
    return {
        "batch": len(prompts),
        "num_tokens": tokens,
        "wall_s": round(wall, 4),
        "one_token_wall_s": round(first_wall, 4),
        "step_ms": round(1000 * (wall - first_wall) / steps, 4),
        "tokens_per_second": round(tokens / wall, 1),
        "accept_length": round((tokens - len(prompts)) / sum(verify_counts), 3) if sum(verify_counts) else 0.0,
        "streamed_tokens_per_second": round(tokens / streamed_wall, 1),
    }


async def _generate(host: str, port: int, prompts: Sequence[list[int]], num_tokens: int) -> tuple[float, Any]:
    """One batched call. Returns wall seconds and the answers."""
    return await asyncio.to_thread(_post, host, port, _body(prompts, num_tokens, stream=False))


def _body(prompts: Sequence[list[int]], num_tokens: int, stream: bool) -> bytes:
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return json.dumps({"input_ids": list(prompts), "sampling_params": sampling, "stream": stream}).encode()


def _post(host: str, port: int, body: bytes) -> tuple[float, Any]:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    started = time.perf_counter()
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    payload = response.read()
    wall = time.perf_counter() - started
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"/generate answered {response.status}: {payload[:500]!r}")
    return wall, json.loads(payload)


def _stream_all(host: str, port: int, prompts: Sequence[list[int]], num_tokens: int) -> float:
    """The same batch as one event stream. Returns wall seconds."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    started = time.perf_counter()
    connection.request("POST", "/generate", _body(prompts, num_tokens, stream=True))
    response = connection.getresponse()
    while response.read(1 << 16):
        pass
    wall = time.perf_counter() - started
    connection.close()
    return wall
