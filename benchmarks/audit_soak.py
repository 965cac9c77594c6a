"""Serves random prompts and has a share of the answers audited: near-ties and faults, as JSON.

    python benchmarks/audit_soak.py --tokens 1000000 --batch 32 --limit-s 170 --output FILE [engine flags]

It ends with status 1 if there is a fault. Half of the requests are greedy, half are drawn at temperature 1. FILE is
written every few seconds; `complete` is true once all tokens are served and all that was chosen is audited.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rows.setups import with_layers

from overlap_spec.bench.report import as_text, describe_engine, describe_settings
from overlap_spec.bench.workload import random_prompts
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.cli.flags import add_engine_flags, engine_config
from overlap_spec.messages import SamplingParams

ANSWER = 128  # tokens
EXAMPLES = 50  # of differences, in a report
REPORT_S = 5.0  # between reports
STOP_S = 10.0  # of the limit, to stop the engine in


def main() -> int:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens to serve")
    parser.add_argument("--batch", type=int, default=32, help="requests at a time")
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds for everything, start and end included")
    parser.add_argument("--output")
    parser.add_argument("--layers", type=int, help="of a shape, whose weights are drawn; otherwise all")
    add_engine_flags(parser)
    arguments = parser.parse_args()
    config = engine_config(arguments, audit_rate=1.0, log_level="warning")
    until = begun + arguments.limit_s - STOP_S
    with tempfile.TemporaryDirectory() as directory:
        config = with_layers(config, arguments.layers, directory)
        report = asyncio.run(soak(Engine(config), arguments, until))
    print(json.dumps(report, indent=1))
    return 1 if report["audit"]["figures"]["faults"] else 0


async def soak(stopped: Engine, arguments: argparse.Namespace, until: float) -> dict[str, Any]:
    """Serve and audit `until` a time. Returns the last report."""
    async with stopped as engine:
        run = Soak(engine, arguments.tokens, arguments.batch)
        work = asyncio.create_task(run.serve_and_audit())
        while not work.done():
            await asyncio.wait([work], timeout=max(min(REPORT_S, until - time.monotonic()), 0.0))
            if time.monotonic() >= until:
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
            report = await run.report()
            if arguments.output:
                write_whole(Path(arguments.output), report)
        if not work.cancelled():
            work.result()
        return report


def write_whole(path: Path, report: dict[str, Any]) -> None:
    """A reader finds this report or the one before, never a part of one."""
    beside = path.with_suffix(".part")
    beside.write_text(as_text(report))
    os.replace(beside, path)


def with_few_differences(audit: dict[str, Any]) -> dict[str, Any]:
    """A report whose newest differences are examples: all are counted."""
    return {**audit, "recent": audit["recent"][:EXAMPLES]}


class Soak:
    """One run, and how far it is."""

    def __init__(self, engine: Engine, num_tokens: int, batch: int) -> None:
        self._engine = engine
        self._described = {**describe_engine(engine), **describe_settings(engine)}
        self._num_tokens = num_tokens
        self._batch = batch
        self._begun = time.monotonic()
        self._served = 0
        self._served_at: float | None = None
        self._complete = False

    async def serve_and_audit(self) -> None:
        """Serve all tokens, `batch` requests at a time, then wait for the audits. Cancellation: ends where it is."""
        prompts = itertools.cycle(random_prompts(512, self._engine.settings.model.files.vocab_size))
        numbered = zip(itertools.count(), prompts, strict=False)
        await asyncio.gather(*(self._client(numbered) for _ in range(self._batch)))
        self._served_at = time.monotonic()
        while (await self._engine.client.audit()).figures.backlog:
            await asyncio.sleep(0.1)
        self._complete = True

    async def _client(self, numbered: "zip[tuple[int, Any]]") -> None:
        while self._served < self._num_tokens:
            seed, prompt = next(numbered)
            sampling = SamplingParams(max_new_tokens=ANSWER, temperature=float(seed % 2), seed=seed, ignore_eos=True)
            answer = await self._engine.client.complete(prompt, sampling)
            self._served += len(answer.token_ids)  # read after the wait: others have added to it

    async def report(self) -> dict[str, Any]:
        """What is known now."""
        now, client = time.monotonic(), self._engine.client
        served_at = now if self._served_at is None else self._served_at
        return {
            "benchmark": "audit_soak",
            **self._described,
            "complete": self._complete,
            "batch": self._batch,
            "served_tokens": self._served,
            "serving_s": served_at - self._begun,
            "audits_s": now - served_at,
            "accept_length": (await client.stats()).accept_length,
            "audit": with_few_differences((await client.audit()).as_json()),
        }


if __name__ == "__main__":
    sys.exit(main())
