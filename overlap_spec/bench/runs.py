"""Whole benchmark runs: start engines, measure, compare within the run.

Speculation is always compared with the same engine without it; on request, also with one step in flight or with
transformers. All run one after the other on the same machine in the same run. Throughput is measured as SGLang's was:
token ids in and out, no tokenizer, no prefix cache. Only SGLang's figures come from another run.

**Throughput** is that of batches of requests through the whole HTTP server. Step time is measured from outside,
as for other engines: the time of one batched, non-streamed /generate of token ids, minus the smallest of three such
calls for one token, divided by the largest verify count in the batch. The better of two runs counts; the report has
both, and a streamed run of the same batch. Sampling comes after that, one run for each way of sampling. Before every
call the engine's caches are emptied, the log of n-grams included, so that no call finds an earlier call's answers.
"""

import asyncio
import dataclasses
import http.client
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from msgspec.structs import replace

from overlap_spec.bench.baseline import TransformersGenerate
from overlap_spec.bench.latency import measure_latency
from overlap_spec.bench.report import Serve, acceptance_of, describe_engine, describe_settings, variants
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

TIMEOUT_S = 1200
SETTLE_S = 10.0  # timeout for the last step to settle after the answers are complete
POLL_S = 0.005
NUM_RUNS = 2
NUM_SAMPLED_RUNS = 1
NUM_ONE_TOKEN_CALLS = 5
WARM_UP_TOKENS = 24
FIRST_TOKEN_ANSWER = 8  # tokens of an answer whose first one is timed

Prompts = Sequence[list[int]]
Json = dict[str, Any]


@dataclass(frozen=True)
class Endpoint:
    """The measured server. `clock`: seconds; only differences count."""

    host: str
    port: int
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class Batch:
    """The measured prompts, with `num_tokens` per answer. `warm_up`: as many unmeasured prompts of the same lengths."""

    prompts: Prompts
    warm_up: Prompts
    num_tokens: int


async def measure_batch(endpoint: Endpoint, batch: Batch, sampled: Sequence[SamplingMode] = ()) -> Json:
    """Measure one batch size: greedy runs, then a streamed run, then a run for each of `sampled`.

    The top-level figures are those of the better greedy run.
    """
    greedy = await measure_steps(endpoint, batch, GREEDY, NUM_RUNS)
    streamed_wall = await asyncio.to_thread(_stream_all, endpoint, batch)
    figures = {
        "batch": len(batch.prompts),
        **greedy,
        "streamed_tokens_per_second": round(greedy["num_tokens"] / streamed_wall, 1),
    }
    if sampled:
        figures["sampled"] = [
            {**asdict(way), **await measure_steps(endpoint, batch, way, NUM_SAMPLED_RUNS)} for way in sampled
        ]
    return figures


async def measure_first_token(endpoint: Endpoint, prompts: Prompts, warm_up: Prompts) -> Json:
    """Time to first token of streamed answers, one request at a time, after the requests of `warm_up`."""
    for prompt in warm_up:
        await asyncio.to_thread(_time_first_token, endpoint, prompt)
    rows = [await asyncio.to_thread(_time_first_token, endpoint, prompt) for prompt in prompts]
    return {
        "prompt_tokens": len(prompts[0]),
        "num_requests": len(rows),
        "first_token_ms_median": round(1000 * statistics.median(rows), 3),
        "first_token_ms_min": round(1000 * min(rows), 3),
        "first_token_ms_max": round(1000 * max(rows), 3),
    }


async def measure_steps(
    endpoint: Endpoint, batch: Batch, sampling: SamplingMode = GREEDY, num_runs: int = NUM_RUNS
) -> Json:
    """Warm up, make the one-token calls, then the runs. The top-level figures are those of the better run."""
    await answer_batch(endpoint, batch.warm_up, WARM_UP_TOKENS, sampling)
    walls = [(await answer_batch(endpoint, batch.prompts, 1, sampling))[0] for _ in range(NUM_ONE_TOKEN_CALLS)]
    runs = []
    for _ in range(num_runs):
        wall, metas = await answer_batch(endpoint, batch.prompts, batch.num_tokens, sampling)
        runs.append(_figures(metas, wall, min(walls)))
    best = min(runs, key=lambda run: float(run["wall_s"]))
    return {**best, "one_token_walls_s": [round(wall, 5) for wall in walls], "runs": runs}


