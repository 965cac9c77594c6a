"""Whether default numbers are ever slower than plain decoding, or than the best fixed width.

    python benchmarks/never_slower.py --output benchmarks/results/never_slower_h200.json
    python benchmarks/never_slower.py --cases 8b-2.5 --limit-s 540 --output FILE       goes on with FILE
    python benchmarks/never_slower.py --cases 8b-1.3 --batches 8,24,32,256 --rounds 2  cells of these requests alone
    python benchmarks/never_slower.py --tiny                                           a minute on a CPU

The engines of a case have the same slots and memory: one by default, one with NONE, and for some cells those of fixed
numbers. Cells (requests, tokens of an answer) come in an order that is drawn, and nothing is warmed up: the first cell
is a cold engine's. Each is measured in rounds by turns, plain decoding twice in each: its ratio to itself is the noise.

    cell        all requests at once
    turns       calls of UP_AND_DOWN requests, one after another, in one engine
    high, low   calls of requests whose acceptance is high, and then as many whose acceptance is low
    arrivals    a request comes for each one that ends, so prompts never pause

Three speeds of each, in tokens per second:

    call      all tokens over the time from the first prompt to the last token
    answers   of the answers, from the first quarter of each to its last
    engine    what its decode steps committed over the device's time for them, by its own counts

A report that is there already is gone on with: a case whose cells are all in it is left out.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from traffic import tiny_flags
from width_policy import CHAIN, EAGLE3, SHAPES, TREE, numbers

from overlap_spec.bench.methods import Tokens
from overlap_spec.bench.report import describe_engine, describe_settings, write_report
from overlap_spec.bench.workload import RANDOM, chat_prompts, load_prompts, random_prompts
from overlap_spec.client import Client
from overlap_spec.config import EngineConfig
from overlap_spec.config.fields import config_from
from overlap_spec.config.resolve import without_speculation
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.http.http_server import freeze_heap
from overlap_spec.errors import OverlapSpecError
from overlap_spec.hub import resolve_model
from overlap_spec.messages import SamplingParams, Stats

DEFAULT, PLAIN, AGAIN = "default", "plain", "again"
BATCHES, FIXED_BATCHES, LENGTHS = (1, 8, 24, 32, 100, 128, 200, 256), (1, 32, 128, 256), (64, 256)
UP_AND_DOWN = (1, 24, 100, 200, 256, 256, 256, 100, 24, 1)
HIGH, LOW = (3.5, 0), (1.3, 65536)  # acceptance, and the first seed of the requests that have it
SEEDS, SEED_STEP = 65536, 257  # of one acceptance; requests of equal seeds and lengths would guess right in step
FALLING = (1, 32, 128, 256)
SPEEDS = ("call", "answers", "engine")
WAVES = 4  # requests of `arrivals` for each one that is answered at once
PROMPT_TOKENS = 128
CONTEXT_LENGTH, ROOM = 4096, 64
ROUNDS, SEED = 3, 20261126
POLL_S = 0.01
START_S = 60.0  # engines of 8B are not started with less time than that
FIXED = {"fixed 2": numbers(1, 1, 2), "fixed 4": CHAIN, "fixed 8": TREE}

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model with a method, by default. `fixed`: flags of other engines, by name; they are measured in one round.

    `falling`: batches of calls whose acceptance falls. `only`: nothing but cells of these batches is measured.
    """

    flags: Mapping[str, Any]
    prompts: str = RANDOM
    batches: tuple[int, ...] = BATCHES
    lengths: tuple[int, ...] = LENGTHS
    fixed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    turns: tuple[int, ...] = ()
    falling: tuple[int, ...] = ()
    only: tuple[int, ...] = ()

    def cells(self, name: str) -> list[tuple[int, int]]:
        """In the order that is drawn for a case of this name, whichever of them are measured."""
        drawn = [(batch, length) for batch in self.batches for length in self.lengths]
        random.Random(f"{SEED} {name}").shuffle(drawn)
        return [cell for cell in drawn if not self.only or cell[0] in self.only]


