"""One request at a time: what one user sees. Not here: load (`throughput.py`), and printing.

Every figure is taken at the client, through the whole engine. Accept length is committed tokens per verify
step, bonus included, the prefill's token not counted; each step's whole run counts, also the one a finish cut.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from overlap_spec.client import AnyPrompt, Client
from overlap_spec.messages import SamplingParams, Stats


@dataclass(frozen=True)
class RequestTimes:
    """One answer. Times in seconds from sending."""

    num_tokens: int
    first_token: float
    total: float
    verify_steps: int


async def measure_latency(client: Client, prompts: Sequence[AnyPrompt], sampling: SamplingParams) -> dict[str, Any]:
    """Send prompts one after another, the first one twice to warm up. Returns figures and one row per prompt."""
    await _one(client, prompts[0], sampling)
    before = await settled_stats(client)
    rows = [await _one(client, prompt, sampling) for prompt in prompts]
    after = await settled_stats(client)
    tokens, seconds = sum(row.num_tokens for row in rows), sum(row.total for row in rows)
    decode_seconds = sum(row.total - row.first_token for row in rows)
    decode_steps = sum(row.verify_steps or row.num_tokens - 1 for row in rows)
    return {
        "num_prompts": len(rows),
        "num_tokens": tokens,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 2),
        "step_ms": round(1000 * decode_seconds / max(decode_steps, 1), 4),
        "accept_length": round(accept_length(before, after), 4),
        "first_token_ms_median": round(1000 * statistics.median(row.first_token for row in rows), 3),
        "requests": [asdict(row) for row in rows],
    }


async def settled_stats(client: Client) -> Stats:
    """The counters once nothing runs: a request's last discarded step settles after its answer is complete."""
    while True:
        stats = await client.stats()
        await asyncio.sleep(0.2)
        again = await client.stats()
        if again.num_running == 0 and again.steps_total == stats.steps_total:
            return again


def accept_length(before: Stats, after: Stats) -> float:
    """Committed tokens per verify step between two reports; 0 without verify steps."""
    steps = after.verify_steps_total - before.verify_steps_total
    return (after.committed_tokens_total - before.committed_tokens_total) / steps if steps else 0.0


async def _one(client: Client, prompt: AnyPrompt, sampling: SamplingParams) -> RequestTimes:
    started = time.perf_counter()
    first, usage = 0.0, None
    async for delta in client.generate(prompt, sampling):
        if not first:
            first = time.perf_counter() - started
        usage = delta.usage
    assert usage is not None, "a request ends with a delta or an error"
    return RequestTimes(usage.completion_tokens, first, time.perf_counter() - started, usage.spec_verify_ct)