def _figures(metas: Sequence[Json], wall: float, one_token_wall: float) -> Json:
    """Figures of one run. `metas`: each answer's `meta_info`; walls in seconds."""
    tokens = sum(meta["completion_tokens"] for meta in metas)
    verify_counts = [meta.get("spec_verify_ct", 0) for meta in metas]
    steps = max(verify_counts) or max(meta["completion_tokens"] for meta in metas) - 1
    return {
        "num_tokens": tokens,
        "wall_s": round(wall, 4),
        "one_token_wall_s": round(one_token_wall, 5),
        "steps": steps,
        "step_ms": round(1000 * (wall - one_token_wall) / steps, 4),
        "tokens_per_second": round(tokens / wall, 1),
        "accept_length": round((tokens - len(metas)) / sum(verify_counts), 3) if sum(verify_counts) else 0.0,
    }


async def answer_batch(
    endpoint: Endpoint, prompts: Prompts, num_tokens: int, sampling: SamplingMode = GREEDY
) -> tuple[float, list[Json]]:
    """One batched call with empty caches. Returns wall seconds and each answer's `meta_info`."""
    body = _body(prompts, num_tokens, sampling, stream=False)
    wall, answers = await asyncio.to_thread(_post, endpoint, body)
    return wall, [answer["meta_info"] for answer in answers]


def _body(prompts: Prompts, num_tokens: int, sampling: SamplingMode, stream: bool) -> bytes:
    """The request body of a batch; each row has its own seed."""
    rows = [
        {**asdict(sampling), "sampling_seed": row, "max_new_tokens": num_tokens, "ignore_eos": True}
        for row in range(len(prompts))
    ]
    return json.dumps({"input_ids": list(prompts), "sampling_params": rows, "stream": stream}).encode()


def _flush(endpoint: Endpoint) -> None:
    """Empty the engine's caches. Raises: RuntimeError if it stays busy."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=TIMEOUT_S)
        connection.request("POST", "/flush_cache")
        response = connection.getresponse()
        payload = response.read()
        connection.close()
        if response.status == 200:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"/flush_cache answered {response.status} for {SETTLE_S:.0f} s: {payload[:500]!r}")
        time.sleep(POLL_S)


def _ask(endpoint: Endpoint, body: bytes) -> tuple[float, http.client.HTTPConnection, http.client.HTTPResponse]:
    """Empty the caches and send a body. Returns the start time, the connection and the response.

    Raises: RuntimeError if it is refused.
    """
    _flush(endpoint)
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=TIMEOUT_S)
    started = endpoint.clock()
    connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        payload = response.read()
        connection.close()
        raise RuntimeError(f"/generate answered {response.status}: {payload[:500]!r}")
    return started, connection, response


def _post(endpoint: Endpoint, body: bytes) -> tuple[float, Any]:
    started, connection, response = _ask(endpoint, body)
    payload = response.read()
    wall = endpoint.clock() - started
    connection.close()
    return wall, json.loads(payload)


def _stream_all(endpoint: Endpoint, batch: Batch) -> float:
    """The same batch as one event stream. Returns wall seconds."""
    body = _body(batch.prompts, batch.num_tokens, GREEDY, stream=True)
    started, connection, response = _ask(endpoint, body)
    while response.read(1 << 16):
        pass
    wall = endpoint.clock() - started
    connection.close()
    return wall


def _time_first_token(endpoint: Endpoint, prompt: list[int]) -> float:
    """Seconds from sending to the first event; the answer is read to its end."""
    started, connection, response = _ask(endpoint, _body([prompt], FIRST_TOKEN_ANSWER, GREEDY, stream=True))
    event = response.readline()
    first = endpoint.clock() - started
    response.read()
    connection.close()
    if not event.startswith(b"data: {") or b'"error"' in event[:20]:
        raise RuntimeError(f"/generate streamed no token but {event[:500]!r}")
    return first


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
