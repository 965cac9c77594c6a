"""Kills the worker of a serving engine in the midst of its streams, and measures how they go on.

    python benchmarks/recovery.py --streams 8 --num-tokens 1000 --output FILE [engine flags]

The same requests run undisturbed, twice, and then once for each kill. Half of them are greedy, half have seeds. Of
each kill the report has the pause of every stream (from the kill to the token after it), the phases of the new worker's
start, new files in Triton's cache (0: no kernel was compiled again), the GPU's memory before, at its least and after,
and which answers are those of the undisturbed run. Where the dtype rounds differently by batch, two undisturbed runs
differ as well: `undisturbed_again` tells.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rows.setups import with_layers

from overlap_spec.bench.report import describe_engine, describe_settings, write_report
from overlap_spec.bench.workload import random_prompts
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.cli.flags import add_engine_flags, engine_config
from overlap_spec.messages import SamplingParams

MEMORY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
KILL_AFTER = 0.3  # of a stream's tokens, on average
CACHE = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))


@dataclass
class Stream:
    """The tokens of one request, and when they came."""

    token_ids: list[int] = field(default_factory=list)
    came_at: list[float] = field(default_factory=list)

    def pause_after(self, when: float) -> float | None:
        """Seconds to the first token after its longest gap: what was under way still came. None if it had ended."""
        gaps = [(after - before, after) for before, after in pairwise(self.came_at) if after > when]
        return max(gaps)[1] - when if gaps else None


class Streams:
    """One run of all requests; the worker is killed once so many tokens have come, if ever."""

    def __init__(self, engine: Engine, arguments: argparse.Namespace, kill_after: float | None) -> None:
        self._engine = engine
        self._num_tokens = arguments.num_tokens
        prompts = random_prompts(arguments.streams, engine.settings.model.files.vocab_size)
        self._prompts = list(prompts)[: arguments.streams]
        total = arguments.num_tokens * len(self._prompts)
        self._left = None if kill_after is None else kill_after * total
        self.killed_at = 0.0
        self.streams = [Stream() for _ in self._prompts]

    async def run(self) -> list[Stream]:
        """All at once, to their ends."""
        await asyncio.gather(*(self._follow(*each) for each in enumerate(self._prompts)))
        return self.streams

    async def _follow(self, number: int, prompt: Any) -> None:
        stream, sampled = self.streams[number], number % 2
        sampling = SamplingParams(
            max_new_tokens=self._num_tokens, temperature=0.8 * sampled, seed=number, ignore_eos=True
        )
        async for delta in self._engine.generate(prompt, sampling):
            stream.came_at.append(time.monotonic())
            stream.token_ids += delta.token_ids
            self._count(len(delta.token_ids))

    def _count(self, new: int) -> None:
        if self._left is None:
            return
        self._left -= new
        if self._left <= 0:
            self._left = None
            self.killed_at = time.monotonic()
            os.kill(self._engine.pids["worker"], signal.SIGKILL)


def used_mib() -> int | None:
    """Of the first GPU; None without one."""
    try:
        done = subprocess.run(MEMORY, capture_output=True, text=True, timeout=20)
        return int(done.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


async def least_used_mib(seen: list[int]) -> None:
    """Ask again and again. Cancellation: ends."""
    while (used := await asyncio.to_thread(used_mib)) is not None:
        seen.append(used)


def cached_kernels() -> int:
    """Files in Triton's cache."""
    return sum(path.is_file() for path in CACHE.rglob("*"))


def same(found: list[Stream], wanted: list[Stream]) -> dict[str, Any]:
    """How many answers are equal, and where the others first differ."""
    pairs = [(ours.token_ids, theirs.token_ids) for ours, theirs in zip(found, wanted, strict=True)]
    first = [
        next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
        for ours, theirs in pairs
        if ours != theirs
    ]
    return {"equal": sum(ours == theirs for ours, theirs in pairs), "of": len(pairs), "first_difference_at": first}


async def one_kill(engine: Engine, arguments: argparse.Namespace, wanted: list[Stream], share: float) -> dict[str, Any]:
    """Figures of one kill, once the last answer has ended."""
    kernels, before, seen = cached_kernels(), used_mib(), list[int]()
    run = Streams(engine, arguments, share)
    watching = asyncio.create_task(least_used_mib(seen))
    found = await run.run()
    watching.cancel()
    stats = await engine.client.stats()
    pauses = [pause for stream in found if (pause := stream.pause_after(run.killed_at)) is not None]
    return {
        "open_streams": len(pauses),
        "pause_s": [round(pause, 3) for pause in sorted(pauses)],
        "recovery_s": stats.last_recovery,
        "recoveries": stats.recoveries_total,
        "replayed": stats.replayed_total,
        "worker_start_s": engine.facts.worker.start_s,
        "new_files_in_kernel_cache": cached_kernels() - kernels,
        "gpu_used_mib": {"before": before, "least": min(seen, default=None), "after": used_mib()},
        "answers": same(found, wanted),
    }


async def measure(arguments: argparse.Namespace, stopped: Engine) -> dict[str, Any]:
    """Start, run undisturbed twice, and once for each kill."""
    async with stopped as engine:
        report = {"benchmark": "recovery", **describe_engine(engine), **describe_settings(engine)}
        report |= {"streams": arguments.streams, "num_tokens": arguments.num_tokens}
        report["first_start_s"] = engine.facts.worker.start_s
        wanted = await Streams(engine, arguments, None).run()
        report["undisturbed_again"] = same(await Streams(engine, arguments, None).run(), wanted)
        report["kills"] = []
        for number in range(arguments.kills):
            share = KILL_AFTER * (number + 1) / ((arguments.kills + 1) / 2)
            report["kills"].append(await one_kill(engine, arguments, wanted, share))
            print(json.dumps(report["kills"][-1]), flush=True)
            if arguments.output:
                write_report(arguments.output, report)
        return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--num-tokens", type=int, default=1000, help="of each answer")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=170.0, help="seconds for everything; then it fails")
    parser.add_argument("--output")
    parser.add_argument("--layers", type=int, help="of a shape, whose weights are drawn; otherwise all")
    add_engine_flags(parser)
    arguments = parser.parse_args()
    config = engine_config(arguments, recover=True, max_recoveries=100, audit_rate=0.0, log_level="warning")
    with tempfile.TemporaryDirectory() as directory:
        config = with_layers(config, arguments.layers, directory)
        asyncio.run(asyncio.wait_for(measure(arguments, Engine(config)), arguments.limit_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
