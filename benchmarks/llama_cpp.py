"""Compares llama.cpp with this engine on a CPU: one .gguf file, machine, set of prompts and number of threads, one run.

xllamacpp has an environment of its own:

    python -m venv /path/to/venv && /path/to/venv/bin/pip install xllamacpp
    python benchmarks/llama_cpp.py --llama-python /path/to/venv/bin/python --output llama_cpp_cpu.json

All are greedy, and answer chats one after another to the end of the turn. They take turns: llama.cpp, plain decoding,
EAGLE-3; the ratios are of the best turns. `--dtype float32` measures weights that were dequantised while loading.
"""

import argparse
import asyncio
import json
import subprocess
from pathlib import Path
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

TURNS = Path(__file__).parent / "peers" / "llama_cpp_turns.py"
SHOWN = ("tokens_per_second", "step_ms", "accept_length")
MUST, AIM = 1.0, 1.5  # of EAGLE-3, times llama.cpp


class LlamaCpp:
    """llama.cpp in a process of its own, which computes when it is asked to."""

    def __init__(self, python: str, asked: dict[str, Any]) -> None:
        command = [python, str(TURNS)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=own_environment()
        )
        self._send(json.dumps(asked))
        self.facts = self._receive()

    def turn(self) -> dict[str, Any]:
        """All prompts once."""
        self._send("")
        return self._receive()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with status {self._process.wait(60)}")
        found: dict[str, Any] = json.loads(line)
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--llama-python", required=True, help="python of an environment with xllamacpp")
    parser.add_argument("--output")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    report = {"benchmark": "llama_cpp", **asyncio.run(measure(arguments))}
    best = {name: report[name]["tokens_per_second"] for name in ("llama.cpp", "plain", "eagle3")}
    report["times llama.cpp"] = {name: round(speed / best["llama.cpp"], 3) for name, speed in best.items()}
    report["must"], report["aim"] = MUST, AIM
    print(report["times llama.cpp"], f"must {MUST}, aim {AIM}")
    if arguments.output:
        write_report(arguments.output, report)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The best turn of each, and all turns' speeds."""
    config = EngineConfig(device="cpu", log_level="warning", dtype=arguments.dtype)
    texts = load_prompts("chat20")[: arguments.chats]
    prompts = [_chat(text) for text in texts]
    sampling = SamplingParams(max_new_tokens=arguments.num_tokens, temperature=0.0, seed=0)
    turns: dict[str, list[dict[str, Any]]] = {"llama.cpp": [], "plain": [], "eagle3": []}
    async with Engine(config) as drafting, Engine(without_speculation(config)) as plain:
        threads = drafting.settings.num_threads
        asked = {"model": drafting.settings.model.files.weights, "prompts": texts, "threads": threads}
        llama = LlamaCpp(arguments.llama_python, asked | {"num_tokens": arguments.num_tokens})
        for _ in range(arguments.turns):
            turns["llama.cpp"].append(await asyncio.to_thread(llama.turn))
            for name, engine in (("plain", plain), ("eagle3", drafting)):
                figures = await measure_latency(engine.client, prompts, sampling, _chat(WARM_UP_CHAT))
                turns[name].append({**figures, "settings": describe_settings(engine), "facts": engine.facts.report()})
            for name, each in turns.items():
                print(name, {key: each[-1][key] for key in SHOWN if key in each[-1]}, flush=True)
        llama.close()
        return {
            "run": describe_engine(drafting),
            "workload": {"prompts": "chat20", "num_prompts": len(prompts), "num_tokens": arguments.num_tokens},
            "threads": threads,
            "dtype": arguments.dtype,
            "facts": llama.facts,
            **{name: best_of(figures) for name, figures in turns.items()},
        }


def _chat(text: str) -> AnyPrompt:
    return [{"role": "user", "content": text}]


if __name__ == "__main__":
    main()
