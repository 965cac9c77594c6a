"""Profiles a decode step on a GPU, without server and scheduler: step time, and the share of each kernel.

    python benchmarks/step_profile.py --output benchmarks/results/step_profile_h200.json
    python benchmarks/step_profile.py --batch-sizes 8 --model-path benchmarks/shapes/llama-3.1-8b --load-format dummy ..
    python benchmarks/step_profile.py --width 1 --model-path ..     what a draft costs while steps are plain

Without an engine's flags: SmolLM2 in bfloat16 with decode graphs, plain and EAGLE-3 (3, 1, 4). Prompts of tests/data.

A kernel that is a dependent launch begins while the previous one still runs, and waits for it, so its duration is more
than its cost. So kernels are sorted by their ends, and each is charged from the end of the previous one, or from its
own begin if that is later; the time between those two is idle. Charges and idle time add up to the step:

    kernel a   |-----------|                 charged |-----------|
    kernel b        |...wait...|--|                              |--|
    kernel c                            |--|                          |--|      idle: between b's end and c's begin
"""

import argparse
import json
import os
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.config import EngineConfig, Machine, child_environment
from overlap_spec.config.resolve import resolve, without_speculation
from overlap_spec.entrypoints.cli.flags import add_engine_flags, engine_config
from overlap_spec.hub import resolve_model
from overlap_spec.messages import ChunkWork, ResetSlot, SamplingParams, StepPlan
from overlap_spec.worker.build import build
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.warmup import capture_graphs, cuda_prompt_lengths, warm_up

ROWS = Path(__file__).parent.parent / "tests/data/greedy64.json"
PAGES_PER_SLOT, STEPS, PROFILED = 40, 50, 20
MACHINE = Machine(8, has_cuda=True)
LARGEST = 20  # kernels that a report lists by name


class Ran(NamedTuple):
    """A kernel or a copy. `begin`, `end`: microseconds on the device."""

    name: str
    begin: float
    end: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    parser.add_argument("--batch-sizes", default="1,64")
    parser.add_argument("--width", type=int, help="of the steps, of those that the engine has; otherwise its widest")
    add_engine_flags(parser)
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batch_sizes.split(",")]
    prompts = [row["prompt_ids"] for row in json.loads(ROWS.read_text())["rows"]]
    ours = {
        "max_running_requests": max(batches),
        "max_total_tokens": 16 * PAGES_PER_SLOT * (max(batches) + 2),
        "skip_tokenizer_init": True,
    }
    config = engine_config(arguments, **ours)
    become_a_worker(config)
    nothing_asked = config == EngineConfig(**ours)
    configs = (without_speculation(config), config) if nothing_asked else (config,)
    figures = [row for config in configs for row in measure(config, prompts, batches, arguments.width)]
    if arguments.output:
        run = describe_run(torch.cuda.get_device_name(), torch.get_num_threads())
        write_report(arguments.output, {"benchmark": "step_profile", "run": run, "figures": figures})


def become_a_worker(config: EngineConfig) -> None:
    """Start again in the environment of a worker, which torch reads when it is imported."""
    settings, _ = resolve(config, resolve_model(config), MACHINE)
    wanted = child_environment(settings, "worker")
    if wanted != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], wanted)


def measure(
    config: EngineConfig, prompts: list[list[int]], batches: list[int], asked: int | None = None
) -> list[dict[str, Any]]:
    """All batch sizes of one engine. `asked`: the width of the steps."""
    settings, _ = resolve(config, resolve_model(config), MACHINE)
    executor, geometry, _ = build(settings, lambda done, total: None)
    warm_up(executor, geometry, cuda_prompt_lengths(geometry))
    capture_s = sum(capture_graphs(executor, geometry, settings.graph_batch_sizes).seconds.values())
    width = asked or geometry.width
    if width not in geometry.step_widths:
        raise SystemExit(f"--width {width}: this engine has steps of {', '.join(map(str, geometry.step_widths))}")
    rows = []
    for batch in batches:
        fill(executor, geometry.width, prompts, batch)
        plan = StepPlan(0, width, list(range(batch)))
        steps(executor, plan, 10, ahead=True)
        row = {"method": settings.spec.method, "batch": batch, "width": width, "capture_s": capture_s}
        row["step_ms"] = steps(executor, plan, STEPS, ahead=True)
        row["one_at_a_time_ms"] = steps(executor, plan, STEPS, ahead=False)
        rows.append(row | kernels(executor, plan))
        print_row(rows[-1])
    executor.close()
    return rows


def fill(executor: Executor, width: int, prompts: list[list[int]], batch: int) -> None:
    """Put a chat into each slot."""
    for slot in range(batch):
        ids = prompts[slot % len(prompts)]
        reset = ResetSlot(SamplingParams(temperature=0.0, seed=0), len(ids), (), len(ids))
        pages = list(range(1 + slot * PAGES_PER_SLOT, 1 + (slot + 1) * PAGES_PER_SLOT))
        chunk = ChunkWork(slot, 0, array("i", ids).tobytes())
        executor.launch(StepPlan(0, width, [], {slot: pages}, [chunk], {slot: reset})).wait()


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
    """Wall time and graph nodes per step, and the kernels that take most of it. A profiler slows the host: see idle."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps(executor, plan, PROFILED, ahead=True)
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return charges([Ran(event.name, event.time_range.start, event.time_range.end) for event in events], PROFILED)


def charges(ran: Iterable[Ran], num_steps: int, most: int = LARGEST) -> dict[str, Any]:
    """See the module's docstring. Everything is per step. `most`: kernels that are listed by name."""
    in_order = sorted(ran, key=lambda kernel: kernel.end)
    wall = in_order[-1].end - min(kernel.begin for kernel in in_order)
    charged: dict[str, float] = defaultdict(float)
    nodes: dict[str, int] = defaultdict(int)
    before, idle = min(kernel.begin for kernel in in_order), 0.0
    for kernel in in_order:
        begin = max(kernel.begin, before)
        idle += begin - before
        charged[kernel.name] += kernel.end - begin
        nodes[kernel.name] += 1
        before = kernel.end
    largest = sorted(charged, key=lambda name: -charged[name])
    return {
        "profiled_step_us": round(wall / num_steps, 1),
        "idle_us": round(idle / num_steps, 1),
        "nodes": round(len(in_order) / num_steps, 1),
        "kernels": [
            {
                "name": name[:100],
                "nodes": round(nodes[name] / num_steps, 1),
                "us": round(charged[name] / num_steps, 1),
                "share": round(charged[name] / wall, 4),
            }
            for name in largest[:most]
        ],
    }


def print_row(row: dict[str, Any]) -> None:
    """What there is to see of one engine and batch size."""
    print(f"\n{row['method']}, batch {row['batch']}: {row['step_ms']:.3f} ms a step, {row['nodes']:g} nodes;", end=" ")
    print(f"{row['one_at_a_time_ms']:.3f} ms one at a time; captured in {row['capture_s']:.1f} s")
    print(f"{'us':>8} {'share':>6} {'nodes':>6}  profiled: {row['profiled_step_us']:.1f} us a step")
    for kernel in row["kernels"]:
        print(f"{kernel['us']:8.1f} {kernel['share']:6.1%} {kernel['nodes']:6g}  {kernel['name'][:80]}")
    print(f"{row['idle_us']:8.1f} {row['idle_us'] / row['profiled_step_us']:6.1%}         nothing", flush=True)


if __name__ == "__main__":
    main()
