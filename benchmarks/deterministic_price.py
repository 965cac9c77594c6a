"""What --enable-deterministic-inference costs on a GPU: decode steps and prompts, with it and without it, in turns.

    python benchmarks/deterministic_price.py --output benchmarks/results/deterministic_price_h200.json
    python benchmarks/deterministic_price.py --cells "8B plain" "8B chain" --rounds 3 --seconds 75 --output FILE
    python benchmarks/deterministic_price.py --before TREE --output FILE    beside a tree from before there was the flag
    python benchmarks/deterministic_price.py --cells "Qwen3.5-9B plain" --output FILE      where layers recur, 90 s

For each cell two engines are built, each in a process of its own, without server and scheduler, on the same chats
(`step_profile`). A round asks each of them once for every size, which of them first by turns, while the others wait;
what is reported is the median of the rounds, and their ratio: the price of the flag at one commit. TREE, with
`overlap_spec/` and `kernels/` of another commit, has a third engine on the same GPU. Where layers recur, requests also
go on behind what the prefix cache has of a prompt of 8,192 tokens (`AGAIN`): with the flag output is taken token by
token when it is computed again. Weights are drawn: bits of answers
mean nothing here, times do. Cells stand in the order of their weight. FILE is written after each cell; with the same
code, the next run leaves out what is in it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Mapping
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
from overlap_spec.runtime.source import git_hash
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
OTHER = ("overlap_spec/models", "overlap_spec/speculative", "overlap_spec/worker", "kernels/overlap_spec_kernels")
Times = dict[tuple[str, int], float]  # milliseconds by kind and size


@dataclass(frozen=True)
class Cell:
    """Two engines of one shape. `prompts`: lengths, of which the time to the first token is measured.

    `recurs`: so does that of requests which go on behind a cached prompt; measured if it is asked for.
    """

    shape: str
    method: dict[str, Any]
    prompts: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1, 8, 32, 128)
    recurs: bool = False


CELLS = {
    "8B plain": Cell("llama-3.1-8b", PLAIN, (8192, 32768)),
    "8B chain": Cell("llama-3.1-8b", CHAIN),
    "SmolLM2 plain": Cell("smollm2", PLAIN, (8192,)),
    "8B plain, fp8": Cell("llama-3.1-8b", PLAIN | {"quantization": "fp8"}, (8192,)),
    "8B chain, fp8": Cell("llama-3.1-8b", CHAIN | {"quantization": "fp8"}),
    "SmolLM2 chain": Cell("smollm2", CHAIN),
    # Without the flag these are trees; with it they are chains.
    "8B, default numbers": Cell("llama-3.1-8b", {"speculative_algorithm": "EAGLE3"}, batches=(1, 8, 32)),
    "SmolLM2, default numbers": Cell("smollm2", {"speculative_algorithm": "EAGLE3"}, batches=(1, 8, 32)),
    "Qwen3.5-9B plain": Cell("qwen3.5-9b", PLAIN | {"disable_radix_cache": True}, batches=(1, 8), recurs=True),
}
CACHED = 8192 - 64  # tokens: the last chunk of a prompt is computed again for its last token
AGAIN = {  # tokens of a request, and how many of them are its output
    "turn": (8192 + 300 + 200, 0),  # an answer, which is the prompt's now, and what is said then
    "preempted": (8192 + 300, 300),
}
TRIES = 9  # of a request, whose median is of a round


def main() -> None:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    asked = [name for name, cell in CELLS.items() if not cell.recurs]
    parser.add_argument("--cells", nargs="*", default=asked, choices=list(CELLS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no further cell is begun")
    parser.add_argument("--before", help="the root of another commit's tree")
    parser.add_argument("--answer", choices=["off", "on"], help=argparse.SUPPRESS)  # as the process of an engine
    arguments = parser.parse_args()
    become_a_worker(config_of("8B plain", SHAPES, False))
    if arguments.answer:
        answer(arguments.answer == "on")
        return
    run = describe_run(torch.cuda.get_device_name(), torch.get_num_threads())
    engines = {"off": Engine("off"), "on": Engine("on")}
    if arguments.before:
        run["before"] = {part: git_hash(Path(arguments.before) / part) for part in OTHER}
        engines["before"] = Engine("off", arguments.before)
    rows = measured_before(arguments.output, run)
    for cell in arguments.cells:
        left = begun + arguments.seconds - time.monotonic()
        if left < LEAST_S or any(row["cell"] == cell for row in rows):
            continue
        rows += measure(cell, engines, arguments.rounds, begun + arguments.seconds)
        if arguments.output:
            write_report(arguments.output, {"benchmark": "deterministic_price", "run": run, "rows": rows})
    for engine in engines.values():
        engine.close()


def measured_before(output: str | None, run: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run of the same code on the same device."""
    if output is None or not Path(output).exists():
        return []
    report = json.loads(Path(output).read_text())
    same = all(report["run"].get(name) == run.get(name) for name in ("device", "versions", "source", "before"))
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
    prompts = (*cell.prompts, *(length for length, _ in AGAIN.values())) if cell.recurs else cell.prompts
    tokens = max(16 * PAGES_PER_SLOT * (most + 2), max(prompts, default=0) + 1024)
    return EngineConfig(
        model_path=str(base / cell.shape),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_running_requests=most,
        cuda_graph_bs=cell.batches,
        max_total_tokens=tokens,
        context_length=max(2048, *prompts, 0) + 512,
        **({"enable_deterministic_inference": True} if flag else {}),  # which another tree may not know
        **cell.method,
        **head,
    )


