"""`bench methods`: measures every drafting method on one machine in one run, each against plain decoding.

One engine is measured at a time, and stopped before the next. The report of a record that does not run has the reason:
`skipped` (a draft or file that it needs was not given), `refused` (the engine does not support it) or `failed` (an
error).
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any

from msgspec.structs import asdict

from overlap_spec.bench.engines import describe_engine, describe_settings
from overlap_spec.bench.methods_load import repeated, run_load, share_identical, warm_up
from overlap_spec.bench.methods_plan import Cell, Comparison, Job, Session, bounded, groups_of, jobs_of, prompts_of
from overlap_spec.bench.methods_records import (
    PLAIN_RECORD,
    Drafts,
    MethodRecord,
    Skipped,
    check_record,
    config_of,
    in_force,
)
from overlap_spec.bench.workload import Workload, random_prompts
from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError, OverlapSpecError
from overlap_spec.messages import SamplingParams

WARM_UP_ROWS = 1000  # random prompts from here on are never measured
WARM_UP_TOKENS = 8
MEMORY = ("weights_mib", "draft_weights_mib", "kv_bytes_per_token", "draft_kv_bytes_per_token")

Report = dict[str, Any]


async def run_methods(
    config: EngineConfig, workload: Workload, comparison: Comparison, told: Callable[[Report], None]
) -> Report:
    """Measure plain decoding, then every record. `told` is called with the report so far after each of them.

    Raises: OverlapSpecError if plain decoding does not run.
    """
    session = Session(workload, comparison.num_runs, prompts_of(config, workload, comparison.num_prompts))
    config = bounded(config, session)
    lengths = {name: len(prompts) for name, prompts in session.prompts.items()}
    measured = {"num_prompts": lengths, "batch_sizes": session.batch_sizes, "num_runs": session.num_runs}
    report: Report = {"benchmark": "methods", "run": {}, "workload": workload.describe() | measured, "methods": []}
    for group in groups_of(jobs_of(comparison.records, session), comparison.starts_at_once):
        async with AsyncExitStack() as engines:
            started = await asyncio.gather(*(_start(config, job.record, comparison.drafts, engines) for job in group))
            for job, (entry, engine) in zip(group, started, strict=True):
                if engine is not None:
                    report["run"] = report["run"] or describe_engine(engine)
                    await _measure_job(entry, job, engine, session)
                add_entry(report["methods"], entry)
                told(report)
    return report


def add_entry(entries: list[Report], entry: Report) -> None:
    """Add an entry to the report, or merge it into the entry of the same method.

    Raises: OverlapSpecError if plain decoding did not run, because all ratios are relative to it.
    """
    if entry["label"] == PLAIN_RECORD.label and entry["status"] != "ran":
        raise OverlapSpecError(f"plain decoding does not run, and nothing can be compared with it: {entry['reason']}")
    if not entries or entries[-1]["label"] != entry["label"]:
        return entries.append(entry)
    figures = [*entries[-1].get("figures", []), *entry.get("figures", [])]
    if entry["status"] != "ran":
        entries[-1] |= entry
    if figures:
        entries[-1]["figures"] = figures


async def _start(
    config: EngineConfig, record: MethodRecord, drafts: Drafts, engines: AsyncExitStack
) -> tuple[Report, Engine | None]:
    """Start an engine. If it does not start, the entry gets the reason."""
    entry: Report = {"label": record.label, "status": "ran", "flags": asdict(record)}
    entry["load_average"] = round(os.getloadavg()[0], 1)  # of the minute before, other processes included
    begun = perf_counter()
    try:
        asked = config_of(config, record, drafts)
        entry["flags"] = asdict(in_force(record, await asyncio.to_thread(check_record, asked, record, drafts)))
        engine = await engines.enter_async_context(Engine(asked))
    except Skipped as reason:
        return entry | {"status": "skipped", "reason": str(reason)}, None
    except ConfigError as error:
        return entry | {"status": "refused", "reason": str(error)}, None
    except OverlapSpecError as error:
        return entry | {"status": "failed", "reason": str(error)}, None
    return entry | {"start_s": round(perf_counter() - begun, 2)}, engine


async def _measure_job(entry: Report, job: Job, engine: Engine, session: Session) -> None:
    """Fill in the entry, then stop the engine. Cells measured before a failure are kept."""
    worker = engine.facts.worker.report()
    entry |= {"settings": describe_settings(engine), "memory": {name: worker[name] for name in MEMORY}}
    entry["figures"] = figures = list[Report]()
    try:
        await _warm_up(engine, session)
        for cell in job.cells:
            figures.append(await _measure_cell(engine, session, cell, job))
    except OverlapSpecError as error:
        entry |= {"status": "failed", "reason": str(error)}
    finally:
        await engine.stop()


async def _warm_up(engine: Engine, session: Session) -> None:
    """Run the largest batch on prompts that are never measured, none longer than the measured ones."""
    short = max(2, min(len(prompt) for prompts in session.prompts.values() for prompt in prompts))
    cold = random_prompts(session.batch_sizes[-1], engine.settings.model.files.vocab_size, first=WARM_UP_ROWS)
    sampling = SamplingParams(max_new_tokens=WARM_UP_TOKENS, temperature=0.0, seed=0, ignore_eos=True)
    await warm_up(engine.client, [prompt[:short] for prompt in cold], sampling)


async def _measure_cell(engine: Engine, session: Session, cell: Cell, job: Job) -> Report:
    """Run one load several times. The figures are the fastest run's; the report keeps all runs."""
    name, batch = cell
    distinct = session.prompts[name]
    sent = list(repeated(distinct, batch))
    runs = [await run_load(engine.client, sent, batch, session.sampling) for _ in range(job.num_runs)]
    best = max(runs, key=lambda run: float(run.figures["tokens_per_second"])).figures
    if job.record == PLAIN_RECORD:
        session.plain[cell] = best["tokens_per_second"]
        session.reference.setdefault(name, runs[0].answers[: len(distinct)])
    return {
        "prompts": name,
        "batch": batch,
        "num_requests": len(sent),
        "num_repeated": len(sent) - len(distinct),
        **best,
        "ratio": round(best["tokens_per_second"] / session.plain[cell], 4),
        "identical": min(share_identical(run.answers, session.reference[name]) for run in runs),
        "runs": [run.figures for run in runs],
    }
