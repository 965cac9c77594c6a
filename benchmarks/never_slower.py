"""Whether default numbers are ever slower than plain decoding, or than the best fixed width.

    python benchmarks/never_slower.py --output benchmarks/results/never_slower_h200.json
    python benchmarks/never_slower.py --cases 8b-2.5 --limit-s 540 --output FILE       goes on with FILE
    python benchmarks/never_slower.py --cases 8b-1.3 --batches 8,24,32,256 --rounds 2  cells of these requests alone
    python benchmarks/never_slower.py --tiny                                           a minute on a CPU
    python benchmarks/never_slower.py --join A B C --output FILE                       their rows in columns

Cases of one model are measured by turns, beside one engine of plain decoding, which has the same slots and memory as
theirs: a few at a time, as many as the device has memory for. Cells (requests, tokens of an answer) come in an order
that is drawn, all of them in each round, and nothing is warmed up: the first cell is a cold engine's. Plain decoding's
slowest round over its median is the noise.

    cell        all requests at once
    turns       calls of UP_AND_DOWN requests, one after another, in one engine
    high, low   calls of requests whose acceptance is high, and then as many whose acceptance is low
    mixed       after that, of requests of both by turns
    arrivals    a request comes for each one that ends, so prompts never pause
    fixed N     the cells of fixed numbers, once
    low N       the same of requests whose acceptance is low (mixtures and hybrids)

Turns and arrivals are called once; after calls whose acceptance falls plain decoding has one. Fixed numbers stand
beside what it took for that cell, and start together, as they measure no steps. Three speeds, in tokens per second:

    call      all tokens over the time from the first prompt to the last token
    answers   of the answers, from the first quarter of each to its last
    engine    what its decode steps committed over the device's time for them, by its own counts

A report that is there already is gone on with, by engines that are cold again.
"""

import argparse
import asyncio
import copy
import dataclasses
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec.structs import replace
from traffic import tiny_flags
from width_policy import CHAIN, EAGLE3, SHAPES, TREE, numbers

from overlap_spec.bench.methods import Tokens
from overlap_spec.bench.report import describe_engine, describe_settings, write_report
from overlap_spec.bench.workload import RANDOM, chat_prompts, load_prompts, random_prompts
from overlap_spec.client import Client
from overlap_spec.config import EngineConfig
from overlap_spec.config.fields import config_from
from overlap_spec.config.resolve import deterministic, without_speculation
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.http.http_server import freeze_heap
from overlap_spec.errors import OverlapSpecError
from overlap_spec.hub import resolve_model
from overlap_spec.messages import SamplingParams, Stats

DEFAULT, PLAIN, AGAIN = "default", "plain", "again"
BATCHES, FIXED_BATCHES, LENGTHS = (1, 8, 24, 32, 100, 128, 200, 256), (1, 32, 128, 256), (64, 256)
UP_AND_DOWN = (1, 24, 100, 200, 256, 256, 256, 100, 24, 1)
HIGH, LOW = (3.5, 0), (1.3, 65536)  # acceptance, and the first seed of the requests that have it
FALLS = {"high": (HIGH[1],), "low": (LOW[1],), "mixed": (HIGH[1], LOW[1])}  # first seeds
# Of one acceptance, which goes by seed + position: the other one's begin at 65536. Requests of equal seeds and lengths
# would guess right in step.
SEEDS, SEED_STEP = 65536 - 4096, 257
FALLING = (1, 32, 128, 256)
SPEEDS, OF_ROW = ("call", "answers", "engine"), ("case", "kind", "batch", "num_tokens")
WAVES = 4  # requests of `arrivals` for each one that is answered at once
PROMPT_TOKENS = 128
CONTEXT_LENGTH, ROOM = 4096, 64
ROUNDS, SEED = 3, 20261126
POLL_S = 0.01
START_S = 60.0  # of an engine of 8B, and some calls
FIXED = {"fixed 2": numbers(1, 1, 2), "fixed 4": CHAIN, "fixed 8": TREE}
FIXED_NGRAM = {f"fixed {width}": {"speculative_num_draft_tokens": width} for width in (2, 4, 12)}

Row = dict[str, Any]
_UNKEPT = deterministic._unkept


