"""Whether an engine of two ranks answers as one rank does, in float32: a model's true shape, and a tiny checkpoint.

shape    random weights, which no draft guesses: long rows, many operations of a step; token ids
tiny     a draft that is right about every second time, all kinds of requests; texts
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlap_spec import Engine, EngineConfig, SamplingParams
from overlap_spec.bench.workload import random_prompts
from overlap_spec.client import AnyPrompt
from overlap_spec.client.calls import Completion
from support.disturbed_streams import KINDS, asked
from support.soak.seeded import alike

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"algorithm": "NONE"},
    "chain": {"algorithm": "EAGLE3", "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4},
    "tree": {"algorithm": "EAGLE3", "num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 6},
    "n-grams": {"algorithm": "NGRAM", "num_draft_tokens": 4, "ngram_max_bfs_breadth": 1},
}
START_MOST_S, ANSWER_MOST_S = 150.0, 90.0

Asked = Sequence[tuple[AnyPrompt, SamplingParams]]


def of_shape(device: str, target: Path = SHAPES / "llama-3.2-1b", most: int = 32) -> tuple[dict[str, Any], Asked]:
    """Flags and requests: half of them greedy, half drawn."""
    flags = {"model_path": str(target), "draft_model_path": f"{target}-eagle3", "load_format": "dummy"}
    flags |= {"skip_tokenizer_init": True, "device": device, "dtype": "float32", "max_total_tokens": 8192}
    requests = [
        (prompt, SamplingParams(max_new_tokens=most, temperature=float(row % 2), seed=row, ignore_eos=True))
        for row, prompt in enumerate(random_prompts(12, 2000))
    ]
    return flags, requests


def of_tiny(device: str, model: Path) -> tuple[dict[str, Any], Asked]:
    """Flags and requests: greedy and drawn, with penalties, log-probs, grammars, filters and stop strings."""
    flags = {"model_path": str(model), "draft_model_path": str(model / "head"), "device": device, "dtype": "float32"}
    return flags | {"max_total_tokens": 8192}, asked(3 * len(KINDS))


def config_of(flags: Mapping[str, Any], method: str, ranks: int) -> EngineConfig:
    """Without a draft model where the method has none."""
    own = {f"speculative_{name}": value for name, value in METHODS[method].items()}
    given = {name: value for name, value in flags.items() if name != "draft_model_path"}
    if METHODS[method]["algorithm"] == "EAGLE3":
        own["speculative_draft_model_path"] = flags["draft_model_path"]
    sizes: dict[str, Any] = {"context_length": 512, "max_running_requests": 8, "tp_size": ranks, "random_seed": 1}
    if flags["device"] == "cuda":
        sizes |= {"cuda_graph_bs": (1, 4, 8), "mem_fraction_static": 0.5}
    return EngineConfig(**given, **sizes, **own, log_level="error", audit_rate=0.0)


async def answers_of(
    flags: Mapping[str, Any], method: str, ranks: int, requests: Asked
) -> tuple[list[Completion], float]:
    """All answers, up to eight at a time, and tokens of a verify step."""
    async with asyncio.timeout(START_MOST_S):
        engine = await Engine(config_of(flags, method, ranks)).__aenter__()
    try:
        async with asyncio.timeout(ANSWER_MOST_S):
            found = await asyncio.gather(*(engine.client.complete(*request) for request in requests))
            stats = await engine.client.stats()
            while stats.requests_total < len(requests):
                stats = await engine.client.stats()
    finally:
        await engine.stop()
    return list(found), stats.committed_tokens_total / max(stats.verify_steps_total, 1)


def differing(found: Sequence[Completion], wanted: Sequence[Completion]) -> list[int]:
    """Numbers of the requests with other answers. Log-probs may be rounded otherwise."""
    return [number for number, pair in enumerate(zip(found, wanted, strict=True)) if not alike(*map(comparable, pair))]


def comparable(answer: Completion) -> list[Any]:
    """All but counts that depend on speculation."""
    usage = answer.usage
    scored = [
        [(entry.token_id, entry.log_prob) for entry in entries]
        for entries in (answer.log_probs, answer.prompt_log_probs)
    ]
    return [answer.text, answer.token_ids, answer.finish, usage.prompt_tokens, usage.completion_tokens, scored]


async def compared(flags: Mapping[str, Any], requests: Asked, methods: Sequence[str]) -> dict[str, Any]:
    """Two ranks with each method beside one rank's plain decoding."""
    wanted, _ = await answers_of(flags, "plain", 1, requests)
    tokens = sum(len(answer.token_ids) for answer in wanted)
    figures: dict[str, Any] = {"requests": len(requests), "tokens": tokens, "differ": {}, "accept_length": {}}
    for method in methods:
        found, accept_length = await answers_of(flags, method, 2, requests)
        figures["differ"][method] = len(differing(found, wanted))
        figures["accept_length"][method] = round(accept_length, 3)
        print(f"{method}: {figures}", flush=True)
    return figures
