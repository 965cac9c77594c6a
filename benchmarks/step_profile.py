"""Where a decode step's time goes on a GPU, without server and scheduler: step time, and kernel time by name.

    python benchmarks/step_profile.py --output benchmarks/results/step_profile_h200.json

SmolLM2 in bfloat16 with decode graphs, plain and EAGLE-3 (3, 1, 4), batch 1 and 64, prompts of tests/data.
"""

import argparse
import json
import time
from array import array
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.config import EngineConfig, Machine
from overlap_spec.hub import resolve_model
from overlap_spec.messages import Phase, ResetSlot, SamplingParams, SlotWork, StepPlan
from overlap_spec.resolve import resolve, without_speculation
from overlap_spec.worker.build import build
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.warmup import capture_graphs, cuda_prompt_lengths, warm_up

ROWS = Path(__file__).parent.parent / "tests/data/greedy64.json"
PAGES_PER_SLOT, STEPS, PROFILED = 40, 50, 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    prompts = [row["prompt_ids"] for row in json.loads(ROWS.read_text())["rows"]]
    config = EngineConfig(max_running_requests=64, max_total_tokens=200_000)
    figures = [row for asked in (without_speculation(config), config) for row in measure(asked, prompts)]
    run = describe_run(torch.cuda.get_device_name(), torch.get_num_threads(), arguments.commit)
    run["command"] = f"python benchmarks/step_profile.py --output {arguments.output}"
    write_report(arguments.output, {"benchmark": "step_profile", "run": run, "figures": figures})


def measure(config: EngineConfig, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Both batch sizes of one engine."""
    settings, _ = resolve(config, resolve_model(config), Machine(8, has_cuda=True))
    executor, geometry, _ = build(settings, lambda done, total: None)
    warm_up(executor, geometry, cuda_prompt_lengths(geometry))
    capture_s = capture_graphs(executor, geometry, settings.graph_batch_sizes)
    rows = []
    for batch in (1, 64):
        fill(executor, geometry.width, prompts, batch)
        plan = StepPlan(0, Phase.DECODE, [SlotWork(slot) for slot in range(batch)], geometry.width)
        steps(executor, plan, 10, ahead=True)
        row = {"method": settings.spec.method, "batch": batch, "capture_s": capture_s}
        row["step_ms"] = steps(executor, plan, STEPS, ahead=True)
        row["one_at_a_time_ms"] = steps(executor, plan, STEPS, ahead=False)
        rows.append(row | kernels(executor, plan))
        print({name: value for name, value in rows[-1].items() if name != "kernels"}, flush=True)
    executor.close()
    return rows


def fill(executor: Executor, width: int, prompts: list[list[int]], batch: int) -> None:
    """Put a chat into each slot."""
    for slot in range(batch):
        ids = prompts[slot % len(prompts)]
        reset = ResetSlot(SamplingParams(temperature=0.0, seed=0), len(ids), (), len(ids))
        pages = list(range(1 + slot * PAGES_PER_SLOT, 1 + (slot + 1) * PAGES_PER_SLOT))
        work = SlotWork(slot, new_pages=pages, prompt_chunk=array("i", ids).tobytes(), reset=reset)
        executor.launch(StepPlan(0, Phase.PREFILL, [work], width)).wait()


def steps(executor: Executor, plan: StepPlan, count: int, ahead: bool) -> float:
    """Milliseconds a step, all queued at once or each after the last one's result."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    handles = []
    for _ in range(count):
        handles.append(executor.launch(plan))
        if not ahead:
            handles[-1].wait()
    torch.cuda.synchronize()
    return round(1000 * (time.perf_counter() - started) / count, 4)


def kernels(executor: Executor, plan: StepPlan) -> dict[str, Any]:
    """Kernel time and graph nodes per step, and the kernels that take most of it."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps(executor, plan, PROFILED, ahead=True)
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    largest = [
        {"name": e.key[:100], "us": round(e.self_device_time_total / PROFILED, 1), "nodes": e.count / PROFILED}
        for e in events[:20]
    ]
    total = sum(event.self_device_time_total for event in events) / PROFILED
    return {"kernel_us": round(total, 1), "nodes": sum(e.count for e in events) / PROFILED, "kernels": largest}


if __name__ == "__main__":
    main()