@dataclass(frozen=True)
class Case:
    """A model with a method, by default. `fixed`: numbers of other engines, by name; they are measured in one round.

    `beside`: cases that have plain decoding in common, and `at_once` of them fit on a device with it. `falling`:
    batches of calls whose acceptance falls. `only`: nothing but cells of these batches is measured. `fixed_batches`: of
    calls of fixed numbers; `of_low`: those are made at the second acceptance, too. `start_s`: with less time than that
    no engine is started.
    """

    flags: Mapping[str, Any]
    prompts: str = RANDOM
    batches: tuple[int, ...] = BATCHES
    lengths: tuple[int, ...] = LENGTHS
    fixed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    turns: tuple[int, ...] = ()
    falling: tuple[int, ...] = ()
    only: tuple[int, ...] = ()
    beside: str = "smollm2"
    at_once: int = 4
    fixed_batches: tuple[int, ...] = FIXED_BATCHES
    of_low: bool = False
    start_s: float = START_S

    @property
    def means(self) -> tuple[float, ...]:
        """Of synthetic acceptance; the first is that of requests whose seeds begin at 0."""
        found: tuple[float, ...] = self.flags.get("speculative_simulate_acc_len", ())
        return found

    def cells(self) -> list[tuple[int, int]]:
        drawn = [(batch, length) for batch in self.batches for length in self.lengths]
        return [cell for cell in drawn if not self.only or cell[0] in self.only]


def drawn(cases: Mapping[str, Case]) -> list[tuple[int, int]]:
    """The cells of cases that are measured by turns: in the same order, whichever of them are left out."""
    order = [(batch, length) for batch in BATCHES for length in LENGTHS]
    random.Random(SEED).shuffle(order)
    wanted = {cell for case in cases.values() for cell in case.cells()}
    return [*(cell for cell in order if cell in wanted), *sorted(wanted.difference(order))]


def known_cases(heads: Path | None) -> dict[str, Case]:
    """All of the grid. `heads`: a folder with draft models for SmolLM2."""
    model = {"model_path": str(SHAPES / "llama-3.1-8b"), "load_format": "dummy"}
    shape = EAGLE3 | model | {"speculative_draft_model_path": str(SHAPES / "llama-3.1-8b-eagle3")}
    about: Row = {"fixed": FIXED, "turns": UP_AND_DOWN, "beside": "8b", "at_once": 2}  # with plain 110 of 139 GiB
    # All have two acceptances: so what one has measured and compiled as it started, the next one has there.
    found = {f"8b-{mean}": Case(shape | accepting(mean, LOW[0]), **about) for mean in (2.5, 1.3)}
    in_order = shape | accepting(2.5) | {"enable_deterministic_inference": True}  # default numbers are a chain's
    found["8b-2.5-in-order"] = Case(in_order, beside="8b", at_once=2)
    found["8b-3.5"] = Case(shape | accepting(HIGH[0], LOW[0]), **about, falling=FALLING)
    small = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(SHAPES / "llama-3.2-1b")}
    found["8b-standalone"] = Case(model | small | accepting(2.5), batches=(1, 32, 128), beside="8b", at_once=2)
    hybrid = {"speculative_algorithm": "NEXTN", "model_path": str(SHAPES / "qwen3.5-9b"), "load_format": "dummy"}
    mixture = shape | {"speculative_draft_model_path": str(SHAPES / "qwen3-30b-a3b-eagle3")}
    chains = {name: given for name, given in FIXED.items() if given != TREE}
    few: Row = {"batches": (1, 8, 32), "lengths": (256,), "fixed": chains, "at_once": 1}
    few |= {"falling": few["batches"], "fixed_batches": few["batches"], "of_low": True}  # so one engine has both
    found["9b"] = Case(hybrid | accepting(2.5, LOW[0]), **few, beside="9b")
    for name in ("30b", "30b-int4"):
        path = {"model_path": str(SHAPES / name.replace("30b", "qwen3-30b-a3b"))}
        found[name] = Case(mixture | path | accepting(2.5, LOW[0]), **few, beside=name)
    ngram, small = {"speculative_algorithm": "NGRAM"}, {"start_s": 10.0}
    found["eagle3-chat"] = Case(EAGLE3, "chat20", fixed=FIXED, **small)
    found |= {f"ngram-{kind}": Case(ngram, f"{kind}20", fixed=FIXED_NGRAM, **small) for kind in ("chat", "copy")}
    if heads is not None:
        standalone = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(heads / "standalone")}
        found["standalone-chat"] = Case(standalone, "chat20", batches=(1, 32, 128))
    return found


