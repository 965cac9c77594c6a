"""Serves random prompts and has a share of the answers audited: near-ties and faults, as JSON.

    python benchmarks/audit_soak.py --tokens 1000000 --batch 32 --output FILE [engine flags]

It ends with status 1 if there is a fault. Half of the requests are greedy, half are drawn at temperature 1.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from typing import Any

from overlap_spec.bench.engines import describe_engine, describe_settings
from overlap_spec.bench.workload import random_prompts
from overlap_spec.cli.flags import add_engine_flags, engine_config
from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.messages import SamplingParams

ANSWER = 128  # tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens to serve")
    parser.add_argument("--batch", type=int, default=32, help="requests at a time")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds of audits after the last answer")
    parser.add_argument("--output")
    add_engine_flags(parser)
    arguments = parser.parse_args()
    config = engine_config(arguments, audit_rate=1.0, log_level="warning")
    report = asyncio.run(soak(config, arguments.tokens, arguments.batch, arguments.patience))
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.output:
        with open(arguments.output, "w") as file:
            file.write(text + "\n")
    return 1 if report["audit"]["figures"]["faults"] else 0


async def soak(config: EngineConfig, num_tokens: int, batch: int, most_s: float) -> dict[str, Any]:
    async with Engine(config) as engine:
        prompts = itertools.cycle(random_prompts(512, engine.settings.model.files.vocab_size))
        seeds, served = itertools.count(), 0

        async def client() -> None:
            nonlocal served
            while served < num_tokens:
                seed = next(seeds)
                sampling = SamplingParams(
                    max_new_tokens=ANSWER, temperature=float(seed % 2), seed=seed, ignore_eos=True
                )
                served += len((await engine.client.complete(next(prompts), sampling)).token_ids)

        begun = time.monotonic()
        await asyncio.gather(*(client() for _ in range(batch)))
        seconds = time.monotonic() - begun
        while (await engine.client.audit()).figures.backlog and time.monotonic() - begun < seconds + most_s:
            await asyncio.sleep(0.5)
        audit = await engine.client.audit()
        return {
            **describe_engine(engine),
            **describe_settings(engine),
            "batch": batch,
            "served_tokens": served,
            "serving_s": seconds,
            "audits_s": time.monotonic() - begun - seconds,
            "accept_length": (await engine.client.stats()).accept_length,
            "audit": audit.as_json(),
        }


if __name__ == "__main__":
    sys.exit(main())
