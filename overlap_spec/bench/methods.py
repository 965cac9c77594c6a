"""`bench methods`: measures every drafting method on one machine in one run, each against plain decoding.

One engine is measured at a time, and stopped before the next. The report of a record that does not run has the reason:
`skipped` (a draft or file that it needs was not given), `refused` (the engine does not support it) or `failed` (an
error).

A run is planned as jobs, each with prompts, loads and sizes.

Under a load each of a number of users sends a prompt, reads the answer and sends the next. Everything is timed at
the client, prompts included. The engine's caches are emptied before every run, so a repeated prompt finds nothing in
them.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from msgspec.structs import asdict, replace

from overlap_spec import hub
from overlap_spec.bench.latency import accept_length
from overlap_spec.bench.methods_records import (
    PLAIN_RECORD,
    Drafts,
    MethodRecord,
    Skipped,
    check_record,
    config_of,
    in_force,
)
from overlap_spec.bench.report import describe_engine, describe_settings
from overlap_spec.bench.workload import RANDOM, Workload, chat_prompts, load_prompts, random_prompts
from overlap_spec.client import Client
from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.errors import ConfigError, OverlapSpecError
from overlap_spec.messages import SamplingParams, Stats

SETTLE_S = 10.0  # timeout for the last step, whose tokens are dropped
POLL_S = 0.005

Tokens = list[int]


@dataclass(frozen=True)
class LoadRun:
    """Figures of one run, and the answer to each prompt, in the order of the prompts."""

    figures: dict[str, Any]
    answers: list[Tokens]


@dataclass(frozen=True)
class TimedAnswer:
    """One answer. Times in seconds from sending. `steps`: its number of decode steps."""

    token_ids: Tokens
    first_token: float
    total: float
    steps: int


async def run_load(client: Client, prompts: Sequence[Tokens], batch: int, sampling: SamplingParams) -> LoadRun:
    """Answer all prompts, `batch` at a time. `step_ms` is wall time per decode step, other requests' prefill included.

    Raises: as `Client.generate`, OverlapSpecError if the engine does not settle.
    """
    await _flush(client)
    before = await client.stats()
    answers: dict[int, TimedAnswer] = {}
    waiting = deque(enumerate(prompts))
    started = time.perf_counter()
    await asyncio.gather(*(_user(client, waiting, answers, sampling) for _ in range(batch)))
    wall = time.perf_counter() - started
    num_tokens = sum(len(answer.token_ids) for answer in answers.values())
    after = await _settled(client, before, num_tokens)
    steps = sum(answer.steps for answer in answers.values())
    decode_s = sum(answer.total - answer.first_token for answer in answers.values())
    figures = {
        "num_tokens": num_tokens,
        "wall_s": round(wall, 4),
        "tokens_per_second": round(num_tokens / wall, 2),
        "step_ms": round(1000 * decode_s / max(steps, 1), 4),
        "accept_length": round(accept_length(before, after), 4),
    }
    return LoadRun(figures, [answers[index].token_ids for index in range(len(prompts))])


async def warm_up(client: Client, prompts: Sequence[Tokens], sampling: SamplingParams) -> None:
    """Answer prompts that are never timed, all at once."""
    await asyncio.gather(*(_answer(client, prompt, sampling) for prompt in prompts))


def repeated(prompts: Sequence[Tokens], batch: int) -> Iterator[Tokens]:
    """All prompts, and the first ones again if there are fewer than a batch needs."""
    for index in range(max(batch, len(prompts))):
        yield prompts[index % len(prompts)]


def share_identical(answers: Sequence[Tokens], reference: Sequence[Tokens]) -> float:
    """The share of answers equal to the reference's token for token; `reference` has one per distinct prompt."""
    same = sum(answer == reference[index % len(reference)] for index, answer in enumerate(answers))
    return round(same / len(answers), 4)


async def _user(
    client: Client, waiting: deque[tuple[int, Tokens]], answers: dict[int, TimedAnswer], sampling: SamplingParams
) -> None:
    while waiting:
        index, prompt = waiting.popleft()
        answers[index] = await _answer(client, prompt, sampling)


async def _answer(client: Client, prompt: Tokens, sampling: SamplingParams) -> TimedAnswer:
    started = time.perf_counter()
    first, steps, token_ids = 0.0, 0, Tokens()
    async for delta in client.generate(prompt, sampling):
        first = first or time.perf_counter() - started
        token_ids += delta.token_ids
        steps = delta.usage.spec_verify_ct
    return TimedAnswer(token_ids, first, time.perf_counter() - started, steps or len(token_ids) - 1)


async def _flush(client: Client) -> None:
    """Empty the engine's caches. Raises: OverlapSpecError if it stays busy."""
    deadline = time.perf_counter() + SETTLE_S
    while not await client.flush_cache():
        await _wait(deadline)