def accepting(*means: float, most: float = math.inf) -> dict[str, Any]:
    """The flag of synthetic acceptance; of numbers that cannot commit so much, as much as they can."""
    return {"speculative_simulate_acc_len": tuple(min(mean, most) for mean in means)}


def longest(given: Mapping[str, int]) -> int:
    """Tokens that a step of these numbers commits, at most."""
    return min(given["speculative_num_draft_tokens"], given["speculative_num_steps"] + 1)


def tiny_case(directory: str) -> dict[str, Case]:
    """A tiny model, for a CPU."""
    flags = tiny_flags(directory)
    kept = ("model_path", "speculative_draft_model_path", "load_format", "speculative_simulate_acc_len")
    small = {name: flags[name] for name in kept if name in flags}
    few: Row = {"batches": (1, 4), "lengths": (256, 512), "fixed": {"fixed 4": CHAIN}, "turns": (1, 4, 1)}
    high = Case(EAGLE3 | small | accepting(HIGH[0], LOW[0]), **few, falling=(4,), beside="tiny", of_low=True)
    return {"tiny": high, "tiny-1.3": Case(EAGLE3 | small | accepting(1.3), **few, beside="tiny")}


def prompts_of(case: Case, vocab_size: int) -> list[Tokens]:
    if case.prompts == RANDOM:
        return [ids[:PROMPT_TOKENS] for ids in random_prompts(max(case.batches), vocab_size)]
    return chat_prompts(config_from({}), load_prompts(case.prompts))


def bounds_of(cases: Iterable[Case], prompts: Iterable[Sequence[Tokens]]) -> Row:
    """What every engine of some cases has alike. Slots and graphs are those of a default server of so many requests."""
    longest = max(len(ids) for found in prompts for ids in found)
    longest += max(length for case in cases for length in case.lengths) + ROOM
    most = max(batch for case in cases for batch in case.batches)
    return {
        **{"log_level": "warning", "skip_tokenizer_init": True, "disable_radix_cache": True, "audit_rate": 0.0},
        **{"max_running_requests": most, "max_total_tokens": max(most * longest, CONTEXT_LENGTH)},
    }


@dataclass(frozen=True)
class Load:
    """One call: so many requests at a time, `waves` for each. `seeds`: the first of each acceptance, by turns."""

    batch: int
    num_tokens: int
    waves: int = 1
    seeds: tuple[int, ...] = (0,)

    def all_seeds(self) -> list[int]:
        """Of its requests."""
        indices = range(self.batch * self.waves)
        return [self.seeds[index % len(self.seeds)] + index * SEED_STEP % SEEDS for index in indices]


@dataclass
class Progress:
    """How far an answer is. `marks`: tokens and time when a quarter of all had come, and when three had."""

    whole: int
    tokens: int = 0
    marks: list[tuple[int, float]] = field(default_factory=list)

    def add(self, count: int) -> None:
        self.tokens += count
        if len(self.marks) < 2 and self.tokens >= self.whole * (0.25, 0.75)[len(self.marks)]:
            self.marks.append((self.tokens, time.perf_counter()))

    def middle(self) -> tuple[int, float]:
        """Tokens and seconds between the marks. Raises: OverlapSpecError if they came as one."""
        (first, began), (last, ended) = self.marks
        if last == first:
            raise OverlapSpecError(f"half of {self.whole} tokens came at once: ask for longer answers")
        return last - first, ended - began


async def answer(client: Client, requests: Iterator[tuple[Tokens, SamplingParams]]) -> list[tuple[int, float]]:
    """One user, who sends the next request when an answer has ended. Returns the middle of each answer."""
    middles = []
    for prompt, sampling in requests:
        progress = Progress(sampling.max_new_tokens)
        async for delta in client.generate(prompt, sampling):
            progress.add(len(delta.token_ids))
        middles.append(progress.middle())
    return middles


async def at_rest(client: Client, num_requests: int = 0) -> Stats:
    """The engine's counts once it has reported that it had so many requests, and that nothing runs."""
    while (stats := await client.stats()).num_running or stats.requests_total < num_requests:
        await asyncio.sleep(POLL_S)
    return stats


