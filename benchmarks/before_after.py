"""Steps, first tokens and start-up of two trees of this project, in turns, on one GPU.

    python benchmarks/before_after.py --before DIR --output FILE

DIR holds `overlap_spec/` and `overlap_spec_kernels/` of the tree to compare with. Both trees, and the one before a
second time, serve the same configuration at the same time and answer the same batches in turns, so that clocks and
temperature are shared. How far the two servers of one tree are apart is the noise. A step is the time of a batched,
non-streamed `/generate` of token ids less that of the same call with one token, over the largest number of verify steps
in the batch; a first token is a one-token call. Medians of the turns. The file is written after each cell, and a cell
that it has of the same tree is not measured again.
"""

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.runtime.source import git_hash

SIZES = ["--max-total-tokens", "65536", "--context-length", "4096"]  # two engines fit
SHAPE = [*SIZES, "--model-path", "benchmarks/shapes/llama-3.1-8b", "--load-format", "dummy"]
HEAD = ["--speculative-draft-model-path", "benchmarks/shapes/llama-3.1-8b-eagle3"]


def eagle3(steps: int, topk: int, tokens: int) -> list[str]:
    """Flags of a method with explicit numbers."""
    numbers = (("num-steps", steps), ("eagle-topk", topk), ("num-draft-tokens", tokens))
    return ["--speculative-algorithm", "EAGLE3", *(w for n, v in numbers for w in (f"--speculative-{n}", str(v)))]


PLAIN = ["--speculative-algorithm", "NONE"]
CELLS: dict[str, tuple[list[str], tuple[int, ...]]] = {
    "8B plain": ([*SHAPE, *PLAIN], (1, 8, 32)),
    "8B chain (3, 1, 4)": ([*SHAPE, *HEAD, *eagle3(3, 1, 4)], (1, 8, 32)),
    "8B tree (5, 8, 32)": ([*SHAPE, *HEAD, *eagle3(5, 8, 32)], (8,)),
    "SmolLM2 plain": ([*SIZES, *PLAIN], (1, 64)),
    "SmolLM2 chain (3, 1, 4)": ([*SIZES, *eagle3(3, 1, 4)], (1, 64)),
}
TREES = ("before", "after", "again")  # the last one is the first one's
HASHED = ("kernels/overlap_spec_kernels", "overlap_spec/models", "overlap_spec/speculative", "overlap_spec/worker")


class Server:
    """One tree's `serve`, on a port of its own."""

    def __init__(self, path: str, flags: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [
            sys.executable,
            "-P",
            "-m",
            "overlap_spec",
            "serve",
            "--port",
            str(self.port),
            "--skip-tokenizer-init",
            "--audit-rate",
            "0",
        ]
        self._begun = time.perf_counter()
        self._process = subprocess.Popen(
            [*command, "--disable-radix-cache", "--log-level", "warning", *flags],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
        )

    def wait(self) -> float:
        """Seconds from the command to ready."""
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"serve ended with {self._process.returncode}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
                    return time.perf_counter() - self._begun
            except OSError:
                time.sleep(0.05)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, int]:
        """Seconds of a batch, and the most verify steps of a request in it."""
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = json.dumps({"input_ids": prompts, "sampling_params": sampling}).encode()
        url = f"http://127.0.0.1:{self.port}/generate"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        begun = time.perf_counter()
        with urllib.request.urlopen(request, timeout=120) as answer:
            answers = json.loads(answer.read())
        seconds = time.perf_counter() - begun
        counts = [each["meta_info"].get("spec_verify_ct") or num_tokens - 1 for each in answers]
        return seconds, max(counts)

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)


def main() -> None:
    """Run the cells, print a line for each, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--starts", nargs="*", default=["8B chain (3, 1, 4)"], choices=list(CELLS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--num-tokens", type=int, default=256)
    arguments = parser.parse_args()
    site = os.environ.get("PYTHONPATH", "")
    before = f"{arguments.before}:{site}"
    paths = {"before": before, "after": site, "again": before}
    parts = {part: Path(arguments.before) / part.removeprefix("kernels/") for part in HASHED}
    hashes = {part: git_hash(path) for part, path in parts.items() if path.is_dir()}
    facts = describe_run(torch.cuda.get_device_name(), 1) | {"before": hashes}
    kept = json.loads(Path(arguments.output).read_text()) if Path(arguments.output).exists() else {}
    rows: list[dict[str, Any]] = kept.get("rows", [])
    assert not kept or kept["run"]["source"] == facts["source"], "the file is of another tree"
    measured = {(row["cell"], "start_s" in row) for row in rows}
    for name in arguments.cells:
        if (name, False) not in measured:
            rows += measure(name, paths, arguments.turns, arguments.num_tokens)
            write_report(arguments.output, {"benchmark": "before_after", "run": facts, "rows": rows})
    for name in arguments.starts:
        if (name, True) not in measured:
            rows.append(start_alone(name, paths))
            print(json.dumps(rows[-1]), flush=True)
            write_report(arguments.output, {"benchmark": "before_after", "run": facts, "rows": rows})


def measure(name: str, paths: dict[str, str], turns: int, num_tokens: int) -> list[dict[str, Any]]:
    """One configuration on both trees."""
    flags, sizes = CELLS[name]
    rows, servers = [], {tree: Server(paths[tree], flags) for tree in TREES}
    for server in servers.values():
        server.wait()
    try:
        for size in sizes:
            draw = random.Random(size)
            prompts = [[draw.randrange(1000, 40000) for _ in range(128)] for _ in range(size)]
            rows.append({"cell": name, "batch": size, **in_turns(servers, prompts, turns, num_tokens)})
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "raw"}), flush=True)
    finally:
        for server in servers.values():
            server.stop()
    return rows


def start_alone(name: str, paths: dict[str, str]) -> dict[str, Any]:
    """Seconds to ready of a configuration whose kernels are compiled, one tree after the other."""
    seconds = {}
    for tree in TREES[:2]:
        server = Server(paths[tree], CELLS[name][0])
        seconds[tree] = round(server.wait(), 2)
        server.stop()
    return {"cell": name, "start_s": seconds, "start_ratio": round(seconds["after"] / seconds["before"], 3)}


def in_turns(servers: dict[str, Server], prompts: list[list[int]], turns: int, num_tokens: int) -> dict[str, Any]:
    """Milliseconds of a step and of a first token, by tree."""
    raw: dict[str, list[tuple[float, float]]] = {tree: [] for tree in TREES}
    for turn in range(turns + 1):  # the first warms up
        for tree in TREES if turn % 2 else reversed(TREES):
            first = min(servers[tree].generate(prompts, 1)[0] for _ in range(3))
            seconds, steps = servers[tree].generate(prompts, num_tokens)
            if turn:
                raw[tree].append((1e3 * (seconds - first) / steps, 1e3 * first))
    step, token = ({t: statistics.median(pair[i] for pair in raw[t]) for t in TREES} for i in (0, 1))
    return {
        "step_ms": {tree: round(ms, 4) for tree, ms in step.items()},
        "first_token_ms": {tree: round(ms, 3) for tree, ms in token.items()},
        "step_ratio": round(step["after"] / step["before"], 4),
        "step_noise": round(step["again"] / step["before"], 4),
        "first_token_ratio": round(token["after"] / token["before"], 4),
        "first_token_noise": round(token["again"] / token["before"], 4),
        "raw": raw,
    }


if __name__ == "__main__":
    Path("benchmarks").is_dir() or sys.exit("run it from the repository's root")
    main()
