"""Streams whose engine is disturbed while they are open, and what they are compared with."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest

from overlap_spec import Client, Engine, SamplingParams
from overlap_spec.client.answers import Delta
from overlap_spec.client.calls import Completion, completion_of
from overlap_spec.messages import EngineState, Grammar, GrammarKind, LogProbParams

Flags = dict[str, Any]
EngineOf = Callable[[Flags], Engine]
NUM_TOKENS = 40
DIGITS = Grammar(GrammarKind.REGEX, f"([a-f]{{2}}[0-9]+-?){{{NUM_TOKENS}}}")
KINDS: dict[str, Flags] = {  # what requests ask for, in turn
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 11},
    "penalties": {"seed": 12, "presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "log-probs": {"seed": 13, "log_probs": LogProbParams(top=2, prompt_from=0)},
    "grammar": {"seed": 14, "grammar": DIGITS, "ignore_eos": False},
    "filters": {"seed": 15, "top_k": 20, "top_p": 0.9, "min_new_tokens": NUM_TOKENS // 2},
    "stop": {"seed": 16, "stop": ("q", "zz")},
}
BASE: Flags = {"max_total_tokens": 40000, "recover": True, "max_recoveries": 100, "random_seed": 1}
PAIR = ("worker", "scheduler")
WATCHDOG_S, PATIENT_S = 6.0, 60.0  # an actor that is idle is probed every 2.5 s, and is not to be given up
EAGLE3: Flags = {"algorithm": "EAGLE3", "draft_model_path": "head"}


def set_watchdog(engine: Engine, timeout_s: float) -> None:
    assert engine._supervisor is not None
    engine._supervisor.watchdog._timeout_s = timeout_s


async def watch_one_death(engine: Engine) -> None:
    """Be impatient until an actor is given up: a step may take seconds on a busy machine, before that and after."""
    set_watchdog(engine, WATCHDOG_S)
    while engine.health.state is not EngineState.RECOVERING:
        await asyncio.sleep(0.02)
    set_watchdog(engine, PATIENT_S)


@dataclass(frozen=True)
class Disturbance:
    """What is done to an actor while streams are open."""

    role: str
    number: int = signal.SIGKILL

    def happen(self, engine: Engine) -> None:
        os.kill(engine.pids[self.role], self.number)


def asked(count: int) -> list[tuple[str, SamplingParams]]:
    """Prompts and parameters: all kinds in turn."""
    kinds = list(KINDS.values())
    base = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    return [(f"Number {i} is", SamplingParams(**base | kinds[i % len(kinds)])) for i in range(count)]


async def answers(engine: Engine, requests: Sequence[tuple[str, SamplingParams]]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.client.complete(*request) for request in requests)))


async def disturbed(
    engine: Engine,
    requests: Sequence[tuple[str, SamplingParams]],
    what: Disturbance,
    share: float,
    clients: Sequence[Client] = (),
    asks: bool = False,
) -> list[Completion]:
    """The same answers; an actor is killed or stopped once this share of the tokens has come.

    `clients`: they take turns in asking; without any, the engine's own asks. `asks`: a question is open when the actor
    dies, and is answered as before.
    """
    asking = cycle(clients or (engine.client,))
    left = share * NUM_TOKENS * len(requests)
    watching: list[asyncio.Task[None]] = []

    text = await engine.client.detokenize([5]) if asks else ""

    async def question() -> None:
        assert await engine.client.detokenize([5]) == text

    async def stream(prompt: str, sampling: SamplingParams) -> Completion:
        nonlocal left
        deltas: list[Delta] = []
        async for delta in next(asking).generate(prompt, sampling):
            deltas.append(delta)
            before, left = left, left - len(delta.token_ids)
            if before >= 0 > left:
                what.happen(engine)
                watching.append(asyncio.create_task(watch_one_death(engine)))
                if asks:
                    watching.append(asyncio.create_task(question()))
        return completion_of(deltas)

    found = await asyncio.gather(*(stream(*request) for request in requests))
    await asyncio.gather(*watching)
    return list(found)


def assert_same(found: Completion, wanted: Completion) -> None:
    """All but the counts of verify steps and cached tokens, which depend on how fast the draft was warm."""
    for name in ("token_ids", "text", "finish"):
        assert getattr(found, name) == getattr(wanted, name), name
    counts = [(answer.usage.prompt_tokens, answer.usage.completion_tokens) for answer in (found, wanted)]
    assert counts[0] == counts[1]
    for name in ("log_probs", "prompt_log_probs"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs], name
        pairs = [(a.log_prob, b.log_prob) for a, b in zip(ours, theirs, strict=True) if b.log_prob is not None]
        assert all(a == pytest.approx(b, abs=1e-9) for a, b in pairs), name


async def assert_nothing_is_left(engine: Engine) -> None:
    """No slot and no page is held, and the prefix cache is as good as before."""
    assert await engine.client.flush_cache()
    stats = await engine.client.stats()
    assert (stats.num_running, stats.num_queued, stats.num_used_tokens, stats.num_cached_tokens) == (0, 0, 0, 0)
    greedy = SamplingParams(max_new_tokens=4, temperature=0.0)
    prompt = "The same long beginning of a prompt, which fills some pages"
    first, second = [await engine.client.complete(prompt, greedy) for _ in range(2)]
    assert first.token_ids == second.token_ids
    assert first.usage.cached_tokens == 0 < second.usage.cached_tokens


@asynccontextmanager
async def quiet_audit(engine: Engine) -> AsyncIterator[None]:
    """Audits of what was served find no fault."""
    yield
    async with asyncio.timeout(60):
        while (report := await engine.client.audit()).figures.backlog:
            await asyncio.sleep(0.05)
    assert report.figures.requests and not report.figures.faults


async def same_streams(engine: Engine, count: int, disturbances: Sequence[Disturbance], rng: random.Random) -> None:
    """Disturb as many streams once for each, and compare."""
    requests = asked(count)
    set_watchdog(engine, PATIENT_S)
    wanted = await answers(engine, requests)
    for number, what in enumerate(disturbances, 1):
        first_worker = engine.facts.worker
        found = await disturbed(engine, requests, what, rng.uniform(0, 0.7))
        for ours, theirs in zip(found, wanted, strict=True):
            assert_same(ours, theirs)
        stats = await engine.client.stats()
        assert stats.recoveries_total == number and stats.replayed_total > 0
        assert engine.facts.worker.start_s != first_worker.start_s, "they are the new worker's"
    await assert_nothing_is_left(engine)
