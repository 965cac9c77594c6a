"""One call of the grid: clients that send its requests, and the speeds of their answers."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from overlap_spec.bench.methods import Tokens
from overlap_spec.client import Client
from overlap_spec.errors import OverlapSpecError
from overlap_spec.messages import SamplingParams, Stats

# Of one acceptance, which goes by seed + position: the other one's begin at 65536. Requests of equal seeds and lengths
# would guess right in step.
SEEDS, SEED_STEP = 65536 - 4096, 257
WAVES = 4  # requests of `arrivals` for each one that is answered at once
POLL_S = 0.01

Row = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """One call: so many requests at a time, `waves` for each. `seeds`: the first of each acceptance, by turns."""

    batch: int
    num_tokens: int
    waves: int = 1
    seeds: tuple[int, ...] = (0,)

    def all_seeds(self) -> list[int]:
        """Of its requests."""
        indices = range(self.batch * self.waves)
        return [self.seeds[index % len(self.seeds)] + index * SEED_STEP % SEEDS for index in indices]


@dataclass
class Progress:
    """How far an answer is. `marks`: tokens and time when a quarter of all had come, and when three had."""

    whole: int
    tokens: int = 0
    marks: list[tuple[int, float]] = field(default_factory=list)

    def add(self, count: int) -> None:
        self.tokens += count
        if len(self.marks) < 2 and self.tokens >= self.whole * (0.25, 0.75)[len(self.marks)]:
            self.marks.append((self.tokens, time.perf_counter()))

    def middle(self) -> tuple[int, float]:
        """Tokens and seconds between the marks. Raises: OverlapSpecError if they came as one."""
        (first, began), (last, ended) = self.marks
        if last == first:
            raise OverlapSpecError(f"half of {self.whole} tokens came at once: ask for longer answers")
        return last - first, ended - began


async def answer(client: Client, requests: Iterator[tuple[Tokens, SamplingParams]]) -> list[tuple[int, float]]:
    """One user, who sends the next request when an answer has ended. Returns the middle of each answer."""
    middles = []
    for prompt, sampling in requests:
        progress = Progress(sampling.max_new_tokens)
        async for delta in client.generate(prompt, sampling):
            progress.add(len(delta.token_ids))
        middles.append(progress.middle())
    return middles


async def at_rest(client: Client, num_requests: int = 0) -> Stats:
    """The engine's counts once it has reported that it had so many requests, and that nothing runs."""
    while (stats := await client.stats()).num_running or stats.requests_total < num_requests:
        await asyncio.sleep(POLL_S)
    return stats


async def run_cell(client: Client, load: Load, prompts: Sequence[Tokens]) -> Row:
    """Figures of one call."""
    sampling = SamplingParams(max_new_tokens=load.num_tokens, temperature=0.0, ignore_eos=True)
    indices = range(load.batch * load.waves)
    seeds = load.all_seeds()
    sent = iter([(prompts[index % len(prompts)], replace(sampling, seed=seeds[index])) for index in indices])
    before, begun = await at_rest(client), time.perf_counter()
    answers = await asyncio.gather(*(answer(client, sent) for _ in range(load.batch)))
    seconds = time.perf_counter() - begun
    after = await at_rest(client, before.requests_total + load.batch * load.waves)
    steps = after.decode_steps_total - before.decode_steps_total
    slots = after.verify_steps_total - before.verify_steps_total
    committed = after.committed_tokens_total - before.committed_tokens_total
    decode_s = after.decode_time_total - before.decode_time_total
    tokens, middles_s = map(sum, zip(*itertools.chain(*answers), strict=True))
    return {
        "call": round(load.batch * load.waves * load.num_tokens / seconds, 2),
        "answers": round(load.batch * tokens / middles_s, 2),
        "engine": round(committed / decode_s, 2),
        "step_ms": round(1000 * decode_s / steps, 4),
        "accept_length": round(committed / slots, 3),
    }
