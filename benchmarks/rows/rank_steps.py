"""What is timed of an engine with ranks: steps of requests that are in step with each other, and first tokens."""

import asyncio
import time
from contextlib import aclosing

from overlap_spec.bench.workload import random_prompts
from overlap_spec.client import Client
from overlap_spec.messages import SamplingParams, Stats

POLL_S = 0.005


async def at_rest(client: Client, num_requests: int = 0) -> Stats:
    """The engine's counts, once it has had so many requests and has none. Its caches are empty then."""
    while not await client.flush_cache():
        await asyncio.sleep(POLL_S)
    while (stats := await client.stats()).num_running or stats.requests_total < num_requests:
        await asyncio.sleep(POLL_S)
    return stats


async def timed_steps(client: Client, batch: int, num_tokens: int, vocab_size: int) -> tuple[float, Stats]:
    """Milliseconds of a step while so many requests are answered in step with each other."""
    sampling = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, seed=7, ignore_eos=True)
    before = await at_rest(client)
    await asyncio.gather(*(client.complete(prompt, sampling) for prompt in random_prompts(batch, vocab_size)))
    after = await at_rest(client, before.requests_total + batch)
    steps = after.decode_steps_total - before.decode_steps_total
    return 1000 * (after.decode_time_total - before.decode_time_total) / steps, after


async def first_token(client: Client, prompt: list[int]) -> float:
    """Milliseconds until it comes."""
    await at_rest(client)
    begun = time.perf_counter()
    async with aclosing(client.generate(prompt, SamplingParams(max_new_tokens=1, temperature=0.0))) as deltas:
        async for _ in deltas:
            break
    return 1000 * (time.perf_counter() - begun)


def long_prompt(length: int, row: int, vocab_size: int) -> list[int]:
    return [(row * 7919 + place * 104729) % (vocab_size - 10) + 5 for place in range(length)]
