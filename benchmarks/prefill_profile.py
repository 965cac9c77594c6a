"""Profiles prefill steps of the 8B shape on a GPU, without server and scheduler: what a first token's time goes to.

    python benchmarks/prefill_profile.py --output benchmarks/results/prefill_profile_h200.json      about 60 s

The steps are those of the rows of real traffic that wait for prompts. Each is timed alone, its launch included, as
captured or not as in serving; then it is profiled, and its kernels are charged as `step_profile.py` charges them.
"""

import argparse
import re
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from rows.setups import ENGINES
from step_profile import MACHINE, Ran, become_a_worker, charges
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.config.fields import config_from
from overlap_spec.config.resolve import resolve
from overlap_spec.hub import resolve_model
from overlap_spec.messages import ChunkWork, ResetSlot, SamplingParams, StepPlan
from overlap_spec.worker.build import build
from overlap_spec.worker.capture import CudaRecorder
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.warmup import cuda_prompt_lengths, graph_runner, graph_sizes, warm_up

PAGE = 16
CHUNK = 8192
ROUNDS = 3
LONG = 65536  # tokens, whose steps take seconds: one round
GREEDY = SamplingParams(temperature=0.0, seed=0)
GROUPS = {  # what a kernel does, by its name; the first that matches
    "attention": re.compile(r"attention|sdpa|flash|fmha|_combine"),
    "products": re.compile(r"linear|nvjet|gemm|cutlass|packed|dequant|Memset"),  # BLAS clears counters between
}
REST = "rest"


Chunk = tuple[int, int, int, bool]  # slot, start, rows, whether more of the prompt follow
Steps = tuple[tuple[Chunk, ...], ...]


@dataclass(frozen=True)
class Case:
    """Some prefill steps, one after another. `chunks`: of each step."""

    name: str
    row: int  # of real traffic
    chunks: Steps

    @property
    def num_tokens(self) -> int:
        return sum(rows for step in self.chunks for _, _, rows, _ in step)


def long_prompt(num_tokens: int) -> Steps:
    """One prompt, a chunk a step."""
    starts = range(0, num_tokens, CHUNK)
    return tuple(((0, at, min(CHUNK, num_tokens - at), at + CHUNK < num_tokens),) for at in starts)


CASES = (
    Case("32,768 tokens, all chunks", 2, long_prompt(32768)),
    Case("98,304 tokens, all chunks", 2, long_prompt(98304)),
    Case("a chunk of 896 behind 8,192", 3, (((0, 8192, 896, True),),)),
    Case("a chunk of 512 behind 32,768", 3, (((0, 32768, 512, True),),)),
    Case("200 tokens behind 8,192", 7, (((0, 8192, 200, False),),)),
    Case("8 prompts of 128", 15, (tuple((slot, 0, 128, False) for slot in range(8)),)),
    Case("32 prompts of 128", 15, (tuple((slot, 0, 128, False) for slot in range(32)),)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    config = config_from(ENGINES["8B"])
    become_a_worker(config)
    settings, _ = resolve(config, resolve_model(config), MACHINE)
    executor, geometry, _ = build(settings, lambda done, total: None)
    warm_up(executor, geometry, cuda_prompt_lengths(geometry))
    sizes = graph_sizes(executor, geometry, settings.graph_batch_sizes)
    runner = graph_runner(executor, replace(sizes, batches=(), beside=None, placed=()))
    runner.run_once()
    runner.capture(CudaRecorder())
    executor.use(runner)
    run = describe_run(torch.cuda.get_device_name(), torch.get_num_threads())
    figures: list[dict[str, Any]] = []
    for case in CASES:
        figures.append(measure(executor, plans(case, geometry.width), case))
        print_row(figures[-1])
        if arguments.output:
            write_report(arguments.output, {"benchmark": "prefill_profile", "run": run, "figures": figures})
    executor.close()


def plans(case: Case, width: int) -> list[StepPlan]:
    """A plan for each step; a slot's pages are there from its first chunk on."""
    longest = max(start + rows for step in case.chunks for _, start, rows, _ in step)
    pages_each = -(-(longest + width) // PAGE)
    seen: set[int] = set()
    found = []
    for step in case.chunks:
        new = {slot: more for slot, _, _, more in step if slot not in seen}
        seen |= new.keys()
        chunks = [
            ChunkWork(slot, start, array("i", range(1000, 1000 + rows)).tobytes(), 7 if more else -1)
            for slot, start, rows, more in step
        ]
        pages = {slot: list(range(1 + slot * pages_each, 1 + (slot + 1) * pages_each)) for slot in new}
        resets = {slot: ResetSlot(GREEDY, longest + more, (), longest + more) for slot, more in new.items()}
        found.append(StepPlan(0, width, [], pages, chunks, resets))
    return found


def measure(executor: Executor, steps: list[StepPlan], case: Case) -> dict[str, Any]:
    """The best of some rounds, and the groups of kernels of one more."""
    timed(executor, steps)
    rounds = ROUNDS if case.num_tokens < LONG else 1
    total_ms, launch_ms = min(timed(executor, steps) for _ in range(rounds))
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        timed(executor, steps)
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    ran = [Ran(event.name, event.time_range.start, event.time_range.end) for event in events]
    report = charges(ran, 1, most=len(ran))
    row = {"case": case.name, "row": case.row, "tokens": case.num_tokens, "ms": total_ms, "launch_ms": launch_ms}
    row["profiled_ms"], row["idle_ms"] = report["profiled_step_us"] / 1000, report["idle_us"] / 1000
    return row | {f"{group}_ms": round(us / 1000, 3) for group, us in groups(report["kernels"]).items()}


def timed(executor: Executor, steps: list[StepPlan]) -> tuple[float, float]:
    """Milliseconds until all is done, and until all is launched."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for plan in steps:
        executor.launch(plan)
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return round(1000 * (time.perf_counter() - begun), 3), round(1000 * (launched - begun), 3)


def groups(kernels: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Microseconds by what kernels do."""
    found = dict.fromkeys((*GROUPS, REST), 0.0)
    for kernel in kernels:
        group = next((name for name, pattern in GROUPS.items() if pattern.search(kernel["name"])), REST)
        found[group] += kernel["us"]
    return found


def print_row(row: dict[str, Any]) -> None:
    parts = ", ".join(f"{group} {row[f'{group}_ms']:.1f}" for group in (*GROUPS, REST, "idle"))
    print(f"{row['case']:30} {row['ms']:9.2f} ms, launched in {row['launch_ms']:.1f}; {parts}", flush=True)


if __name__ == "__main__":
    main()
