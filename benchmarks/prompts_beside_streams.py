"""What streams wait for while prompts are prefilled, and what the prompts wait for.

    python benchmarks/prompts_beside_streams.py --output benchmarks/results/prompts_beside_streams_h200.json
    python benchmarks/prompts_beside_streams.py --case smollm2 --max-gap-ms 25 --streams 4 --prompts 2000 --seconds 5

One engine for each `--max-gap-ms`; 0 stands for no bound. Two loads: some streams decode while a long prompt arrives,
which is sent alone first; and requests that arrive at random (prompts: lognormal, mean of the logarithm 6.6, sigma 1,
64 to 8,000 tokens; answers: 5 and 0.7, 16 to 600). Times are the client's, of the deltas that reach it.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from mixed_speculation import CASES, at_rest

from overlap_spec.bench.engines import describe_engine, describe_settings
from overlap_spec.bench.report import write_report
from overlap_spec.client import Client
from overlap_spec.config.fields import config_from
from overlap_spec.engine import Engine
from overlap_spec.messages import SamplingParams

ROOM = 4096  # positions of a stream
UNBOUNDED_MS = 1e6
BEGUN = 20  # tokens that every stream has before the prompt is sent

Row = dict[str, Any]


@dataclass
class Watched:
    """When a request was sent, and when its deltas came."""

    sent: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0

    async def follow(self, client: Client, prompt: Sequence[int], max_new: int) -> "Watched":
        """Read the answer to its end."""
        sampling = SamplingParams(max_new_tokens=max_new, temperature=0.0, seed=0, ignore_eos=True)
        async for delta in client.generate(prompt, sampling):
            if delta.token_ids:
                self.times.append(time.perf_counter())
                self.num_tokens += len(delta.token_ids)
        return self

    @property
    def first_ms(self) -> float:
        return 1000 * (self.times[0] - self.sent)

    @property
    def per_token_ms(self) -> float:
        return 1000 * (self.times[-1] - self.times[0]) / max(self.num_tokens - 1, 1)

    def longest_gap_ms(self, since: float = 0.0) -> float:
        return 1000 * max((b - a for a, b in pairwise(self.times) if b >= since), default=0.0)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 30_000) for _ in range(count)]


async def beside_streams(client: Client, num_streams: int, num_tokens: int, rng: random.Random) -> Row:
    """One long prompt: alone, then while streams decode."""
    await at_rest(client)
    alone = await Watched().follow(client, random_tokens(rng, num_tokens), 4)
    await at_rest(client)
    streams = [Watched() for _ in range(num_streams)]
    tasks = [asyncio.create_task(stream.follow(client, random_tokens(rng, 300), ROOM - 512)) for stream in streams]
    while any(stream.num_tokens < BEGUN for stream in streams):
        await asyncio.sleep(0.005)
    newcomer = await Watched().follow(client, random_tokens(rng, num_tokens), 4)
    decoding = sum(not task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "prompt": num_tokens,
        "streams": num_streams,
        "streams_at_the_end": decoding,
        "longest_gap_ms": round(max(stream.longest_gap_ms(newcomer.sent) for stream in streams), 2),
        "first_token_ms": round(newcomer.first_ms, 2),
        "alone_ms": round(alone.first_ms, 2),
        "over_alone": round(newcomer.first_ms / alone.first_ms, 4),
    }


async def arrivals(client: Client, rate: float, seconds: float) -> Row:
    """Requests at random times; the same ones in every engine."""
    await at_rest(client)
    rng, at, tasks, began = random.Random(1), 0.0, [], time.perf_counter()
    while (at := at + rng.expovariate(rate)) < seconds:
        prompt = random_tokens(rng, int(min(max(rng.lognormvariate(6.6, 1), 64), 8000)))
        max_new = int(min(max(rng.lognormvariate(5, 0.7), 16), 600))
        await asyncio.sleep(max(began + at - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(Watched().follow(client, prompt, max_new)))
    done = await asyncio.gather(*tasks)
    figures = {
        "first_token_ms": [each.first_ms for each in done],
        "per_token_ms": [each.per_token_ms for each in done],
        "gap_ms": [each.longest_gap_ms() for each in done],
    }
    return {"rate": rate, "requests": len(done), **{name: quantiles(values) for name, values in figures.items()}}


def quantiles(values: list[float]) -> dict[str, float]:
    ordered, last = sorted(values), len(values) - 1
    return {name: round(ordered[round(share * last)], 2) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1))}


async def measure(arguments: argparse.Namespace, max_gap_ms: float, report: Row) -> None:
    """Adds one engine's figures to the report."""
    lengths = [int(length) for length in arguments.prompts.split(",")]
    longest = max(*lengths, 8000) + ROOM
    bounds = {"context_length": longest, "max_running_requests": 64, "log_level": "warning", "audit_rate": 0}
    gap = {"max_gap_ms": max_gap_ms or UNBOUNDED_MS, "skip_tokenizer_init": True}
    async with Engine(config_from(CASES[arguments.case] | bounds | gap)) as engine:
        report["run"], report["settings"] = describe_engine(engine), describe_settings(engine)
        row: Row = {"max_gap_ms": max_gap_ms or None, "beside_streams": []}
        rng = random.Random(0)
        await beside_streams(engine.client, arguments.streams, lengths[0], rng)  # warms up, and corrects costs
        for _ in range(arguments.repeats):
            for length in lengths:
                row["beside_streams"].append(await beside_streams(engine.client, arguments.streams, length, rng))
        row["arrivals"] = await arrivals(engine.client, arguments.rate, arguments.seconds)
        report["rows"].append(row)
        print(row, flush=True)


async def measure_all(arguments: argparse.Namespace, report: Row) -> None:
    for max_gap_ms in arguments.max_gap_ms.split(","):
        await measure(arguments, float(max_gap_ms), report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--case", default="8b", choices=CASES)
    parser.add_argument("--max-gap-ms", default="0,25")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", default="16000,40000", help="their tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", type=float, default=16.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals")
    arguments = parser.parse_args()
    report: Row = {"benchmark": "prompts_beside_streams", "case": arguments.case, "rows": []}
    asyncio.run(measure_all(arguments, report))
    if arguments.output is not None:
        write_report(arguments.output, report)


if __name__ == "__main__":
    main()
