"""Runs one method under one load: each of a number of users sends a prompt, reads the answer and sends the next.

Everything is timed at the client, prompts included. The engine's caches are emptied before every run, so a repeated
prompt finds nothing in them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from overlap_spec.bench.latency import accept_length
from overlap_spec.client import Client
from overlap_spec.errors import OverlapSpecError
from overlap_spec.messages import SamplingParams, Stats

SETTLE_S = 10.0  # timeout for the last step, whose tokens are dropped
POLL_S = 0.005

Tokens = list[int]


@dataclass(frozen=True)
class LoadRun:
    """Figures of one run, and the answer to each prompt, in the order of the prompts."""

    figures: dict[str, Any]
    answers: list[Tokens]


@dataclass(frozen=True)
class TimedAnswer:
    """One answer. Times in seconds from sending. `steps`: its number of decode steps."""

    token_ids: Tokens
    first_token: float
    total: float
    steps: int


async def run_load(client: Client, prompts: Sequence[Tokens], batch: int, sampling: SamplingParams) -> LoadRun:
    """Answer all prompts, `batch` at a time. `step_ms` is wall time per decode step, other requests' prefill included.

    Raises: as `Client.generate`, OverlapSpecError if the engine does not settle.
    """
    await _flush(client)
    before = await client.stats()
    answers: dict[int, TimedAnswer] = {}
    waiting = deque(enumerate(prompts))
    started = time.perf_counter()
    await asyncio.gather(*(_user(client, waiting, answers, sampling) for _ in range(batch)))
    wall = time.perf_counter() - started
    num_tokens = sum(len(answer.token_ids) for answer in answers.values())
    after = await _settled(client, before, num_tokens)
    steps = sum(answer.steps for answer in answers.values())
    decode_s = sum(answer.total - answer.first_token for answer in answers.values())
    figures = {
        "num_tokens": num_tokens,
        "wall_s": round(wall, 4),
        "tokens_per_second": round(num_tokens / wall, 2),
        "step_ms": round(1000 * decode_s / max(steps, 1), 4),
        "accept_length": round(accept_length(before, after), 4),
    }
    return LoadRun(figures, [answers[index].token_ids for index in range(len(prompts))])


async def warm_up(client: Client, prompts: Sequence[Tokens], sampling: SamplingParams) -> None:
    """Answer prompts that are never timed, all at once."""
    await asyncio.gather(*(_answer(client, prompt, sampling) for prompt in prompts))


def repeated(prompts: Sequence[Tokens], batch: int) -> Iterator[Tokens]:
    """All prompts, and the first ones again if there are fewer than a batch needs."""
    for index in range(max(batch, len(prompts))):
        yield prompts[index % len(prompts)]


def share_identical(answers: Sequence[Tokens], reference: Sequence[Tokens]) -> float:
    """The share of answers equal to the reference's token for token; `reference` has one per distinct prompt."""
    same = sum(answer == reference[index % len(reference)] for index, answer in enumerate(answers))
    return round(same / len(answers), 4)


async def _user(
    client: Client, waiting: deque[tuple[int, Tokens]], answers: dict[int, TimedAnswer], sampling: SamplingParams
) -> None:
    while waiting:
        index, prompt = waiting.popleft()
        answers[index] = await _answer(client, prompt, sampling)


async def _answer(client: Client, prompt: Tokens, sampling: SamplingParams) -> TimedAnswer:
    started = time.perf_counter()
    first, steps, token_ids = 0.0, 0, Tokens()
    async for delta in client.generate(prompt, sampling):
        first = first or time.perf_counter() - started
        token_ids += delta.token_ids
        steps = delta.usage.spec_verify_ct
    return TimedAnswer(token_ids, first, time.perf_counter() - started, steps or len(token_ids) - 1)


async def _flush(client: Client) -> None:
    """Empty the engine's caches. Raises: OverlapSpecError if it stays busy."""
    deadline = time.perf_counter() + SETTLE_S
    while not await client.flush_cache():
        await _wait(deadline)


async def _settled(client: Client, before: Stats, num_tokens: int) -> Stats:
    """The counters once they include all `num_tokens` tokens since `before` and no step is in flight."""
    deadline = time.perf_counter() + SETTLE_S
    while True:
        stats = await client.stats()
        if stats.num_running == 0 and stats.generation_tokens_total - before.generation_tokens_total >= num_tokens:
            return stats
        await _wait(deadline)


async def _wait(deadline: float) -> None:
    if time.perf_counter() > deadline:
        raise OverlapSpecError(f"the engine did not come to rest within {SETTLE_S:.0f} s")
    await asyncio.sleep(POLL_S)
