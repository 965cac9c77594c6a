"""Checks the CPU figures on this machine: start-up, plain decoding and EAGLE-3 against transformers.

    taskset -c 0,1 python benchmarks/cpu_check.py --output benchmarks/results/cpu_check.json

It takes two minutes on two slow cores: three of the chats, short answers, engines that stay up and take turns. `bench
latency --runs 3` is the full measurement. transformers runs last, loaded once, with the machine's thread settings.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from typing import Any

from overlap_spec.bench.latency import measure_latency
from overlap_spec.bench.report import describe_engine, describe_settings, write_report
from overlap_spec.bench.runs import WARM_UP_CHAT, best_of
from overlap_spec.bench.workload import load_prompts
from overlap_spec.client import AnyPrompt
from overlap_spec.config import EngineConfig, own_environment
from overlap_spec.config.resolve import without_speculation
from overlap_spec.engine import Engine
from overlap_spec.messages import SamplingParams

MUST = {"plain": 1.2, "engine": 1.8}  # times transformers
FACTS = ("processor", "threads", "linears", "chunk_tokens", "start_up")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    parser.add_argument("--chats", type=int, default=3)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    begun = time.perf_counter()
    report: dict[str, Any] = {"benchmark": "cpu_check", "start_s": [start_seconds(), start_seconds()]}
    print("seconds from command to answer of one token, first start and next:", report["start_s"], flush=True)
    report |= asyncio.run(measure_engines(arguments))
    report["transformers"] = measure_transformers(arguments, report.pop("files"))
    print("transformers", report["transformers"]["turns"], flush=True)
    for name, must in MUST.items():
        ratio = report[name]["tokens_per_second"] / report["transformers"]["tokens_per_second"]
        report[name]["times transformers"] = round(ratio, 3)
        print(f"{name}: {ratio:.2f} times transformers, must {must}", flush=True)
    print(f"{time.perf_counter() - begun:.0f} s in all")
    if arguments.output:
        write_report(arguments.output, report)


def start_seconds() -> float:
    """From the command to the end of an answer of one token."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "overlap_spec", "chat", "Hi", "--max-tokens", "1", "--device", "cpu"]
    subprocess.run(command, check=True, capture_output=True)
    return round(time.perf_counter() - started, 2)


async def measure_engines(arguments: argparse.Namespace) -> dict[str, Any]:
    """Each engine's best of some turns, one after the other; an idle engine sleeps."""
    config = EngineConfig(device="cpu", log_level="warning")
    prompts = [_chat(text) for text in load_prompts("chat20")[: arguments.chats]]
    sampling = SamplingParams(max_new_tokens=arguments.num_tokens, temperature=0.0, seed=0)
    turns: dict[str, list[dict[str, Any]]] = {"engine": [], "plain": []}
    async with Engine(config) as drafting, Engine(without_speculation(config)) as plain:
        engines = {"engine": drafting, "plain": plain}
        for name, engine in engines.items():
            facts = engine.facts.worker.report()
            print(name, {key: facts[key] for key in FACTS if key in facts}, flush=True)
        for _ in range(arguments.runs):
            for name, engine in engines.items():
                figures = await measure_latency(engine.client, prompts, sampling, _chat(WARM_UP_CHAT))
                turns[name].append({**figures, "settings": describe_settings(engine), "facts": engine.facts.report()})
                said = {key: figures[key] for key in ("tokens_per_second", "step_ms", "accept_length")}
                print(name, said, flush=True)
        files = drafting.settings.model.files
        return {
            "run": describe_engine(drafting),
            "files": (files.weights, files.tokenizer_dir, drafting.settings.num_threads),
            **{name: best_of(figures) for name, figures in turns.items()},
        }


def _chat(text: str) -> AnyPrompt:
    return [{"role": "user", "content": text}]


def measure_transformers(arguments: argparse.Namespace, files: tuple[str, str, int]) -> dict[str, Any]:
    """Its best of as many turns in a process of its own."""
    weights, tokenizer_dir, threads = files
    command = [sys.executable, "-m", "overlap_spec.bench.baseline", weights, tokenizer_dir]
    numbers = [str(arguments.num_tokens), str(threads), "cpu", str(arguments.runs)]
    done = subprocess.run(
        [*command, *numbers],
        input=json.dumps(load_prompts("chat20")[: arguments.chats]),
        env=own_environment(),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


if __name__ == "__main__":
    main()
