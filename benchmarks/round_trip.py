"""Measures the time from a step's tokens to the launch of the step that depends on them, without a GPU or a model.

    python benchmarks/round_trip.py --output benchmarks/results/round_trip_HOST.json

Processes and links are real: a scheduler, a worker whose device takes a given time per step, and this process as the
tokenizer. The answer to step N is step N + depth. `answer_us`: from the end of step N on the device to the launch of
its answer. `beyond_us`: step time minus device time; at depth 1 this is all of `answer_us`, at depth 2 it is zero if
answers come in time.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.config import EngineConfig, Machine, ModelFiles, Settings, encode_settings
from overlap_spec.config.resolve import SPIN_CORES, SPIN_S, resolve
from overlap_spec.messages import (
    Admit,
    EngineLimits,
    Phase,
    SamplingParams,
    Shutdown,
    StepPlan,
    StepResult,
    ToFrontend,
    TokenDeltas,
    ToWorker,
    WorkerReady,
)
from overlap_spec.runtime.actor import ActorContext
from overlap_spec.runtime.machine import inspect
from overlap_spec.runtime.run_directory import RunDirectory
from overlap_spec.runtime.step_link import SpinPolicy
from overlap_spec.worker.hooks import Hooks
from overlap_spec.worker.loop import Worker
from overlap_spec.worker.step import HostTimes

WARM_STEPS, PROMPT_TOKENS = 50, 16
ACTOR = (sys.executable, "-m", "overlap_spec.runtime.actor")
CASE, FIGURES = "case.json", "figures.json"


class FakeStep:
    """A step that is done at a given time."""

    def __init__(self, plan: StepPlan, host: HostTimes, done: float) -> None:
        self._plan = plan
        self.host = host
        self.done = done

    def ready(self) -> bool:
        return time.monotonic() >= self.done

    def wait(self) -> StepResult:
        batch = len(self._plan.rows)
        return StepResult(self._plan.step_id, [[7]] * batch, [0] * batch, 0.0)


class FakeLaunch:
    """Enqueued at once."""

    def __init__(self, handle: FakeStep) -> None:
        self.handle = handle
        self.handles = (handle,)

    def advance(self) -> bool:
        return True


class FakeExecutor:
    """A device that takes `step_s` per step, one after another, behind an executor's interface."""

    hooks = Hooks()

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._free = 0.0
        self.decode_steps: list[FakeStep] = []

    def start(self, plan: StepPlan, on_published: Callable[[Any], None], received: float) -> FakeLaunch:
        now = time.monotonic()
        self._free = max(now, self._free) + self._step_s
        step = FakeStep(plan, HostTimes(received, now), self._free)
        if plan.phase is Phase.DECODE:
            self.decode_steps.append(step)
        on_published(step)
        return FakeLaunch(step)


async def main(context: ActorContext) -> None:
    """The worker process (`overlap_spec.runtime.actor` calls it)."""
    run_dir = context.endpoints.run_dir
    inbox, scheduler = context.step_inbox(ToWorker), context.outlet("scheduler")
    slots = context.settings.scheduler.max_running_requests
    scheduler.send(WorkerReady(slots, slots * 1000, 16, 8192, 1, 2, 0, 1000, 8192))
    case = json.loads((run_dir / CASE).read_text())
    executor = FakeExecutor(case["step_us"] / 1e6)
    results = context.step_outlet("scheduler")
    Worker(executor, inbox, results, SpinPolicy(context.settings.spin_s)).run()  # a fake
    (run_dir / FIGURES).write_text(json.dumps([(step.host.launch_begin, step.done) for step in executor.decode_steps]))


def settings_for(batch: int, depth: int, spin: bool) -> Settings:
    files = ModelFiles(
        weights="", config={}, tokenizer_dir=None, eos_token_ids=(), context_length=8192, vocab_size=1000
    )
    config = EngineConfig(max_running_requests=batch, disable_overlap_schedule=depth == 1, disable_radix_cache=True)
    settings, _ = resolve(config, files, Machine(1, False))
    return msgspec.structs.replace(settings, spin_s=SPIN_S if spin else 0.0, log_level="warning")


async def serve(context: ActorContext, batch: int, steps: int) -> None:
    """Be the frontend: wait for the engine, run the requests to their end, and say that it is over."""
    inbox, scheduler, worker = (
        context.step_inbox(ToFrontend, spins=False),
        context.outlet("scheduler"),
        context.outlet("worker"),
    )
    while not isinstance(await inbox.recv(), EngineLimits):
        pass
    prompt = array("i", [1] * PROMPT_TOKENS).tobytes()
    for uid in range(batch):
        scheduler.send(Admit(uid, prompt, SamplingParams(max_new_tokens=steps, seed=0), (), 0.0))
    running = batch
    while running:
        message = await inbox.recv()
        if isinstance(message, TokenDeltas):
            running -= sum(finish is not None for finish in message.finishes)
    worker.send(Shutdown(False))
    scheduler.send(Shutdown(False))


def measure(batch: int, depth: int, step_us: int, steps: int, spin: bool) -> dict[str, Any]:
    """One run, from start to end of the processes."""
    directory = RunDirectory()
    settings = settings_for(batch, depth, spin)
    (directory.path / CASE).write_text(json.dumps({"step_us": step_us}))
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    roles = {"scheduler": "overlap_spec.scheduler.scheduler_actor", "worker": Path(__file__).stem}
    context = ActorContext("frontend", settings, directory.path)
    children = [
        subprocess.Popen(
            [*ACTOR, role, module, str(directory.path), "0", str(os.getpid())],
            env=environment,
            stdin=subprocess.PIPE,
        )
        for role, module in roles.items()
    ]
    for child in children:
        assert child.stdin is not None
        with child.stdin as pipe:
            pipe.write(encode_settings(settings))
    try:
        asyncio.run(asyncio.wait_for(serve(context, batch, steps), 120))
        assert [child.wait(10) for child in children] == [0, 0]
        times = json.loads((directory.path / FIGURES).read_text())[WARM_STEPS:-4]
    finally:
        for child in children:
            child.kill()
            child.wait()
        context.close()
        directory.remove()
    return {"batch": batch, "depth": depth, "device_us": step_us, "polls": spin, **figures(times, depth, step_us)}


def figures(times: list[tuple[float, float]], depth: int, step_us: int) -> dict[str, float]:
    """Microseconds, of `times` = (launched, done) of successive decode steps."""
    answers = sorted(1e6 * (times[i + depth][0] - times[i][1]) for i in range(len(times) - depth))
    step = 1e6 * (times[-1][1] - times[0][1]) / (len(times) - 1)
    return {
        "answer_us": round(statistics.median(answers), 1),
        "answer_p90_us": round(answers[len(answers) * 9 // 10], 1),
        "beyond_us": round(step - step_us, 1),
    }


def run() -> None:
    """Measure every case that this machine has the cores for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--poll", action="store_true", help="poll, too, where an engine would not: cores are few")
    arguments = parser.parse_args()
    num_cores = inspect().num_cores
    polling = (False, True) if arguments.poll or num_cores >= SPIN_CORES else (False,)
    rows = []
    for spin in polling:
        for batch in (1, 64):
            for depth, step_us in ((1, 400), (1, 1000), (2, 400)):
                rows.append(measure(batch, depth, step_us, arguments.steps, spin))
                print(rows[-1], flush=True)
    if arguments.output:
        facts = describe_run("none", num_cores)
        write_report(arguments.output, {"benchmark": "round_trip", "run": facts, "figures": rows})


if __name__ == "__main__":
    run()
