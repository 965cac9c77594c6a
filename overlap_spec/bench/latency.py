"""Measures one request at a time: the latency that a single user sees.

Every figure is measured at the client, through the whole engine. Accept length is committed tokens per verify step,
bonus included, the prefill's token not counted. All committed tokens of a step count, even if the answer's end cuts
some of them off.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from msgspec.structs import replace

from overlap_spec.client import AnyPrompt, Client
from overlap_spec.errors import OverlapSpecError
from overlap_spec.messages import FinishKind, SamplingParams, Stats

WARM_UP_TOKENS = 24

Clock = Callable[[], float]  # seconds; only differences count


@dataclass(frozen=True)
class RequestTimes:
    """One answer. Times in seconds from sending. `ended`: it ended by itself, not at its limit of tokens."""

    num_tokens: int
    first_token: float
    total: float
    verify_steps: int
    ended: bool


async def measure_latency(
    client: Client,
    prompts: Sequence[AnyPrompt],
    sampling: SamplingParams,
    warm_up: AnyPrompt,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Send `warm_up`, which is not measured, then prompts one after another. Returns figures and one row per prompt."""
    few = replace(sampling, max_new_tokens=WARM_UP_TOKENS)
    await _one(client, warm_up, few, clock)
    before = await settled_stats(client)
    if not await client.flush_cache():
        raise OverlapSpecError("the engine is in use by others: its caches cannot be emptied")
    rows = [await _one(client, prompt, sampling, clock) for prompt in prompts]
    after = await settled_stats(client)
    return {
        **_figures(rows),
        "accept_length": round(accept_length(before, after), 4),
        "accepted_by_position": accepted_by_position(before, after),
        "requests": [asdict(row) for row in rows],
    }


def _figures(rows: Sequence[RequestTimes]) -> dict[str, Any]:
    decode_seconds = sum(row.total - row.first_token for row in rows)
    decode_steps = sum(row.verify_steps or row.num_tokens - 1 for row in rows)
    ended = [row for row in rows if row.ended]
    return {
        "num_prompts": len(rows),
        "num_tokens": sum(row.num_tokens for row in rows),
        "num_ended": len(ended),
        "seconds": round(sum(row.total for row in rows), 4),
        "tokens_per_second": _speed(rows),
        "ended_tokens_per_second": _speed(ended),
        "step_ms": round(1000 * decode_seconds / max(decode_steps, 1), 4),
        "first_token_ms_median": round(1000 * statistics.median(row.first_token for row in rows), 3),
    }


def _speed(rows: Sequence[RequestTimes]) -> float | None:
    """Tokens per second of these answers; None without any."""
    return round(sum(row.num_tokens for row in rows) / sum(row.total for row in rows), 2) if rows else None


async def settled_stats(client: Client) -> Stats:
    """The counters once no step is in flight: a request's last, discarded step settles after its answer is complete."""
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


def accepted_by_position(before: Stats, after: Stats) -> list[float]:
    """Of the verify steps between two reports, the share that accepted the first guess, the second one, and so on."""
    steps = max(after.verify_steps_total - before.verify_steps_total, 1)
    counts = zip_longest(after.accepted_per_position_total, before.accepted_per_position_total, fillvalue=0)
    return [round((now - then) / steps, 4) for now, then in counts]


async def _one(client: Client, prompt: AnyPrompt, sampling: SamplingParams, clock: Clock) -> RequestTimes:
    started = clock()
    first, last = 0.0, None
    async for delta in client.generate(prompt, sampling):
        if last is None:
            first = clock() - started
        last = delta
    assert last is not None and last.finish is not None, "a request ends with a delta or an error"
    ended = last.finish.kind is FinishKind.STOP
    return RequestTimes(last.usage.completion_tokens, first, clock() - started, last.usage.spec_verify_ct, ended)