async def run_cell(client: Client, load: Load, prompts: Sequence[Tokens]) -> Row:
    """Figures of one call."""
    sampling = SamplingParams(max_new_tokens=load.num_tokens, temperature=0.0, ignore_eos=True)
    indices = range(load.batch * load.waves)
    seeds = load.all_seeds()
    sent = iter([(prompts[index % len(prompts)], replace(sampling, seed=seeds[index])) for index in indices])
    before, begun = await at_rest(client), time.perf_counter()
    answers = await asyncio.gather(*(answer(client, sent) for _ in range(load.batch)))
    seconds = time.perf_counter() - begun
    after = await at_rest(client, before.requests_total + load.batch * load.waves)
    steps = after.decode_steps_total - before.decode_steps_total
    slots = after.verify_steps_total - before.verify_steps_total
    committed = after.committed_tokens_total - before.committed_tokens_total
    decode_s = after.decode_time_total - before.decode_time_total
    tokens, middles_s = map(sum, zip(*itertools.chain(*answers), strict=True))
    return {
        "call": round(load.batch * load.waves * load.num_tokens / seconds, 2),
        "answers": round(load.batch * tokens / middles_s, 2),
        "engine": round(committed / decode_s, 2),
        "step_ms": round(1000 * decode_s / steps, 4),
        "accept_length": round(committed / slots, 3),
    }


