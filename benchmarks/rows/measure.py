"""Measurements on an engine behind its HTTP server, which run in this process.

A step's time is either the engine's own (`decode_time_total` of its statistics: the device's time of decode steps and
its idle time before them), or measured from outside (`bench/runs.py`). Plain decoding has an engine of its own:
in one with explicit numbers, steps of requests that turn speculation off are as wide as any.
"""

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from overlap_spec.bench.runs import Batch, Endpoint, answer_batch, measure_steps
from overlap_spec.bench.traffic.arrivals import Arrival, conversations
from overlap_spec.bench.traffic.figures import answered
from overlap_spec.bench.traffic.processes import Load, Played, Running, Target, play_load
from overlap_spec.bench.workload import (
    GREEDY,
    chat_prompts,
    load_prompts,
    random_prompts,
    warm_up_prompts,
)
from overlap_spec.client import Client
from overlap_spec.engine import Engine
from overlap_spec.errors import OverlapSpecError
from overlap_spec.messages import SamplingParams, Stats
from rows.results import Cell
from rows.setups import Scale

POLL_S = 0.005
WARM_UP_ROW = 5000  # random prompts from here on are never measured
CHAIN, PLAIN = "chain", "plain"
GREEDILY: dict[str, float] = {"temperature": 0.0}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "T 0.7": {"temperature": 0.7},
    "T 0.6, top_p 0.9": {"temperature": 0.6, "top_p": 0.9},
    "T 0.7, top_p 0.8, top_k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "T 1, min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
}


@dataclass(frozen=True)
class Bench:
    """An engine that runs, and its server."""

    engine: Engine
    endpoint: Endpoint
    target: Target
    scale: Scale

    @property
    def client(self) -> Client:
        """Beside HTTP: statistics, and requests whose way does not matter."""
        return self.engine.client

    @property
    def way(self) -> str:
        """How the engine decodes."""
        return PLAIN if self.engine.config.speculative_algorithm == "NONE" else CHAIN

    @property
    def vocab_size(self) -> int:
        """Of random prompts."""
        return self.target.vocab_size


@dataclass(frozen=True)
class OwnSteps:
    """Decode steps by the engine's own statistics. Times in ms; `efficiency`: None where no ceiling is known."""

    steps: int
    step_ms: float
    efficiency: float | None


async def at_rest(client: Client) -> Stats:
    """Empty the caches once nothing runs. Returns the counters."""
    while not await client.flush_cache():
        await asyncio.sleep(POLL_S)
    return await client.stats()


def between(before: Stats, after: Stats) -> OwnSteps:
    """The decode steps between two reports."""
    steps = after.decode_steps_total - before.decode_steps_total
    seconds = after.decode_time_total - before.decode_time_total
    floor = after.decode_floor_total - before.decode_floor_total
    return OwnSteps(steps, round(1000 * seconds / steps, 4), round(floor / seconds, 4) if floor else None)


async def own_steps(bench: Bench, prompts: Sequence[list[int]], sampling: SamplingParams) -> OwnSteps:
    """Answer all prompts at once."""
    before = await at_rest(bench.client)
    await asyncio.gather(*(bench.client.complete(prompt, sampling) for prompt in prompts))
    return between(before, await at_rest(bench.client))


async def sampled_steps(bench: Bench) -> AsyncIterator[Cell]:
    """Row 1: sampled steps over greedy ones, all kinds in turns. A kind's graphs are captured in the first round."""
    for batch in bench.scale.batches.values():
        times = await _in_turns(bench, batch)
        greedy = statistics.median(times["greedy"])
        for name in SAMPLINGS:
            step = statistics.median(times[name])
            facts = {"batch": batch, "sampling": name, "step_ms": step, "greedy_ms": greedy}
            yield Cell(1, bench.way, step / greedy, {**facts, "runs": times[name], "greedy_runs": times["greedy"]})


async def _in_turns(bench: Bench, batch: int) -> dict[str, list[float]]:
    """Step times of every kind of sampling, by round; none of them is always the first."""
    kinds = {"greedy": GREEDILY} | SAMPLINGS
    names = list(kinds)
    prompts = random_prompts(batch, bench.vocab_size)
    num_tokens = bench.scale.plain_tokens if bench.way == PLAIN else bench.scale.chain_tokens
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(bench.scale.repeats + 1):
        for shift in range(len(names)):
            name = names[(turn + shift) % len(names)]
            found = await own_steps(bench, prompts, _fixed_length(num_tokens, kinds[name]))
            if turn:
                times[name].append(found.step_ms)
    return times


def _fixed_length(num_tokens: int, drawn: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, seed=7, **drawn)


async def played(target: Target, arrivals: Sequence[Arrival], num_processes: int = 1, seed: int = 0) -> Played:
    """Play arrivals from client processes. Raises: OverlapSpecError if a request fails."""
    result = await play_load(Load(target, arrivals, num_processes, seed), _to_its_end)
    if failed := [outcome for outcome in result.outcomes if outcome.error]:
        raise OverlapSpecError(f"{len(failed)} requests failed: {failed[0].error} {failed[0].detail}")
    return result


def _to_its_end(running: Running) -> str:
    return ""


