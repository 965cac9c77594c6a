"""Measurements of `overlap-spec serve` as a process of its own: how long it takes to start, and many connections."""

import asyncio
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from overlap_spec.bench.runs import Endpoint, answer_batch
from overlap_spec.bench.traffic.arrivals import Arrival
from overlap_spec.bench.traffic.figures import Limits, figures_of
from overlap_spec.bench.traffic.processes import Target
from overlap_spec.bench.workload import random_prompts, warm_up_prompts
from overlap_spec.errors import OverlapSpecError
from rows.measure import played
from rows.results import Cell
from rows.setups import Flags, Scale

READY = b"ready\n"
URL = re.compile(rb"^curl (http://[^/]+)/")
STOP_S = 20.0
PROMPT, VOCAB = 128, 40_000  # tokens of a prompt, and ids that every model here has
TINY_VOCAB = 120
NUM_TURNS, WARM_UP_TOKENS = 2, 24
Introduce = Callable[[dict[str, Any]], None]  # takes what a server reports of itself
COMPILED = "TRITON_CACHE_DIR"  # kernels in CUDA C++ are compiled at every start
UNKEPT = "PYTHONDONTWRITEBYTECODE"  # where an image sets it, and has no bytecode, each process compiles torch's sources


@dataclass(frozen=True)
class Server:
    """A server that runs. `start_s`: from its process to its line `ready`."""

    url: str
    start_s: float

    async def info(self) -> dict[str, Any]:
        """What it reports of itself."""
        reply: dict[str, Any] = json.loads(await asyncio.to_thread(self._get, "/server_info"))
        return reply

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            body: bytes = reply.read()
        return body


@asynccontextmanager
async def serving(flags: Flags, environment: Mapping[str, str]) -> AsyncIterator[Server]:
    """A server on a free port, stopped at the end; Python keeps what it compiles, as it does for those who serve.

    Raises: OverlapSpecError if it does not start.
    """
    words = [word for name, value in flags.items() for word in _words(name, value)]
    command = (sys.executable, "-m", "overlap_spec", "serve", "--port", "0", *words)
    pipe = asyncio.subprocess.PIPE
    kept = {name: value for name, value in os.environ.items() if name != UNKEPT}
    begun = time.monotonic()
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, env=kept | environment)
    try:
        url = await _ready(process)
        yield Server(url, time.monotonic() - begun)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _words(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value is True else [flag, str(value)]


async def _ready(process: asyncio.subprocess.Process) -> str:
    """Read until the server is ready. Returns its URL."""
    assert process.stdout is not None
    url = b""
    while line := await process.stdout.readline():
        if found := URL.match(line):
            url = found[1]
        if line == READY:
            return url.decode()
    raise OverlapSpecError(f"the server did not start: status {await process.wait()}")


async def start_times(model: str, flags: Flags, introduce: Introduce) -> AsyncIterator[Cell]:
    """Row 13: the first start compiles all kernels into an empty cache, the second finds them there."""
    with tempfile.TemporaryDirectory(prefix="kernels-") as directory:
        for caches in ("cold", "warm"):
            async with serving(flags, {COMPILED: directory}) as server:
                info = await server.info()
                introduce(info)
                worker = info["worker"]
                facts = {"worker": worker["start_up"], "graphs": worker["graphs"]}
                yield Cell(13, f"{model} {caches}", server.start_s, facts)


async def crowds(flags: Flags, scale: Scale, introduce: Introduce) -> AsyncIterator[Cell]:
    """Row 11: streams over as many connections, and one batched request of as many prompts; the better of two each."""
    async with serving(flags, {}) as server:
        info = await server.info()
        introduce(info)
        vocab_size = TINY_VOCAB if flags.get("skip_tokenizer_init") else VOCAB
        target = Target(url=server.url, vocab_size=vocab_size, model=info["served_model_name"])
        for name, count in scale.connections.items():
            batched = await _batched(server, count, vocab_size, scale)
            turns = [await _streams(target, count, turn, scale) for turn in range(NUM_TURNS)]
            batched += await _batched(server, count, vocab_size, scale)
            best = max(turns, key=lambda each: float(each["tokens_per_second"]))
            facts = {"connections": count, "tokens_per_second": best["tokens_per_second"], "batched": max(batched)}
            ratio = float(best["tokens_per_second"]) / max(batched)
            yield Cell(11, f"{name} tok/s", ratio, {**facts, "batched_runs": batched, "runs": turns})
            yield Cell(11, f"{name} gap", best["gap_ms"]["p99"], {"connections": count, "gap_ms": best["gap_ms"]})


async def _batched(server: Server, count: int, vocab_size: int, scale: Scale) -> list[float]:
    """tok/s of one request with all prompts; a list of one."""
    parts = urlsplit(server.url)
    endpoint = Endpoint(parts.hostname or "", parts.port or 0)
    prompts = random_prompts(count, vocab_size)
    await answer_batch(endpoint, warm_up_prompts(prompts, vocab_size), WARM_UP_TOKENS)
    wall, _ = await answer_batch(endpoint, prompts, scale.answer)
    return [round(count * scale.answer / wall, 1)]


async def _streams(target: Target, count: int, turn: int, scale: Scale) -> dict[str, Any]:
    """All streams at once, from client processes. tok/s from the first request to the last token."""
    arrivals = [Arrival(at=0.0, prompt_len=PROMPT, output_len=scale.answer)] * count
    result = await played(target, arrivals, scale.client_processes, seed=turn)
    figures = figures_of(result, Limits())
    return {name: figures[name] for name in ("tokens_per_second", "gap_ms", "first_token_ms", "client")}