@dataclass
class Run:
    """The report so far, and until when there is time. `rounds`: of a cell."""

    report: Row
    output: str | None
    ends_at: float
    rounds: int
    longest_s: float = 0.0  # of a call so far

    def has_time(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self.ends_at

    def add(self, row: Row) -> None:
        """In the place of one that is there, with fewer rounds."""
        rows = self.report["rows"]
        if (before := self.row(*(row[key] for key in OF_ROW))) is not None:
            rows.remove(before)
        rows.append(row)
        over = row["over_plain"]
        figures = {name: "/".join(f"{over[of][name]:.3f}" for of in SPEEDS) for name in over["call"]}
        ratios = " ".join(map(" ".join, figures.items()))
        print(f"{row['case']:16} {row['kind']:8} {row['batch']:4d} x {row['num_tokens']:3d}  {ratios}", flush=True)
        if self.output is not None:
            write_report(self.output, self.report)

    def row(self, *wanted: str | int) -> Row | None:
        """The one of that case, kind, batch and length."""
        found = (row for row in self.report["rows"] if tuple(row[key] for key in OF_ROW) == wanted)
        return next(found, None)

    def rounds_of(self, *wanted: str | int) -> int:
        """How often it was measured."""
        row = self.row(*wanted)
        return 0 if row is None else max(map(len, row["runs"].values()))


def row_of(case: str, kind: str, batch: int, num_tokens: int, runs: Mapping[str, list[Row]]) -> Row:
    """`over_plain`: medians over plain decoding's; of `again`, its own slowest round: the noise."""
    plain, over = {}, {}
    for of in SPEEDS:
        speeds = {name: [run[of] for run in found] for name, found in runs.items()}
        plain[of] = statistics.median(speeds[PLAIN])
        found = {name: statistics.median(each) for name, each in speeds.items() if name != PLAIN}
        if len(speeds[PLAIN]) > 1:
            found[AGAIN] = min(speeds[PLAIN])
        over[of] = {name: round(speed / plain[of], 4) for name, speed in found.items()}
    about = {"case": case, "kind": kind, "batch": batch, "num_tokens": num_tokens}
    return {**about, "plain": plain, "over_plain": over, "runs": dict(runs)}


class Together:
    """Cases that are measured by turns. Their engines come and go; they have plain decoding in common."""

    def __init__(self, cases: Mapping[str, Case], run: Run) -> None:
        first = next(iter(cases.values()))
        files = resolve_model(config_from({**first.flags, "skip_tokenizer_init": True}))
        self.cases, self.run = cases, run
        self.prompts = {name: prompts_of(case, files.vocab_size) for name, case in cases.items()}
        self.bounds = bounds_of(cases.values(), self.prompts.values())
        self.clients: dict[str, Client] = {}  # by case, and of plain decoding

    def some(self, names: Sequence[str]) -> "Together":
        """Of these cases alone, with the same slots and memory, and no engine."""
        found = copy.copy(self)
        found.cases, found.clients = {name: self.cases[name] for name in names}, {}
        return found

    def config(self, key: str) -> EngineConfig:
        """Of a case by default, of plain decoding, or of fixed numbers for all cases."""
        cases = list(self.cases.values())
        numbers = cases[0].fixed.get(key, {})
        given = {**self.bounds, **self.cases.get(key, cases[0]).flags, **numbers}
        if numbers and cases[0].means:
            means = cases[0].means if len(cases) == 1 else (each.means[0] for each in cases)
            given |= accepting(*means, most=longest(numbers))
        return without_speculation(config_from(given)) if key == PLAIN else config_from(given)

    async def start(self, stack: AsyncExitStack, key: str) -> None:
        begun = time.monotonic()
        with mock.patch.object(deterministic, "_unkept", _unkept_but_synthetic):
            engine = await stack.enter_async_context(Engine(self.config(key)))
        settings = describe_settings(engine) | {"start_s": round(time.monotonic() - begun, 1)}
        of_case = self.run.report["engines"].setdefault(key if key in self.cases else next(iter(self.cases)), {})
        of_case[DEFAULT if key in self.cases else key] = settings
        self.run.report["run"] = self.run.report["run"] or describe_engine(engine)
        self.clients[key] = engine.client
        print(f"{key} started in {settings['start_s']} s", flush=True)

    async def round(self, kind: str, load: Load, names: Sequence[str], turn: int) -> None:
        """One call of each of these cases, and one of plain decoding for those whose prompts are the same."""
        by_prompts: dict[str, list[str]] = {}
        for name in names:
            if self.run.rounds_of(name, kind, load.batch, load.num_tokens) <= turn:
                by_prompts.setdefault(self.cases[name].prompts, []).append(name)
        for alike in by_prompts.values():
            keys, runs = [*alike, PLAIN], {}
            for key in (*keys[turn % len(keys) :], *keys[: turn % len(keys)]):  # none of them is always the first
                if (found := await self.call(key, load, alike[0] if key == PLAIN else key)) is None:
                    return
                runs[key] = found
            for name in alike:
                self.add(name, kind, load, DEFAULT, runs[name], runs[PLAIN])

    async def fall(self, name: str, batch: int, num_tokens: int) -> None:
        """Calls whose acceptance falls, one after another, and one of plain decoding."""
        loads = {kind: Load(batch, num_tokens, seeds=seeds) for kind, seeds in FALLS.items()}
        if all(self.run.row(name, kind, batch, num_tokens) for kind in loads):
            return
        found = [await self.call(name, load, name) for load in loads.values()]
        if (plain := await self.call(PLAIN, Load(batch, num_tokens), name)) is not None:
            for (kind, load), row in zip(loads.items(), found, strict=True):
                assert row is not None, "there was time for a later call"
                self.add(name, kind, load, DEFAULT, row, plain)

    async def fixed(self, name: str, key: str, load: Load, beside: str = "cell") -> None:
        """Adds a row of fixed numbers, unless it is there. `beside`: the kind of the row that has plain decoding's."""
        kind = key if beside == "cell" else key.replace("fixed", beside)
        other = self.run.row(name, beside, load.batch, load.num_tokens)
        if other is None or self.run.row(name, kind, load.batch, load.num_tokens) is not None:
            return
        if (found := await self.call(key, load, name)) is not None:
            self.add(name, kind, load, key, found, other["plain"])

    async def call(self, key: str, load: Load, name: str) -> Row | None:
        """Figures of one call, with the prompts of that case; None if there is no time."""
        if not self.run.has_time(self.run.longest_s):
            print(f"no time for {key}, {load.batch} x {load.num_tokens}", flush=True)
            return None
        begun = time.monotonic()
        found = await run_cell(self.clients[key], load, self.prompts[name])
        self.run.longest_s = max(self.run.longest_s, time.monotonic() - begun)
        return found

    def add(self, name: str, kind: str, load: Load, key: str, found: Row, plain: Row) -> None:
        before = self.run.row(name, kind, load.batch, load.num_tokens)
        runs: dict[str, list[Row]] = {} if before is None else before["runs"]
        runs = {key: [*runs.get(key, ()), found], PLAIN: [*runs.get(PLAIN, ()), plain]}
        self.run.add(row_of(name, kind, load.batch, load.num_tokens, runs))


def _unkept_but_synthetic(*given: Any) -> dict[str, str | None]:
    """One order of sums goes with synthetic acceptance here, where tokens mean nothing and times do."""
    return _UNKEPT(*given) | {"speculative_simulate_acc_len": None}


async def measure_together(cases: Mapping[str, Case], run: Run) -> None:
    """Adds the rows of cases: cells in rounds, turns, calls whose acceptance falls, arrivals, and fixed numbers."""
    together, first = Together(cases, run), next(iter(cases.values()))
    if not all(defaults_are_whole(name, case, run) for name, case in cases.items()):
        async with AsyncExitStack() as stack:
            for key in (PLAIN, *cases):  # one after another: an engine measures its steps as it starts
                await together.start(stack, key)
            freeze_heap()
            await measure_defaults(together)
    for alike in [] if first.only else of_one_method(cases):
        await measure_all_fixed(together.some(alike))


def of_one_method(cases: Mapping[str, Case]) -> list[list[str]]:
    """Names of cases that share engines of fixed numbers: they have other acceptances or prompts."""
    found: dict[str, list[str]] = {}
    for name, case in cases.items():
        own = {flag: value for flag, value in case.flags.items() if flag not in accepting()}
        found.setdefault(repr((own, case.fixed)), []).append(name)
    return list(found.values())


async def measure_all_fixed(together: Together) -> None:
    """Adds the rows of fixed numbers, by as many engines at once as there are with plain decoding: it is not needed."""
    first = next(iter(together.cases.values()))
    fixed, at_once = list(first.fixed), first.at_once + 1
    for keys in (fixed[begin : begin + at_once] for begin in range(0, len(fixed), at_once)):
        if not together.run.has_time(first.start_s):
            return
        async with AsyncExitStack() as stack:
            await asyncio.gather(*(together.start(stack, key) for key in keys))
            for key in keys:
                await measure_fixed(together, key)


async def measure_defaults(together: Together) -> None:
    cases, run = together.cases, together.run
    for turn in range(run.rounds):
        for cell in drawn(cases):
            await together.round("cell", Load(*cell), [name for name in cases if cell in cases[name].cells()], turn)
    whole = {name: case for name, case in cases.items() if not case.only}
    for index, batch in enumerate(max((case.turns for case in whole.values()), default=())):
        names = [name for name, case in whole.items() if case.turns]
        await together.round(f"turn {index}", Load(batch, max(cases[names[0]].lengths)), names, 0)
    for name, case in whole.items():
        for batch in case.falling:
            await together.fall(name, batch, max(case.lengths))
    for batch in sorted({batch for case in cases.values() for batch in case.batches[1::2]}):
        names = [name for name, case in whole.items() if batch in case.batches[1::2]]
        for length in dict.fromkeys(min(cases[name].lengths) for name in names):
            await together.round("arrivals", Load(batch, length, WAVES), names, 0)


async def measure_fixed(together: Together, key: str) -> None:
    """The fixed engine has the acceptance of every case, by seeds."""
    for index, (name, case) in enumerate(together.cases.items()):
        for batch in sorted({*case.fixed_batches} & {*case.batches} if key in case.fixed else ()):
            load = Load(batch, max(case.lengths), seeds=((HIGH, LOW)[index][1],))
            await together.fixed(name, key, load)
            if case.of_low:
                await together.fixed(name, key, dataclasses.replace(load, seeds=FALLS["low"]), "low")


def defaults_are_whole(name: str, case: Case, run: Run) -> bool:
    """Whether the report has every row of default numbers, as often as it is measured."""
    if any(run.rounds_of(name, "cell", *cell) < run.rounds for cell in case.cells()):
        return False
    long, short = max(case.lengths), min(case.lengths)
    others = [(f"turn {index}", batch, long) for index, batch in enumerate(case.turns)]
    others += [(kind, batch, long) for kind in FALLS for batch in case.falling]
    others += [("arrivals", batch, short) for batch in case.batches[1::2]]
    return bool(case.only) or all(run.row(name, *row) is not None for row in others)


def is_whole(name: str, case: Case, run: Run) -> bool:
    """Whether the report has these, and all of fixed numbers."""
    kinds = [*case.fixed, *(key.replace("fixed", "low") for key in case.fixed if case.of_low)]
    batches = [batch for batch in case.fixed_batches if batch in case.batches and not case.only]
    fixed = [(kind, batch, max(case.lengths)) for kind in kinds for batch in batches]
    return defaults_are_whole(name, case, run) and all(run.row(name, *row) is not None for row in fixed)


async def measure(cases: Mapping[str, Case], run: Run) -> None:
    left = {name: case for name, case in cases.items() if not is_whole(name, case, run)}
    for beside in dict.fromkeys(case.beside for case in left.values()):
        names = [name for name, case in left.items() if case.beside == beside]
        at_once = left[names[0]].at_once
        for begin in range(0, len(names), at_once):
            if run.has_time(left[names[0]].start_s):
                await measure_together({name: left[name] for name in names[begin : begin + at_once]}, run)


def joined(files: Sequence[str]) -> Row:
    """The rows of several reports, by case and kind: what each call has, in columns, and no single runs."""
    reports = [json.loads(Path(file).read_text()) for file in files]
    if len({(each["run"]["device"], json.dumps(each["run"].get("source"))) for each in reports}) > 1:
        raise SystemExit("these reports are of different devices or files")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in (row for each in reports for row in each["rows"]):
        kind = "turns" if row["kind"].startswith("turn ") else row["kind"]
        groups.setdefault((row["case"], kind), []).append(row)
    rows = [{"case": case, "kind": kind} | columns_of(found) for (case, kind), found in groups.items()]
    engines = {case: found for each in reports for case, found in each["engines"].items()}
    starts = {case: {key: of["start_s"] for key, of in found.items()} for case, found in engines.items()}
    return {"benchmark": "never_slower", "run": reports[0]["run"], "starts_s": starts, "rows": rows}


def columns_of(rows: Sequence[Row]) -> Row:
    """`again`: plain decoding's slowest round; `plain`: its tokens per second, by the engine's counts."""
    found: Row = {name: [row[name] for row in rows] for name in ("batch", "num_tokens")}
    found |= {
        "rounds": min(len(row["runs"][PLAIN]) for row in rows),
        "plain": [round(row["plain"]["engine"]) for row in rows],
    }
    for of in ("call", "engine"):
        ratios = [row["over_plain"][of] for row in rows]
        found[of] = [next(ratio for name, ratio in each.items() if name != AGAIN) for each in ratios]
        if all(AGAIN in each for each in ratios):
            found[f"{of}_again"] = [each[AGAIN] for each in ratios]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--cases", help="8b-2.5, 8b-standalone, eagle3-chat, ..; default: all")
    parser.add_argument("--batches", help="cells of these numbers of requests alone; default: everything")
    parser.add_argument("--defaults-alone", action="store_true", help="no fixed numbers, which a later run may add")
    parser.add_argument("--heads", type=Path, help="folder with draft models for SmolLM2: standalone-chat, too")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--join", nargs="+", help="reports of the same files on the same device: write one of them all")
    parser.add_argument("--limit-s", type=float, default=540.0, help="time of everything, at most")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a CPU")
    arguments = parser.parse_args()
    if arguments.join:
        write_report(arguments.output, joined(arguments.join))
        return
    with tempfile.TemporaryDirectory() as directory:
        known = tiny_case(directory) if arguments.tiny else known_cases(arguments.heads)
        names = arguments.cases.split(",") if arguments.cases else list(known)
        if unknown := [name for name in names if name not in known]:
            parser.error(f"no case {', '.join(unknown)}; there are {', '.join(known)}")
        only = tuple(int(batch) for batch in arguments.batches.split(",")) if arguments.batches else ()
        if unknown := [f"{batch} of {name}" for name in names for batch in only if batch not in known[name].batches]:
            parser.error(f"no cells with {', '.join(unknown)}")
        if arguments.defaults_alone:
            known = {name: dataclasses.replace(case, fixed={}) for name, case in known.items()}
        report: Row = {"benchmark": "never_slower", "run": {}, "engines": {}, "rows": []}
        if arguments.output and Path(arguments.output).exists():
            report = json.loads(Path(arguments.output).read_text())
        run = Run(report, arguments.output, time.monotonic() + arguments.limit_s, arguments.rounds)
        asyncio.run(measure({name: dataclasses.replace(known[name], only=only) for name in names}, run))


if __name__ == "__main__":
    main()
