"""Whole benchmark runs: start engines, measure, compare within the run.

Speculation is always compared with the same engine without it; on request, also with one step in flight or with
transformers. All run one after the other on the same machine in the same run. Throughput is measured as SGLang's was:
token ids in and out, no tokenizer, no prefix cache. Only SGLang's figures come from another run.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from overlap_spec.bench.engines import Serve, acceptance_of, describe_engine, describe_settings, variants
from overlap_spec.bench.latency import measure_latency
from overlap_spec.bench.throughput import Batch, Endpoint, measure_batch, measure_first_token
from overlap_spec.bench.transformers_generate import TransformersGenerate
from overlap_spec.bench.workload import (
    GREEDY,
    SamplingMode,
    Workload,
    batch_prompts,
    chat_prompts,
    load_prompts,
    random_prompts,
    sampling_of,
    warm_up_prompts,
)
from overlap_spec.client import AnyPrompt
from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine

log = logging.getLogger(__name__)
NUM_FIRST_TOKENS = 20
FIRST_TOKEN_ROWS = 1000  # random prompts from here on are in no batch
MOST_CHAT_TOKENS = 512  # limit of an answer that does not end by itself
CHAT_LINK = "ZMQ client, token ids in and out, no HTTP"
WARM_UP_CHAT = "Say hello."  # in no set of prompts

Load = tuple[tuple[str, int | str], ...]  # columns of a row: batch, and sampling unless it is greedy


async def run_latency(
    config: EngineConfig, workload: Workload, plain: bool, baseline: bool, runs: int = 1
) -> dict[str, Any]:
    """Measure one chat at a time with speculation, without it, and through transformers; the best of `runs` turns each.

    Every engine is started again in every turn, so that a quiet minute of the machine does not favour one of them.
    """
    ways = (SamplingMode(workload.temperature), *workload.sampled)
    report: dict[str, Any] = {"benchmark": "latency", "workload": workload.describe()}
    turns: dict[str, list[dict[str, Any]]] = {}
    generate: TransformersGenerate | None = None
    for _ in range(runs):
        for name, asked in variants(config, ["plain"] if plain else []).items():
            log.info("%s: starting the engine", name)
            async with Engine(asked) as engine:
                log.info("%s: answering chats one by one", name)
                _introduce(report, engine, workload)
                prompts = [_chat(text) for text in workload.texts()]
                figures = await _measure_chats(engine, prompts, _chat(WARM_UP_CHAT), ways, workload.num_tokens)
                turns.setdefault(name, []).append({**figures, **_described(engine)})
                settings = engine.settings
        if baseline:
            generate = generate or TransformersGenerate(settings, workload)
            turns.setdefault("transformers", []).append(await asyncio.to_thread(generate.measure))
    report |= {name: best_of(figures) for name, figures in turns.items()}
    report["ratios"] = _ratios(report, "tokens_per_second")
    return report


def best_of(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the fastest turn, and the speed of every turn if there are several."""
    fastest = max(turns, key=lambda figures: figures["tokens_per_second"])
    return fastest | {"turns": [figures["tokens_per_second"] for figures in turns]}


def _described(engine: Engine) -> dict[str, Any]:
    return {"settings": describe_settings(engine), "facts": engine.facts.report()}


async def run_throughput(
    config: EngineConfig, workload: Workload, compared: Sequence[str], serve: Serve
) -> dict[str, Any]:
    """Measure batches, first tokens and chats, with speculation and with the engines of `compared` (`variants`).

    `serve`: what each is measured behind. One step in flight is measured greedily only.
    """
    config = _as_the_peer(config, max(workload.batch_sizes))
    greedy = dataclasses.replace(workload, sampled=())
    report: dict[str, Any] = {"benchmark": "throughput", "workload": workload.describe()}
    for name, asked in variants(config, compared).items():
        begun = time.perf_counter()
        log.info("%s: starting the engine", name)
        async with Engine(asked) as engine:
            start_s = round(time.perf_counter() - begun, 2)
            _introduce(report, engine, workload)
            report[name] = {
                **_described(engine),
                "start_s": start_s,
                **await _measure_throughput(engine, serve, workload if name != "depth1" else greedy),
            }
    report["ratios"] = _batch_ratios(report, compared)
    return report


