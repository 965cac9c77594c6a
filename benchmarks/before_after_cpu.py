"""Tokens per second of two trees of this project on a CPU, in turns: chats one after another, with the default draft.

    python benchmarks/before_after_cpu.py --before DIR --output benchmarks/results/before_after_cpu.json

DIR holds `overlap_spec/` and `kernels/` of the tree to compare with. Both engines stay up and answer the same chats, by
turns; an idle one sleeps. The ratio is that of the medians of the turns. Weights are float32 in both.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

SIDE = "--side"  # this file answers chats, with the tree that PYTHONPATH names
MUST = 0.97
NAMES = ("before", "after")


class Tree:
    """A tree's engine in a process of its own."""

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        paths = os.pathsep.join((str(folder), str(folder / "kernels")))
        pipe = subprocess.PIPE
        command = [sys.executable, "-P", __file__, SIDE]
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, "PYTHONPATH": paths}, cwd="/"
        )
        self.facts = self.ask(asked)

    def ask(self, line: Any = None) -> dict[str, Any]:
        """Send a line, and wait for one."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


async def serve_turns() -> None:
    """Read what is asked, then answer all chats for every further line."""
    import overlap_spec
    from overlap_spec.bench.latency import measure_latency
    from overlap_spec.bench.runs import WARM_UP_CHAT
    from overlap_spec.bench.workload import load_prompts
    from overlap_spec.config import EngineConfig
    from overlap_spec.engine import Engine
    from overlap_spec.messages import SamplingParams

    def chat(text: str) -> Any:
        return [{"role": "user", "content": text}]

    asked = json.loads(sys.stdin.readline())
    prompts = [chat(text) for text in load_prompts("chat20")[: asked["chats"]]]
    sampling = SamplingParams(max_new_tokens=asked["num_tokens"], temperature=0.0, seed=0)
    numbers = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    config = EngineConfig(device="cpu", dtype="float32", log_level="error", **numbers)
    async with Engine(config) as engine:
        print(json.dumps({"tree": str(Path(overlap_spec.__file__).parent)}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            figures = await measure_latency(engine.client, prompts, sampling, chat(WARM_UP_CHAT))
            print(json.dumps({key: value for key, value in figures.items() if key != "requests"}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--output")
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--num-tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    asked = {"chats": arguments.chats, "num_tokens": arguments.num_tokens}
    trees = {name: Tree(getattr(arguments, name).resolve(), asked) for name in NAMES}
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    for turn in range(arguments.turns):
        for name in NAMES if turn % 2 == 0 else reversed(NAMES):
            turns[name].append(trees[name].ask())
            print(name, turns[name][-1], flush=True)
    for tree in trees.values():
        tree.close()
    report = report_of(turns, asked)
    print(f"after / before: {report['ratio']}, must {MUST}")
    if arguments.output:
        from overlap_spec.bench.report import write_report

        write_report(arguments.output, report)


def report_of(turns: dict[str, list[dict[str, Any]]], asked: dict[str, Any]) -> dict[str, Any]:
    """The medians of both trees, their ratio, and every turn."""
    import torch

    from overlap_spec.bench.report import describe_run

    speeds = {name: [turn["tokens_per_second"] for turn in each] for name, each in turns.items()}
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    return {
        "benchmark": "before_after_cpu",
        "run": describe_run("cpu", torch.get_num_threads()),
        "workload": {"prompts": "chat20", "method": "EAGLE3 (3, 1, 4)", "dtype": "float32", **asked},
        "tokens_per_second": speeds,
        "ratio": round(medians["after"] / medians["before"], 4),
        "must": MUST,
        "turns": turns,
    }


if __name__ == "__main__":
    if SIDE in sys.argv:
        asyncio.run(serve_turns())
    else:
        main()