class Engine:
    """The engine of a cell after another, in a process that answers a line for each line that it gets."""

    def __init__(self, flag: str, tree: str = "") -> None:
        paths = [*([tree, f"{tree}/kernels"] if tree else []), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, __file__, "--answer", flag]
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, cell: str = "") -> None:
        """For a round, or for another cell's engine."""
        assert self._process.stdin is not None
        print(cell, file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """The width of a cell's steps, or (kind, size, milliseconds) of a round."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()  # the end of its input is that of the process


def answer(flag: bool) -> None:
    """As the process of `Engine`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed does not stand between them
    prompts = [row["prompt_ids"] for row in json.loads(ROWS.read_text())["rows"]]
    engine: tuple[Executor, Geometry] | None = None
    with tempfile.TemporaryDirectory() as scratch:
        write_small_shapes(Path(scratch))
        for line in sys.stdin:
            if asked := line.strip():
                cell = CELLS[asked]
                if engine is not None:
                    engine[0].close()
                    engine = None
                    torch.cuda.empty_cache()  # for other processes
                engine = built(config_of(asked, Path(scratch), flag))
                print(engine[1].width, file=answers, flush=True)
            else:
                assert engine is not None
                times = one_round(*engine, cell, prompts, flag)
                print(json.dumps([[*at, ms] for at, ms in times.items()]), file=answers, flush=True)


def measure(name: str, engines: Mapping[str, Engine], rounds: int, ends_at: float) -> list[dict[str, Any]]:
    """All sizes of one cell. Rounds end at `ends_at`, but for the first."""
    for engine in engines.values():
        engine.ask(name)
    widths = {of: engine.answer() for of, engine in engines.items()}
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    longest = 0.0
    for turn in range(rounds):
        began = time.monotonic()
        if began + longest > ends_at:
            break
        for of in list(engines)[:: 1 if turn % 2 else -1]:
            engines[of].ask()
            for kind, size, ms in engines[of].answer():
                found.setdefault((kind, size), {each: [] for each in engines})[of].append(ms)
        longest = time.monotonic() - began
    rows = [row_of(name, *at, times, widths) for at, times in found.items()]
    for row in rows:
        print(json.dumps({key: value for key, value in row.items() if key != "rounds"}), flush=True)
    return rows


def row_of(
    name: str, kind: str, size: int, rounds: dict[str, list[float]], widths: Mapping[str, int]
) -> dict[str, Any]:
    """Medians, and their ratios: `price`, on over off; `to_before`, on and off over the other tree's."""
    medians = {of: statistics.median(times) for of, times in rounds.items()}
    row: dict[str, Any] = {"cell": name, "kind": kind, "size": size, **{f"{of}_ms": ms for of, ms in medians.items()}}
    row["price"] = round(medians["on"] / medians["off"], 3)
    if "before" in medians:
        row["to_before"] = {of: round(medians[of] / medians["before"], 3) for of in ("off", "on")}
    if len(set(widths.values())) > 1:
        row["widths"] = dict(widths)
    return row | {"rounds": rounds}


def one_round(executor: Executor, geometry: Geometry, cell: Cell, prompts: list[list[int]], flag: bool) -> Times:
    """Of a step, of a prompt, and of requests that go on."""
    fill(executor, geometry.width, prompts, max(cell.batches))
    found: Times = {}
    for batch in cell.batches:
        plan = StepPlan(0, geometry.width, list(range(batch)))
        steps(executor, plan, 5, ahead=True)
        found["step", batch] = steps(executor, plan, STEPS, ahead=True)
    for length in cell.prompts:
        found["prompt", length] = prompt_ms(executor, geometry, length)
    for kind, (length, num_output) in AGAIN.items() if cell.recurs else ():
        prompt_ms(executor, geometry, length)
        tries = [prompt_ms(executor, geometry, length, CACHED, num_output * flag) for _ in range(TRIES)]
        found[kind, length - CACHED] = statistics.median(tries)
    return found


def built(config: EngineConfig) -> tuple[Executor, Geometry]:
    """An engine that has captured its graphs."""
    settings, _ = resolve(config, resolve_model(config), MACHINE)
    executor, geometry, _ = build(settings, lambda done, total: None)
    warm_up(executor, geometry, cuda_prompt_lengths(geometry))
    capture_graphs(executor, geometry, settings.graph_batch_sizes)
    return executor, geometry


def prompt_ms(executor: Executor, geometry: Geometry, length: int, begin: int = 0, num_drawn: int = 0) -> float:
    """Milliseconds until the first token of a prompt, chunk after chunk.

    `begin`: how much of it the prompt before has left there. `num_drawn`: of its end, computed as windows.
    """
    ids = [(7 * index) % 1000 + 100 for index in range(length)]
    pages = list(range(1, 2 + length // geometry.page_size))
    torch.cuda.synchronize()
    started = time.perf_counter()
    for start in range(begin, length, geometry.max_chunk):
        chunk = ids[start : start + geometry.max_chunk]
        end = start + len(chunk)
        drawn = {"num_drawn": num_drawn} if num_drawn else {}  # which another tree may not know
        work = ChunkWork(0, start, array("i", chunk).tobytes(), ids[end] if end < length else -1, **drawn)
        first = {"new_pages": {0: pages}, "resets": {0: ResetSlot(SamplingParams(seed=0), length, (), length)}}
        plan = StepPlan(0, geometry.width, chunks=[work], **({} if start else first))
        result = executor.launch(plan)
    result.wait()
    torch.cuda.synchronize()
    return round(1000 * (time.perf_counter() - started), 3)


if __name__ == "__main__":
    main()
