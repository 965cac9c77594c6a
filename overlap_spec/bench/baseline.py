"""Measures transformers' `generate` on the same prompts, as the baseline of the engine's figures in the same run.

It needs the dependency group `bench`. It runs in a process of its own, so that the engine's processes and transformers
never share threads.

    python -m overlap_spec.bench.baseline MODEL TOKENIZER_DIR TOKENS THREADS DEVICE [RUNS] < prompts.json > figures.json

That process has as many threads as the worker, and the faster of two environments. They differ in how OpenMP threads
wait: as by default, or as in the worker. The first turn tries both; later turns keep the faster one.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from overlap_spec.bench.workload import Workload
from overlap_spec.config import Settings, child_environment, own_environment


class TransformersGenerate:
    """transformers on the prompts of one workload."""

    def __init__(self, settings: Settings, workload: Workload) -> None:
        self._settings = settings
        self._workload = workload
        self.environments = {"its own": own_environment(), "as the worker's": child_environment(settings, "worker")}

    def measure(self) -> dict[str, Any]:
        """Figures of the faster environment, which later calls keep. Raises: RuntimeError."""
        figures = [self._run(name) | {"threads wait": name} for name in self.environments]
        fastest = max(figures, key=lambda row: row["tokens_per_second"])
        self.environments = {name: self.environments[name] for name in (fastest["threads wait"],)}
        return fastest

    def _run(self, name: str) -> dict[str, Any]:
        files, workload = self._settings.model.files, self._workload
        command = [sys.executable, "-m", "overlap_spec.bench.baseline", files.weights, str(files.tokenizer_dir)]
        done = subprocess.run(
            [*command, str(workload.num_tokens), str(self._settings.num_threads), self._settings.model.device],
            input=json.dumps(workload.texts()),
            env=self.environments[name],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the transformers baseline failed: {done.stderr[-2000:]}")
        measured: dict[str, Any] = json.loads(done.stdout)
        return measured


def measure_transformers(
    model_path: str, tokenizer_dir: str, prompts: list[str], max_tokens: int, device: str, runs: int = 1
) -> dict[str, Any]:
    """Greedy answers in float32 (bfloat16 on a GPU), one after another, to the end of the turn; the best of `runs`."""
    import torch
    import transformers  # a dependency of the group `bench` only

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    path = Path(model_path)
    source = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if source else path
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **source)
    model.to(device).eval()
    _answer(model, tokenizer, prompts[0], max_tokens)  # warms up
    turns = []
    for _ in range(runs):
        rows = [_answer(model, tokenizer, prompt, max_tokens) for prompt in prompts]
        tokens, seconds = sum(row[0] for row in rows), sum(row[1] for row in rows)
        turns.append((round(tokens / seconds, 2), tokens, round(seconds, 4)))
    speed, tokens, seconds = max(turns)
    return {
        "engine": f"transformers {transformers.__version__} generate",
        "num_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": speed,
        "turns": [turn[0] for turn in turns],
    }


def _answer(model: Any, tokenizer: Any, prompt: str, max_tokens: int) -> tuple[int, float]:
    """Generate one answer. Returns its number of tokens and the seconds it took."""
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(model.device)
    started = time.perf_counter()
    output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    return output.shape[1] - inputs["input_ids"].shape[1], time.perf_counter() - started


if __name__ == "__main__":
    import torch

    model, tokenizer, limit, threads, place, *runs = sys.argv[1:]
    torch.set_num_threads(int(threads))
    measured = measure_transformers(model, tokenizer, json.load(sys.stdin), int(limit), place, *map(int, runs))
    json.dump(measured, sys.stdout)