def known_cases(heads: Path | None) -> dict[str, Case]:
    """All of the grid. `heads`: a folder with draft models for SmolLM2."""
    shape = EAGLE3 | {"model_path": str(SHAPES / "llama-3.1-8b"), "load_format": "dummy"}
    shape |= {"speculative_draft_model_path": str(SHAPES / "llama-3.1-8b-eagle3")}
    found = {f"8b-{mean}": Case(shape | accepting(mean), fixed=fixed(mean), turns=UP_AND_DOWN) for mean in (2.5, 1.3)}
    means = HIGH[0], LOW[0]
    found[f"8b-{means[0]}"] = Case(shape | accepting(*means), fixed=fixed(*means), turns=UP_AND_DOWN, falling=FALLING)
    hybrid = {"speculative_algorithm": "NEXTN", "model_path": str(SHAPES / "qwen3.5-9b"), "load_format": "dummy"}
    chains = {name: flags for name, flags in fixed(2.5).items() if FIXED[name] != TREE}
    mixture = shape | {"model_path": str(SHAPES / "qwen3-30b-a3b-int4")}  # in 4 bits three engines fit into a GPU
    mixture |= {"speculative_draft_model_path": str(SHAPES / "qwen3-30b-a3b-eagle3")}
    for name, flags in (("9b", hybrid), ("30b", mixture)):
        found[f"{name}-2.5"] = Case(flags | accepting(2.5), batches=(1, 8, 32), lengths=(256,), fixed=chains)
    ngram = {"speculative_algorithm": "NGRAM"}
    found |= {"eagle3-chat": Case(EAGLE3, "chat20"), "ngram-chat": Case(ngram, "chat20")}
    found |= {"ngram-copy": Case(ngram, "copy20")}
    if heads is not None:
        standalone = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(heads / "standalone")}
        found["standalone-chat"] = Case(standalone, "chat20", batches=(1, 32, 128))
    return found


def accepting(*means: float, most: float = math.inf) -> dict[str, Any]:
    """The flag of synthetic acceptance; of numbers that cannot commit so much, as much as they can."""
    return {"speculative_simulate_acc_len": tuple(min(mean, most) for mean in means)}


def fixed(*means: float) -> dict[str, dict[str, Any]]:
    """The flags of all fixed numbers."""
    return {name: {**given, **accepting(*means, most=longest(given))} for name, given in FIXED.items()}


def longest(given: Mapping[str, int]) -> int:
    """Tokens that a step of these numbers commits, at most."""
    return min(given["speculative_num_draft_tokens"], given["speculative_num_steps"] + 1)


def tiny_case(directory: str) -> dict[str, Case]:
    """A tiny model, for a CPU."""
    flags = tiny_flags(directory)
    kept = ("model_path", "speculative_draft_model_path", "load_format", "speculative_simulate_acc_len")
    small = {name: flags[name] for name in kept if name in flags}
    few = {"batches": (1, 4), "lengths": (256, 512), "fixed": {"fixed 4": CHAIN}, "turns": (1, 4, 1), "falling": (4,)}
    return {"tiny": Case(EAGLE3 | small | accepting(HIGH[0], LOW[0]), **few)}


def prompts_of(case: Case, vocab_size: int) -> list[Tokens]:
    if case.prompts == RANDOM:
        return [ids[:PROMPT_TOKENS] for ids in random_prompts(max(case.batches), vocab_size)]
    return chat_prompts(config_from({}), load_prompts(case.prompts))


def bounds_of(case: Case, prompts: Sequence[Tokens]) -> Row:
    """What every engine of a case has alike. Slots and graphs are those of a default server of so many requests."""
    longest = max(map(len, prompts)) + max(case.lengths) + ROOM
    most = max(case.batches)
    return {
        **{"log_level": "warning", "skip_tokenizer_init": True, "disable_radix_cache": True, "audit_rate": 0.0},
        **{"max_running_requests": most, "max_total_tokens": max(most * longest, CONTEXT_LENGTH)},
    }


