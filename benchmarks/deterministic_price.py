"""What --enable-deterministic-inference costs on a GPU: decode steps and prompts, with it and without it, in turns.

    python benchmarks/deterministic_price.py --output benchmarks/results/deterministic_price_h200.json
    python benchmarks/deterministic_price.py --cells "8B plain" "8B chain" --batches 1,8,32,128 --prompts 8192

For each cell two engines are built in one process, without server and scheduler, on the same chats (`step_profile`). A
round times each of them once at every batch size, which of them first by turns; what is reported is the median of the
rounds, and their ratio. Weights are drawn: bits of answers mean nothing here, times do.
"""

import argparse
import json
import statistics
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import torch
from step_profile import MACHINE, PAGES_PER_SLOT, ROWS, become_a_worker, fill, steps

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.config import EngineConfig
from overlap_spec.config.resolve import resolve
from overlap_spec.hub import resolve_model
from overlap_spec.messages import ChunkWork, ResetSlot, SamplingParams, StepPlan
from overlap_spec.worker.build import build
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.geometry import Geometry
from overlap_spec.worker.startup.warmup import capture_graphs, cuda_prompt_lengths, warm_up

SHAPES = Path(__file__).parent / "shapes"
SMOL = {  # SmolLM2-135M's sizes, and those of a head for it
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
}  # fmt: skip
OF_TARGET = {"num_hidden_layers": 30, "vocab_size": 49152, "tie_word_embeddings": True, "eos_token_id": 2}
OF_HEAD = {"vocab_size": 49152, "draft_vocab_size": 16384}
CHAIN = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1}
CHAIN |= {"speculative_num_draft_tokens": 4}
PLAIN = {"speculative_algorithm": "NONE"}
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "8B plain": ("llama-3.1-8b", PLAIN),
    "8B chain": ("llama-3.1-8b", CHAIN),
    "8B plain, fp8": ("llama-3.1-8b", PLAIN | {"quantization": "fp8"}),
    "SmolLM2 plain": ("smollm2", PLAIN),
    "SmolLM2 chain": ("smollm2", CHAIN),
}
STEPS = 30  # of one measurement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--prompts", default="8192", help="lengths of prompts, empty for none")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    lengths = [int(length) for length in arguments.prompts.split(",") if length]
    become_a_worker(config_of("8B plain", batches, lengths, SHAPES, False))
    with tempfile.TemporaryDirectory() as scratch:
        write_small_shapes(Path(scratch))
        run = describe_run(torch.cuda.get_device_name(), torch.get_num_threads())
        rows = []
        for cell in arguments.cells:
            rows += measure(cell, batches, lengths, arguments.rounds, Path(scratch))
            if arguments.output:
                write_report(arguments.output, {"benchmark": "deterministic_price", "run": run, "rows": rows})


def write_small_shapes(scratch: Path) -> None:
    """Configurations of SmolLM2's sizes, made of those of the 1B."""
    for name, own in (("llama-3.2-1b", OF_TARGET), ("llama-3.2-1b-eagle3", OF_HEAD)):
        values = json.loads((SHAPES / name / "config.json").read_text()) | SMOL | own
        directory = scratch / name.replace("llama-3.2-1b", "smollm2")
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(values))


def config_of(cell: str, batches: list[int], lengths: list[int], scratch: Path, flag: bool) -> EngineConfig:
    """An engine with room for these batches, or one of these prompts."""
    shape, method = CELLS[cell]
    base = scratch if shape == "smollm2" else SHAPES
    head = (
        {}
        if method["speculative_algorithm"] == "NONE"
        else {"speculative_draft_model_path": str(base / f"{shape}-eagle3")}
    )
    tokens = max(16 * PAGES_PER_SLOT * (max(batches) + 2), max(lengths, default=0) + 1024)
    return EngineConfig(
        model_path=str(base / shape),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_running_requests=max(batches),
        max_total_tokens=tokens,
        context_length=max(2048, *lengths, 0) + 512,
        enable_deterministic_inference=flag,
        **method,
        **head,
    )


def measure(cell: str, batches: list[int], lengths: list[int], rounds: int, scratch: Path) -> list[dict[str, Any]]:
    """All batch sizes and prompts of one cell."""
    prompts = [row["prompt_ids"] for row in json.loads(ROWS.read_text())["rows"]]
    engines = {flag: built(config_of(cell, batches, lengths, scratch, flag)) for flag in (False, True)}
    found: dict[tuple[str, int], dict[bool, list[float]]] = {}
    for turn in range(rounds):
        for batch in batches:
            for flag in (False, True) if turn % 2 else (True, False):
                executor, geometry = engines[flag]
                fill(executor, geometry.width, prompts, batch)
                plan = StepPlan(0, geometry.width, list(range(batch)))
                steps(executor, plan, 5, ahead=True)
                times = found.setdefault(("step", batch), {False: [], True: []})
                times[flag].append(steps(executor, plan, STEPS, ahead=True))
        for length in lengths:
            for flag in (False, True) if turn % 2 else (True, False):
                times = found.setdefault(("prompt", length), {False: [], True: []})
                times[flag].append(prompt_ms(*engines[flag], length))
    for executor, _ in engines.values():
        executor.close()
    rows = []
    for (kind, size), times in found.items():
        off, on = (statistics.median(times[flag]) for flag in (False, True))
        row = {"cell": cell, "kind": kind, "size": size, "off_ms": off, "on_ms": on, "price": round(on / off, 3)}
        print(json.dumps(row), flush=True)
        rows.append(row | {"rounds": {"off": times[False], "on": times[True]}})
    return rows


def built(config: EngineConfig) -> tuple[Executor, Geometry]:
    """An engine that has captured its graphs."""
    settings, _ = resolve(config, resolve_model(config), MACHINE)
    executor, geometry, _ = build(settings, lambda done, total: None)
    warm_up(executor, geometry, cuda_prompt_lengths(geometry))
    capture_graphs(executor, geometry, settings.graph_batch_sizes)
    return executor, geometry


def prompt_ms(executor: Executor, geometry: Geometry, length: int) -> float:
    """Milliseconds until the first token of a prompt, chunk after chunk."""
    ids = [(7 * index) % 1000 + 100 for index in range(length)]
    pages = list(range(1, 2 + length // geometry.page_size))
    torch.cuda.synchronize()
    started = time.perf_counter()
    for start in range(0, length, geometry.max_chunk):
        chunk = ids[start : start + geometry.max_chunk]
        end = start + len(chunk)
        work = ChunkWork(0, start, array("i", chunk).tobytes(), ids[end] if end < length else -1)
        first = {"new_pages": {0: pages}, "resets": {0: ResetSlot(SamplingParams(seed=0), length, (), length)}}
        plan = StepPlan(0, geometry.width, chunks=[work], **({} if start else first))
        result = executor.launch(plan)
    result.wait()
    torch.cuda.synchronize()
    return round(1000 * (time.perf_counter() - started), 3)


if __name__ == "__main__":
    main()