async def long_contexts(bench: Bench) -> AsyncIterator[Cell]:
    """Rows 2 and 6: the first token of random prompts, one after another, and the steps of their answers after it."""
    scale = bench.scale
    await played(bench.target, [Arrival(at=0.0, prompt_len=64, output_len=8)], seed=WARM_UP_ROW)
    for name, length in scale.contexts.items():
        arrivals = [
            Arrival(
                at=0.0,
                id=str(index),
                after=str(index - 1) if index else "",
                prompt_len=length,
                output_len=scale.context_answer,
            )
            for index in range(scale.prompts_of[name])
        ]
        before = await at_rest(bench.client)
        result = await played(bench.target, arrivals)
        steps = between(before, await at_rest(bench.client))
        first = [each.first_token for each in answered(result.outcomes)]
        yield Cell(2, name, statistics.median(first), {"prompt_tokens": length, "runs": first})
        yield Cell(6, name, steps.step_ms, {"context": length, **asdict(steps)})


async def long_contexts_in_8_bits(bench: Bench) -> AsyncIterator[Cell]:
    """Row 16: what rows 2 and 6 are, on an engine with KV pages of 8 bits."""
    first: Cell | None = None
    async for cell in long_contexts(bench):
        if cell.row == 2:
            first = cell
        elif first is not None:
            yield Cell(16, cell.part, cell.value, cell.facts | {"first_token_ms": first.value})


def narrow_steps(weights: str) -> Callable[[Bench], AsyncIterator[Cell]]:
    """Row 17: greedy steps with weights of 8 or 4 bits."""

    async def measure(bench: Bench) -> AsyncIterator[Cell]:
        sampling = _fixed_length(bench.scale.chain_tokens, GREEDILY)
        for batch in bench.scale.batches.values():
            prompts = random_prompts(batch, bench.vocab_size)
            found = [await own_steps(bench, prompts, sampling) for _ in range(bench.scale.repeats + 1)][1:]
            step = statistics.median(each.step_ms for each in found)
            runs = [asdict(each) for each in found]
            yield Cell(17, f"{weights} {bench.way} {batch}", step, {"batch": batch, "weights": weights, "runs": runs})

    return measure


async def turn_of_a_conversation(bench: Bench) -> AsyncIterator[Cell]:
    """Row 7: every turn's prompt is the one before and new tokens; the median of all turns but the first."""
    scale, length = bench.scale, bench.scale.contexts["8k"]
    await at_rest(bench.client)
    arrivals = conversations(1, scale.turns, length, scale.turn_tokens, 16)
    result = await played(bench.target, arrivals, seed=1)
    later = [each.first_token for each in answered(result.outcomes) if each.outcome.tag != "turn 1"]
    facts = {"first_prompt_tokens": length, "new_tokens": scale.turn_tokens, "runs": later}
    yield Cell(7, "turn", statistics.median(later), facts)


def new_prompts(model: str) -> Callable[[Bench], AsyncIterator[Cell]]:
    """Row 15: one batched call for one token of each prompt, with empty caches; the median of several."""

    async def measure(bench: Bench) -> AsyncIterator[Cell]:
        chats = model == "SmolLM2" and bench.scale.chats
        for name, count in bench.scale.new_prompts[model].items():
            prompts = _chats(bench, count) if chats else random_prompts(count, bench.vocab_size)
            await answer_batch(bench.endpoint, warm_up_prompts(prompts, bench.vocab_size), 1)
            calls = [(await answer_batch(bench.endpoint, prompts, 1))[0] for _ in range(bench.scale.one_token_calls)]
            walls = [round(1000 * seconds, 3) for seconds in calls]
            facts = {"prompts": count, "prompt_tokens": sum(map(len, prompts)), "runs": walls}
            yield Cell(15, f"{model} {name}", statistics.median(walls), facts)

    return measure


def _chats(bench: Bench, count: int) -> list[list[int]]:
    return chat_prompts(bench.engine.config, load_prompts("peer64")[:count])


async def crowded_steps(bench: Bench) -> AsyncIterator[Cell]:
    """Row 10: from outside."""
    batch = _batch(bench, bench.scale.crowd, bench.scale.answer)
    figures = await measure_steps(bench.endpoint, batch, GREEDY)
    yield Cell(10, bench.way, figures["step_ms"], {"batch": bench.scale.crowd, **figures})


def _batch(bench: Bench, count: int, num_tokens: int) -> Batch:
    prompts = random_prompts(count, bench.vocab_size)
    return Batch(prompts, warm_up_prompts(prompts, bench.vocab_size), num_tokens)


def efficiency(model: str) -> Callable[[Bench], AsyncIterator[Cell]]:
    """Row 12: the floor of decode steps over their time, at batch 1 (`metrics/step_floor.py`)."""

    async def measure(bench: Bench) -> AsyncIterator[Cell]:
        sampling = _fixed_length(bench.scale.answer // 2, GREEDILY)
        prompts = random_prompts(1, bench.vocab_size)
        found = [await own_steps(bench, prompts, sampling) for _ in range(bench.scale.repeats + 1)][1:]
        shares = [each.efficiency for each in found if each.efficiency is not None]
        if not shares:
            raise OverlapSpecError("this device's ceilings are not known (metrics/step_floor.py)")
        runs = [asdict(each) for each in found]
        step = statistics.median(each.step_ms for each in found)
        yield Cell(12, f"{model} {bench.way}", statistics.median(shares), {"step_ms": step, "runs": runs})

    return measure
