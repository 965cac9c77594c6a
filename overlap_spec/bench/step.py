"""Runs a decode workload with all processes traced: where a step's time goes, and a trace file to view.

Tracing is always on; the records kept are those of one batch of requests, after a warm-up of the same batch.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from overlap_spec.bench.engines import acceptance_of, describe_engine, describe_settings
from overlap_spec.bench.latency import accept_length, settled_stats
from overlap_spec.bench.step_summary import summarise
from overlap_spec.bench.trace_file import write_trace
from overlap_spec.bench.workload import Workload, batch_prompts
from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.messages import Record, SamplingParams, Stats
from overlap_spec.runtime.tracing import CLOCK_ERROR, LAST_STEP_SPLIT, read_records

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class TracedRun:
    """One run's report and its records, by time."""

    report: dict[str, Any]
    records: list[Record]


async def run_step(config: EngineConfig, workload: Workload, trace: str | None) -> dict[str, Any]:
    """Run the first batch size of the workload; write its trace to the file `trace`. Returns the report."""
    run = await traced_run(config, workload)
    if trace is not None:
        about = {"run": run.report["run"], "settings": run.report["settings"], "step": run.report["step"]}
        await asyncio.to_thread(write_trace, trace, run.records, about)
    return run.report


async def traced_run(config: EngineConfig, workload: Workload) -> TracedRun:
    """Start the engine, run the workload, stop the engine, and read the records of its processes."""
    batch = workload.batch_sizes[0]
    config = replace(config, max_running_requests=config.max_running_requests or batch)
    with tempfile.TemporaryDirectory(prefix="overlap-spec-trace-") as directory:
        async with Engine(config, trace_dir=Path(directory)) as engine:
            prompts = batch_prompts(config, workload, engine.settings.model.files.vocab_size)
            await _generate(engine, prompts, WARM_UP_TOKENS, workload.temperature)
            await engine.client.flush_cache()  # otherwise the trace has no prefill
            before = await settled_stats(engine.client)
            begin = time.monotonic()
            num_tokens = await _generate(engine, prompts, workload.num_tokens, workload.temperature)
            wall_s = time.monotonic() - begin
            after = await settled_stats(engine.client)
            report: dict[str, Any] = {"benchmark": "step", "run": describe_engine(engine)}
            report |= {"acceptance": acceptance_of(engine), "workload": workload.describe() | {"batch": batch}}
            report["settings"] = describe_settings(engine)
            report["ceilings"] = engine.facts.worker.ceilings
        everything = read_records(Path(directory))
    records = [record for record in everything if begin <= record.begin <= begin + wall_s]
    figures = {
        "tokens_per_second": round(num_tokens / wall_s, 1),
        "accept_length": round(accept_length(before, after), 3),
        **summarise(records, _floor(before, after)),
    }
    if errors := [record.args["ms"] for record in everything if record.name == CLOCK_ERROR]:
        figures["clock_error_ms"] = errors[-1]
    if splits := [record.args for record in everything if record.name == LAST_STEP_SPLIT]:
        figures["last_step_split_ms"] = splits[-1]
    return TracedRun(report | {"step": figures}, records)


async def _generate(engine: Engine, prompts: Sequence[list[int]], num_tokens: int, temperature: float) -> int:
    """Run all prompts at once. Returns the number of tokens."""
    sampling = SamplingParams(max_new_tokens=num_tokens, temperature=temperature, ignore_eos=True, seed=0)
    answers = await asyncio.gather(*(engine.client.complete(prompt, sampling) for prompt in prompts))
    return sum(len(answer.token_ids) for answer in answers)


def _floor(before: Stats, after: Stats) -> float:
    """The mean lower bound of a decode step's time, in seconds."""
    steps = after.decode_steps_total - before.decode_steps_total
    return (after.decode_floor_total - before.decode_floor_total) / steps if steps else 0.0