async def _settled(client: Client, before: Stats, num_tokens: int) -> Stats:
    """The counters once they include all `num_tokens` tokens since `before` and no step is in flight."""
    deadline = time.perf_counter() + SETTLE_S
    while True:
        stats = await client.stats()
        if stats.num_running == 0 and stats.generation_tokens_total - before.generation_tokens_total >= num_tokens:
            return stats
        await _wait(deadline)


async def _wait(deadline: float) -> None:
    if time.perf_counter() > deadline:
        raise OverlapSpecError(f"the engine did not come to rest within {SETTLE_S:.0f} s")
    await asyncio.sleep(POLL_S)


NUM_RANDOM = 20  # number of prompts in the set `random`
ROOM = 256  # extra KV tokens per request: windows in flight, pages that are not full

Cell = tuple[str, int]  # name of the prompts, batch size


@dataclass(frozen=True)
class Comparison:
    """The methods and loads to compare, and the number of runs. `starts_at_once`: engines that start together."""

    records: tuple[MethodRecord, ...]
    drafts: Drafts
    num_prompts: int | None = None
    num_runs: int = 2
    starts_at_once: int = 1


@dataclass
class Session:
    """Data that all methods of a run share.

    `plain`: tok/s of plain decoding by cell; `reference`: its answers at the smallest batch.
    """

    workload: Workload
    num_runs: int
    prompts: Mapping[str, Sequence[Tokens]]
    plain: dict[Cell, float] = field(default_factory=dict)
    reference: dict[str, list[Tokens]] = field(default_factory=dict)

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple((name, batch) for name in self.prompts for batch in self.batch_sizes)

    @property
    def batch_sizes(self) -> list[int]:
        """Batch sizes in ascending order: answers of the others are compared with those of the smallest."""
        return sorted(set(self.workload.batch_sizes))

    @property
    def sampling(self) -> SamplingParams:
        """Greedy sampling up to the end of the turn."""
        return SamplingParams(max_new_tokens=self.workload.num_tokens, temperature=self.workload.temperature, seed=0)


@dataclass(frozen=True)
class Job:
    """The loads that one engine runs."""

    record: MethodRecord
    cells: tuple[Cell, ...]
    num_runs: int


def jobs_of(records: Sequence[MethodRecord], session: Session) -> Iterator[Job]:
    """The jobs of a run, plain decoding first.

    A method that learns from its answers gets a new engine for every batch size, and a single run: otherwise it would
    meet prompts that it has already answered.
    """
    for record in (PLAIN_RECORD, *records):
        if record.learns:
            for size in session.batch_sizes:
                yield Job(record, tuple(cell for cell in session.cells if cell[1] == size), 1)
        else:
            yield Job(record, session.cells, session.num_runs)


def groups_of(jobs: Iterable[Job], together: int) -> Iterator[list[Job]]:
    """Group jobs, in order, whose engines start together, at most `together` in a group.

    An engine with adaptive widths measures its step costs at start, so it starts alone.
    """
    group: list[Job] = []
    for job in jobs:
        alone = job.record.adaptive or (job.record.num_steps is None and job.record != PLAIN_RECORD)
        if group and (alone or len(group) == together):
            yield group
            group = []
        group.append(job)
        if alone:
            yield group
            group = []
    if group:
        yield group


def prompts_of(config: EngineConfig, workload: Workload, most: int | None) -> dict[str, list[Tokens]]:
    """Token ids of every set of prompts, by its name."""
    prompts = {}
    for name in workload.prompts.split(","):
        if name == RANDOM:
            files = hub.resolve_model(replace(config, skip_tokenizer_init=True))
            prompts[name] = random_prompts(NUM_RANDOM, files.vocab_size)[:most]
        else:
            prompts[name] = chat_prompts(config, load_prompts(name)[:most])
    return prompts


def bounded(config: EngineConfig, session: Session) -> EngineConfig:
    """The config without tokenizer and prefix cache; sizes that were not given are those of the largest batch.

    Unless asked for, nothing is audited: an idle engine would audit on the device on which another one is measured.
    """
    config = replace(config, skip_tokenizer_init=True, disable_radix_cache=True)
    if config.audit_rate is None:
        config = replace(config, audit_rate=0.0)
    longest = max(len(prompt) for prompts in session.prompts.values() for prompt in prompts)
    most = longest + session.workload.num_tokens + ROOM
    running = config.max_running_requests or session.batch_sizes[-1]
    return replace(
        config,
        max_running_requests=running,
        max_total_tokens=config.max_total_tokens or running * most,
        context_length=config.context_length or min(most, hub.resolve_model(config).context_length),
    )


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