def _as_the_peer(config: EngineConfig, most: int) -> EngineConfig:
    """Token ids only, no prefix cache, and as many slots as the largest batch unless a number was given."""
    running = config.max_running_requests or most
    return replace(config, skip_tokenizer_init=True, disable_radix_cache=True, max_running_requests=running)


def _introduce(report: dict[str, Any], engine: Engine, workload: Workload) -> None:
    """Record the origin of the figures once, synthetic acceptance first."""
    if "run" not in report:
        report["run"] = describe_engine(engine)
        report["acceptance"] = acceptance_of(engine)


async def _measure_throughput(engine: Engine, serve: Serve, workload: Workload) -> dict[str, Any]:
    vocab_size = engine.settings.model.files.vocab_size
    prompts = batch_prompts(engine.config, workload, vocab_size)
    warm_up = warm_up_prompts(prompts, vocab_size)
    async with serve(engine) as address:
        endpoint = Endpoint(*address)
        batches = [Batch(prompts[:size], warm_up[:size], workload.num_tokens) for size in workload.batch_sizes]
        figures: dict[str, Any] = {"batches": []}
        for batch in batches:
            log.info("measuring a batch of %d", len(batch.prompts))
            figures["batches"].append(await measure_batch(endpoint, batch, workload.sampled))
        log.info("measuring first tokens")
        first = random_prompts(NUM_FIRST_TOKENS, vocab_size, first=FIRST_TOKEN_ROWS)
        figures["first_token"] = await measure_first_token(endpoint, first, warm_up_prompts(first[:1], vocab_size))
    if workload.chats is not None:
        chats = chat_prompts(engine.config, load_prompts(workload.chats))
        (cold,) = warm_up_prompts(chats[:1], vocab_size)
        measured = await _measure_chats(engine, chats, cold, (GREEDY, *workload.sampled), MOST_CHAT_TOKENS)
        sent = {"prompts": workload.chats, "link": CHAT_LINK, "max_new_tokens": MOST_CHAT_TOKENS}
        figures["chats"] = sent | measured
    return figures


async def _measure_chats(
    engine: Engine, prompts: Sequence[AnyPrompt], warm_up: AnyPrompt, ways: Sequence[SamplingMode], num_tokens: int
) -> dict[str, Any]:
    """Answer chats one after another with each way of sampling; the top-level figures are those of the first."""
    figures, *others = [await measure_latency(engine.client, prompts, way.params(num_tokens), warm_up) for way in ways]
    if others:
        drawn = zip(ways[1:], others, strict=True)
        figures["sampled"] = [dataclasses.asdict(way) | measured for way, measured in drawn]
    return figures


def _ratios(report: dict[str, Any], figure: str) -> dict[str, float]:
    names = [name for name in ("engine", "plain", "transformers") if name in report]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    return {f"{a} / {b}": round(report[a][figure] / report[b][figure], 3) for a, b in pairs}


def _batch_ratios(report: dict[str, Any], compared: Sequence[str]) -> list[dict[str, Any]]:
    """Ratios of the configured engine's tok/s to the others': a row per batch size, one for chats, then sampling."""
    speeds = {name: _speeds(report[name]) for name in ("engine", *compared)}
    return [
        dict(load)
        | {f"engine / {name}": round(speed / speeds[name][load], 3) for name in compared if load in speeds[name]}
        for load, speed in speeds["engine"].items()
    ]


def _speeds(part: dict[str, Any]) -> dict[Load, float]:
    """tok/s by load."""
    rows = [(row["batch"], row) for row in part["batches"]]
    rows += [("chats", part["chats"])] if "chats" in part else []
    greedy: dict[Load, float] = {(("batch", name),): row["tokens_per_second"] for name, row in rows}
    return greedy | {
        (("batch", name), ("sampling", sampling_of(drawn).label)): drawn["tokens_per_second"]
        for name, row in rows
        for drawn in row.get("sampled", [])
    }


def _chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]
