"""Whole benchmark runs: start engines, measure, compare within the run. Not here: single measurements, printing.

Speculation is always compared with the same engine without it, and on request with transformers, one after the
other on the same machine in the same run: figures of different runs are not divided by each other.
"""

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap_spec.bench.latency import measure_latency
from overlap_spec.bench.report import describe_run
from overlap_spec.bench.throughput import measure_batch
from overlap_spec.config import EngineConfig, child_environment
from overlap_spec.engine import Engine
from overlap_spec.messages import SamplingParams
from overlap_spec.resolve import without_speculation
from overlap_spec.server.app import create_app
from overlap_spec.server.interfaces import ServerInfo
from overlap_spec.server.serve import HttpServer
from overlap_spec.version import __version__

PROMPTS = Path(__file__).parent.parent / "data" / "prompts"
PROMPT_LENGTH = 128  # of random prompts


@dataclass(frozen=True)
class Workload:
    """What is sent. `prompts`: chat20, peer64, `random`, or a JSON file with a list of strings."""

    prompts: str = "chat20"
    num_tokens: int = 256
    temperature: float = 0.0
    batch_sizes: tuple[int, ...] = (1, 8, 64)
    commit: str | None = None  # of the source tree, where git cannot say

    def texts(self) -> list[str]:
        """The chat prompts."""
        known = PROMPTS / f"{self.prompts}.json"
        texts: list[str] = json.loads((known if known.is_file() else Path(self.prompts)).read_text())
        return texts


async def run_latency(config: EngineConfig, workload: Workload, plain: bool, baseline: bool) -> dict[str, Any]:
    """One chat after another with speculation, without it, and through transformers."""
    sampling = SamplingParams(max_new_tokens=workload.num_tokens, temperature=workload.temperature, seed=0)
    report: dict[str, Any] = {"benchmark": "latency", "workload": _describe(workload)}
    for name, asked in _variants(config, plain):
        async with Engine(asked) as engine:
            report.setdefault("run", _describe_engine(engine, workload))
            report[name] = await measure_latency(engine.client, workload.texts(), sampling)
            report[name]["settings"] = _spec_of(engine)
            settings = engine.settings
    if baseline:
        report["transformers"] = await asyncio.to_thread(_transformers, settings, workload)
    report["ratios"] = _ratios(report, "tokens_per_second")
    return report


async def run_throughput(config: EngineConfig, workload: Workload, plain: bool) -> dict[str, Any]:
    """Batches through the HTTP server, with speculation and without it."""
    report: dict[str, Any] = {"benchmark": "throughput", "workload": _describe(workload)}
    for name, asked in _variants(config, plain):
        async with Engine(asked) as engine:
            report.setdefault("run", _describe_engine(engine, workload))
            prompts = await _token_prompts(engine, workload)
            server = HttpServer(create_app(engine.client, _server_info(engine), lambda: (True, "")), "127.0.0.1", 0)
            await server.start()
            try:
                rows = [
                    await measure_batch("127.0.0.1", server.port, prompts[:size], workload.num_tokens)
                    for size in workload.batch_sizes
                ]
            finally:
                await server.stop(1.0)
            report[name] = {"settings": _spec_of(engine), "batches": rows}
    return report


def _variants(config: EngineConfig, plain: bool) -> list[tuple[str, EngineConfig]]:
    return [("engine", config), *([("plain", without_speculation(config))] if plain else [])]


async def _token_prompts(engine: Engine, workload: Workload) -> list[list[int]]:
    """Token ids for the largest batch; random ones are a fixed sequence, different for each row."""
    most = max(workload.batch_sizes)
    if workload.prompts == "random":
        vocab = engine.settings.model.files.vocab_size
        return [[(row * 7919 + i * 104729) % (vocab - 10) + 5 for i in range(PROMPT_LENGTH)] for row in range(most)]
    texts = workload.texts()
    prompts = [[{"role": "user", "content": texts[i % len(texts)]}] for i in range(most)]
    return [await engine.client.tokenize(prompt) for prompt in prompts]


def _transformers(settings: Any, workload: Workload) -> dict[str, Any]:
    """transformers in a process of its own, with the worker's threads."""
    files = settings.model.files
    command = [sys.executable, "-m", "overlap_spec.bench.baseline", files.weights, files.tokenizer_dir]
    done = subprocess.run(
        [*command, str(workload.num_tokens), str(settings.num_threads)],
        input=json.dumps(workload.texts()),
        env=child_environment(settings, "worker"),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the transformers baseline failed: {done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def _ratios(report: dict[str, Any], figure: str) -> dict[str, float]:
    names = [name for name in ("engine", "plain", "transformers") if name in report]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    return {f"{a} / {b}": round(report[a][figure] / report[b][figure], 3) for a, b in pairs}


def _describe(workload: Workload) -> dict[str, Any]:
    return {name: getattr(workload, name) for name in ("prompts", "num_tokens", "temperature")}


def _describe_engine(engine: Engine, workload: Workload) -> dict[str, Any]:
    device = engine.facts.get("worker", {}).get("device", engine.settings.model.device)
    return describe_run(str(device), engine.settings.num_threads, workload.commit)


def _spec_of(engine: Engine) -> dict[str, Any]:
    settings = engine.settings
    spec = settings.spec
    return {
        "model": settings.model.name,
        "dtype": settings.model.dtype,
        "method": spec.method,
        "num_steps": spec.num_steps,
        "topk": spec.topk,
        "num_draft_tokens": spec.width,
        "depth": settings.scheduler.depth,
    }


def _server_info(engine: Engine) -> ServerInfo:
    model = engine.settings.model
    return ServerInfo(
        model_name=model.name,
        model_path=model.files.weights,
        tokenizer_path=model.files.tokenizer_dir,
        max_model_len=model.max_len,
        max_running_requests=engine.settings.scheduler.max_running_requests,
        version=__version__,
    )