@dataclass(frozen=True)
class Load:
    """One call: so many requests at a time, `waves` for each."""

    batch: int
    num_tokens: int
    waves: int = 1
    seed: int = 0


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
    seeds = [load.seed + index * SEED_STEP % SEEDS for index in indices]
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
    """The report so far, and until when there is time."""

    report: Row
    output: str | None
    ends_at: float
    rounds: int

    def has_time(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self.ends_at

    def add(self, row: Row) -> None:
        self.report["rows"].append(row)
        over = row["over_plain"]
        figures = {name: "/".join(f"{over[of][name]:.3f}" for of in SPEEDS) for name in over["call"]}
        ratios = " ".join(map(" ".join, figures.items()))
        print(f"{row['case']:16} {row['kind']:8} {row['batch']:4d} x {row['num_tokens']:3d}  {ratios}", flush=True)
        if self.output is not None:
            write_report(self.output, self.report)

    def is_whole(self, name: str, case: Case) -> bool:
        """A case is whole once the row that is measured last is in the report."""
        if case.only:
            return self.has(name, "cell", *case.cells(name)[-1])
        if case.fixed:
            return self.has(name, list(case.fixed)[-1], max({*FIXED_BATCHES} & {*case.batches}), max(case.lengths))
        return self.has(name, "arrivals", case.batches[1::2][-1], min(case.lengths))

    def has(self, case: str, kind: str, batch: int, num_tokens: int) -> bool:
        wanted = (case, kind, batch, num_tokens)
        return any((row["case"], row["kind"], row["batch"], row["num_tokens"]) == wanted for row in self.report["rows"])


def row_of(case: str, kind: str, batch: int, num_tokens: int, runs: Mapping[str, list[Row]]) -> Row:
    """`over_plain`: medians over plain decoding's; of `again`, plain decoding's second runs, it is the noise."""
    plain, over = {}, {}
    for of in SPEEDS:
        speeds = {name: statistics.median(run[of] for run in found) for name, found in runs.items()}
        plain[of] = speeds.pop(PLAIN)
        over[of] = {name: round(speed / plain[of], 4) for name, speed in speeds.items()}
    about = {"case": case, "kind": kind, "batch": batch, "num_tokens": num_tokens}
    return {**about, "plain": plain, "over_plain": over, "runs": dict(runs)}


class Measured:
    """A case whose engines run: by default, and plain decoding; others come and go."""

    def __init__(self, name: str, case: Case, run: Run) -> None:
        files = resolve_model(config_from({**case.flags, "skip_tokenizer_init": True}))
        self.name, self.case, self.run = name, case, run
        self.prompts = prompts_of(case, files.vocab_size)
        self.bounds = bounds_of(case, self.prompts)
        self.clients: dict[str, Client] = {}
        self._longest_s = 0.0  # of a row so far

    def configs(self) -> dict[str, EngineConfig]:
        given = {**self.bounds, **self.case.flags}
        fixed = {name: config_from({**given, **numbers}) for name, numbers in self.case.fixed.items()}
        return {DEFAULT: config_from(given), PLAIN: without_speculation(config_from(given)), **fixed}

    async def start(self, stack: AsyncExitStack, key: str) -> None:
        begun = time.monotonic()
        engine = await stack.enter_async_context(Engine(self.configs()[key]))
        settings = describe_settings(engine) | {"start_s": round(time.monotonic() - begun, 1)}
        self.run.report["engines"].setdefault(self.name, {})[key] = settings
        self.run.report["run"] = self.run.report["run"] or describe_engine(engine)
        self.clients[key] = engine.client

    async def measure(self, kind: str, load: Load, order: Sequence[str]) -> None:
        """Adds a row, unless it is there or there is no time."""
        batch, length = load.batch, load.num_tokens
        if self.run.has(self.name, kind, batch, length):
            return
        if not self.run.has_time(self._longest_s):
            print(f"no time for {self.name}, {kind} {batch} x {length}", flush=True)
            return
        begun, runs = time.monotonic(), dict[str, list[Row]]()
        for turn in range(self.run.rounds if kind == "cell" else 1):
            shift = turn % len(order)
            for key in (*order[shift:], *order[:shift]):  # none of them is always the first
                client = self.clients[PLAIN if key == AGAIN else key]
                runs.setdefault(key, []).append(await run_cell(client, load, self.prompts))
        self.run.add(row_of(self.name, kind, batch, length, runs))
        self._longest_s = max(self._longest_s, time.monotonic() - begun)


async def measure_case(name: str, case: Case, run: Run) -> None:
    """Adds the rows of a case: cells in an order that is drawn, turns, arrivals, and fixed widths, an engine a time."""
    measured, longest = Measured(name, case, run), max(case.lengths)
    async with AsyncExitStack() as stack:
        for key in (DEFAULT, PLAIN):  # one after another: an engine measures its steps as it starts
            await measured.start(stack, key)
        freeze_heap()
        for batch, length in case.cells(name):
            await measured.measure("cell", Load(batch, length), (DEFAULT, PLAIN, AGAIN))
        if case.only:
            return
        for index, batch in enumerate(case.turns):
            await measured.measure(f"turn {index}", Load(batch, longest), (DEFAULT, PLAIN))
        for batch in case.falling:
            for kind, (_, seed) in {"high": HIGH, "low": LOW}.items():
                await measured.measure(kind, Load(batch, longest, seed=seed), (DEFAULT, PLAIN))
        for batch in case.batches[1::2]:
            await measured.measure("arrivals", Load(batch, min(case.lengths), WAVES), (DEFAULT, PLAIN, AGAIN))
        for key in case.fixed:
            if not run.has_time(START_S):
                return
            async with AsyncExitStack() as of_fixed:
                await measured.start(of_fixed, key)
                for batch in sorted({*FIXED_BATCHES} & {*case.batches}):
                    await measured.measure(key, Load(batch, longest), (key, PLAIN))


async def measure(cases: Mapping[str, Case], run: Run) -> None:
    for name, case in cases.items():
        if not run.is_whole(name, case) and run.has_time(START_S if case.fixed else 5.0):
            await measure_case(name, case, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--cases", help="8b-2.5, 8b-1.3, 8b-3.5, eagle3-chat, ngram-chat, ngram-copy; default: all")
    parser.add_argument("--batches", help="cells of these numbers of requests alone; default: everything")
    parser.add_argument("--heads", type=Path, help="folder with draft models for SmolLM2: standalone-chat, too")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--limit-s", type=float, default=540.0, help="time of everything, at most")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a CPU")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        known = tiny_case(directory) if arguments.tiny else known_cases(arguments.heads)
        names = arguments.cases.split(",") if arguments.cases else list(known)
        if unknown := [name for name in names if name not in known]:
            parser.error(f"no case {', '.join(unknown)}; there are {', '.join(known)}")
        only = tuple(int(batch) for batch in arguments.batches.split(",")) if arguments.batches else ()
        if unknown := [f"{batch} of {name}" for name in names for batch in only if batch not in known[name].batches]:
            parser.error(f"no cells with {', '.join(unknown)}")
        report: Row = {"benchmark": "never_slower", "run": {}, "engines": {}, "rows": []}
        if arguments.output and Path(arguments.output).exists():
            report = json.loads(Path(arguments.output).read_text())
        run = Run(report, arguments.output, time.monotonic() + arguments.limit_s, arguments.rounds)
        asyncio.run(measure({name: dataclasses.replace(known[name], only=only) for name in names}, run))


if __name__ == "__main__":
    main()
