"""What --enable-deterministic-inference costs on a GPU: decode steps and prompts, with it and without it, in turns.

    python benchmarks/deterministic_price.py --output benchmarks/results/deterministic_price_h200.json
    python benchmarks/deterministic_price.py --cells "8B plain" "8B chain" --rounds 3 --seconds 75 --output FILE

For each cell two engines are built in one process, without server and scheduler, on the same chats (`step_profile`). A
round times each of them once at every size, which of them first by turns; what is reported is the median of the rounds,
and their ratio. So the price is that of the flag at one commit (`before_after.py` compares commits). Weights are drawn:
bits of answers mean nothing here, times do. Cells stand in the order of their weight. FILE is written after each cell;
with the same code, the next run leaves out what is in it.
"""

import argparse
import json
import statistics
import tempfile
import time
from array import array
from dataclasses import dataclass
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
STEPS = 30  # of one measurement
LEAST_S = 30.0  # that a cell takes; with less left, none is begun


@dataclass(frozen=True)
class Cell:
    """Two engines of one shape. `prompts`: lengths, of which the time to the first token is measured."""

    shape: str
    method: dict[str, Any]
    prompts: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1, 8, 32, 128)


CELLS = {
    "8B plain": Cell("llama-3.1-8b", PLAIN, (8192, 32768)),
    "8B chain": Cell("llama-3.1-8b", CHAIN),
    "SmolLM2 plain": Cell("smollm2", PLAIN, (8192,)),
    "8B plain, fp8": Cell("llama-3.1-8b", PLAIN | {"quantization": "fp8"}, (8192,)),
    "SmolLM2 chain": Cell("smollm2", CHAIN),
    # Without the flag these are trees; with it they are chains.
    "8B, default numbers": Cell("llama-3.1-8b", {"speculative_algorithm": "EAGLE3"}, batches=(1, 8, 32)),
    "SmolLM2, default numbers": Cell("smollm2", {"speculative_algorithm": "EAGLE3"}, batches=(1, 8, 32)),
}


def main() -> None:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no further cell is begun")
    arguments = parser.parse_args()
    become_a_worker(config_of("8B plain", SHAPES, False))
    run = describe_run(torch.cuda.get_device_name(), torch.get_num_threads())
    rows = measured_before(arguments.output, run)
    with tempfile.TemporaryDirectory() as scratch:
        write_small_shapes(Path(scratch))
        for cell in arguments.cells:
            left = begun + arguments.seconds - time.monotonic()
            if left < LEAST_S or any(row["cell"] == cell for row in rows):
                continue
            rows += measure(cell, arguments.rounds, Path(scratch), begun + arguments.seconds)
            if arguments.output:
                write_report(arguments.output, {"benchmark": "deterministic_price", "run": run, "rows": rows})


def measured_before(output: str | None, run: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run of the same code on the same device."""
    if output is None or not Path(output).exists():
        return []
    report = json.loads(Path(output).read_text())
    same = all(report["run"][name] == run[name] for name in ("device", "versions", "source"))
    found: list[dict[str, Any]] = report["rows"] if same else []
    return found


def write_small_shapes(scratch: Path) -> None:
    """Configurations of SmolLM2's sizes, made of those of the 1B."""
    for name, own in (("llama-3.2-1b", OF_TARGET), ("llama-3.2-1b-eagle3", OF_HEAD)):
        values = json.loads((SHAPES / name / "config.json").read_text()) | SMOL | own
        directory = scratch / name.replace("llama-3.2-1b", "smollm2")
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(values))


def config_of(name: str, scratch: Path, flag: bool) -> EngineConfig:
    """An engine with room for a cell's batches, or one of its prompts."""
    cell = CELLS[name]
    base, most = scratch if cell.shape == "smollm2" else SHAPES, max(cell.batches)
    plain = cell.method["speculative_algorithm"] == "NONE"
    head = {} if plain else {"speculative_draft_model_path": str(base / f"{cell.shape}-eagle3")}
    tokens = max(16 * PAGES_PER_SLOT * (most + 2), max(cell.prompts, default=0) + 1024)
    return EngineConfig(
        model_path=str(base / cell.shape),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_running_requests=most,
        cuda_graph_bs=cell.batches,
        max_total_tokens=tokens,
        context_length=max(2048, *cell.prompts, 0) + 512,
        enable_deterministic_inference=flag,
        **cell.method,
        **head,
    )


def measure(name: str, rounds: int, scratch: Path, ends_at: float) -> list[dict[str, Any]]:
    """All sizes of one cell. Rounds end at `ends_at`, but for the first."""
    prompts = [row["prompt_ids"] for row in json.loads(ROWS.read_text())["rows"]]
    engines = {flag: built(config_of(name, scratch, flag)) for flag in (False, True)}
    found: dict[tuple[str, int], dict[bool, list[float]]] = {}
    longest = 0.0
    for turn in range(rounds):
        began = time.monotonic()
        if began + longest > ends_at:
            break
        for flag in (False, True) if turn % 2 else (True, False):
            for size, times in one_round(*engines[flag], CELLS[name], prompts).items():
                found.setdefault(size, {False: [], True: []})[flag].append(times)
        longest = time.monotonic() - began
    widths = {flag: geometry.width for flag, (_, geometry) in engines.items()}
    for executor, _ in engines.values():
        executor.close()
    rows = []
    for (kind, size), times in found.items():
        off, on = (statistics.median(times[flag]) for flag in (False, True))
        row = {"cell": name, "kind": kind, "size": size, "off_ms": off, "on_ms": on, "price": round(on / off, 3)}
        if widths[False] != widths[True]:
            row["widths"] = {"off": widths[False], "on": widths[True]}
        print(json.dumps(row), flush=True)
        rows.append(row | {"rounds": {"off": times[False], "on": times[True]}})
    return rows


def one_round(
    executor: Executor, geometry: Geometry, cell: Cell, prompts: list[list[int]]
) -> dict[tuple[str, int], float]:
    """Milliseconds of a step and of a prompt, by kind and size."""
    fill(executor, geometry.width, prompts, max(cell.batches))
    found = {}
    for batch in cell.batches:
        plan = StepPlan(0, geometry.width, list(range(batch)))
        steps(executor, plan, 5, ahead=True)
        found["step", batch] = steps(executor, plan, STEPS, ahead=True)
    for length in cell.prompts:
        found["prompt", length] = prompt_ms(executor, geometry, length)
    return found


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
