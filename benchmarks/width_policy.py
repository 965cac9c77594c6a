"""What narrower steps gain and cost: methods with their widths fixed, adaptive, and without speculation.

    python benchmarks/width_policy.py --heads DIR --output benchmarks/results/width_policy_h200.json
    python benchmarks/width_policy.py --cases 8b-2.5,8b-1.3 --output benchmarks/results/width_policy_8b_h200.json
    python benchmarks/width_policy.py --tiny                                                   a minute on a CPU

DIR/standalone is a draft model for SmolLM2. The engines of a model's cases are all ready before anything is measured,
one of them is busy at a time, and plain decoding is one engine for all cases. Each load is measured in rounds, each
round with every engine. Medians count, and every run is in the JSON, which is written after every load: `--limit-s`
ends the run before a load that would take longer.

An adaptive engine starts while nothing else works, because it measures what its steps cost. Before each run it answers
some of the same prompts: measured is the width that it has settled at. CUDA graphs are captured for the batch sizes
that are measured and for smaller powers of two, in every engine: fewer than by default, for shorter starts.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from traffic import tiny_flags

from overlap_spec.bench.methods import Tokens, run_load
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

SHAPES = Path(os.path.relpath(Path(__file__).parent / "shapes"))  # reports name it
WARM_UP_TOKENS, FEWEST_TO_WARM_UP = 64, 4  # enough steps for rates that are learnt
START_S = 30.0  # engines are not started with less time than that
CONTEXT_LENGTH = 4096
ROOM = 64  # tokens for a request beside its own: windows in flight, pages that are not full
LENGTHS = 64  # of random prompts: synthetic acceptance follows from seed and position, so that equal ones go in step
POWERS_OF_TWO = (1, 2, 4, 8, 16, 32, 64, 128)
FIXED, ADAPTIVE, PLAIN = POLICIES = ("fixed", "adaptive", "plain")

Row = dict[str, Any]
Key = tuple[str, str]  # case and policy
PLAIN_KEY: Key = ("", PLAIN)


@dataclass(frozen=True)
class Load:
    """So many requests, `batch` at a time. Answers end by themselves, or at `num_tokens`; random ones always there."""

    prompts: str
    batch: int
    count: int
    num_tokens: int


@dataclass(frozen=True)
class Case:
    """One method. `numbers`: of the fixed engine. `by_default`: the adaptive engine gets no numbers."""

    target: str
    method: Mapping[str, Any]
    numbers: Mapping[str, int]
    by_default: bool

    def flags(self) -> dict[str, dict[str, Any]]:
        """Of the two engines that speculate."""
        fixed = {**self.method, **self.numbers}
        return {FIXED: fixed, ADAPTIVE: {**self.method} if self.by_default else fixed | {"speculative_adaptive": True}}


@dataclass(frozen=True)
class Target:
    """A model under its loads, the most wanted first. `at_once`: cases whose engines fit on a device together."""

    model: Mapping[str, Any]
    loads: tuple[Load, ...]
    rounds: int
    at_once: int


def numbers(num_steps: int, topk: int, num_draft_tokens: int) -> dict[str, int]:
    return {
        "speculative_num_steps": num_steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": num_draft_tokens,
    }


CHAIN, TREE = numbers(3, 1, 4), numbers(5, 4, 8)  # the default tree for Llama
EAGLE3 = {"speculative_algorithm": "EAGLE3"}
# Of chats several waves, so that most steps are of a full batch. Random prompts come all at once and end together.
CHATS = {1: 20, 8: 40, 256: 768, 64: 192, 32: 128, 128: 384}
RANDOM_TOKENS = {1: 256, 8: 256, 256: 192, 64: 192, 128: 192, 32: 256}
TARGETS = {
    "8b": Target(
        {"model_path": str(SHAPES / "llama-3.1-8b"), "load_format": "dummy"},
        tuple(Load(RANDOM, batch, batch, tokens) for batch, tokens in RANDOM_TOKENS.items()),
        rounds=2,
        at_once=1,  # three engines take 105 of 139 GiB
    ),
    "smollm2": Target(
        {},
        tuple(Load(prompts, batch, count, 128) for batch, count in CHATS.items() for prompts in ("chat20", "copy20")),
        rounds=3,
        at_once=4,
    ),
}


def known_cases(heads: Path | None) -> dict[str, Case]:
    """All that can be measured. `heads`: a folder with draft models for SmolLM2."""
    head = EAGLE3 | {"speculative_draft_model_path": str(SHAPES / "llama-3.1-8b-eagle3")}
    found = {
        f"8b-{mean}": Case("8b", head | {"speculative_simulate_acc_len": (mean,)}, CHAIN, by_default=False)
        for mean in (2.5, 1.3)
    }
    found["ngram"] = Case("smollm2", {"speculative_algorithm": "NGRAM"}, {"speculative_num_draft_tokens": 12}, True)
    found["chain"] = Case("smollm2", EAGLE3, CHAIN, by_default=False)
    found["tree"] = Case("smollm2", EAGLE3, TREE, by_default=True)
    if heads is not None:
        standalone = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(heads / "standalone")}
        found["standalone"] = Case("smollm2", standalone, CHAIN, by_default=True)
    return found


def tiny(directory: str) -> tuple[dict[str, Target], dict[str, Case]]:
    """A tiny model, for a CPU."""
    flags = tiny_flags(directory)
    model = {name: flags[name] for name in ("model_path", "load_format")}
    method = EAGLE3 | {name: flags[name] for name in ("speculative_draft_model_path", "speculative_simulate_acc_len")}
    ngram = {"speculative_algorithm": "NGRAM"}
    target = Target(model, tuple(Load(RANDOM, batch, 2 * batch, 32) for batch in (1, 4)), rounds=2, at_once=2)
    cases = {
        "chain": Case("tiny", method, CHAIN, by_default=False),
        "tree": Case("tiny", method, TREE, by_default=True),
        "ngram": Case("tiny", ngram, {"speculative_num_draft_tokens": 12}, by_default=True),
    }
    return {"tiny": target}, cases


def prompts_of(target: Target, vocab_size: int) -> dict[str, list[Tokens]]:
    """Token ids by the name of the prompts."""
    found: dict[str, list[Tokens]] = {}
    for name in {load.prompts for load in target.loads}:
        if name == RANDOM:
            most = max(load.count for load in target.loads)
            found[name] = [ids[row % LENGTHS :] for row, ids in enumerate(random_prompts(most, vocab_size))]
        else:
            found[name] = chat_prompts(config_from(dict(target.model)), load_prompts(name))
    return found


def bounds_of(target: Target, prompts: Mapping[str, Sequence[Tokens]], context_length: int) -> Row:
    """What limits an engine to what the loads need. `context_length`: of the model."""
    batches = sorted({load.batch for load in target.loads})
    longest = {name: max(map(len, found)) for name, found in prompts.items()}
    needed = max(load.batch * (longest[load.prompts] + load.num_tokens + ROOM) for load in target.loads)
    return {
        "log_level": "warning",
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "audit_rate": 0.0,  # an idle engine would audit on the device on which another one is measured
        "max_running_requests": batches[-1],
        "max_total_tokens": max(needed, CONTEXT_LENGTH),
        "context_length": min(CONTEXT_LENGTH, context_length),
        "cuda_graph_bs": sorted({*batches, *(size for size in POWERS_OF_TWO if size < batches[-1])}),
    }


@dataclass
class Run:
    """What was measured, and until when there is time."""

    report: Row
    output: str | None
    ends_at: float
    longest_s: float = 0.0  # of a load so far

    def has_time(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self.ends_at

    def save(self) -> None:
        """Keep what there is."""
        if self.output is not None:
            write_report(self.output, self.report)


@dataclass
class Engines:
    """The engines of some cases of a target, and plain decoding."""

    ready: dict[Key, Engine] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # case -> why

    async def start(self, stack: AsyncExitStack, configs: Mapping[Key, EngineConfig]) -> None:
        """Start engines together. A case whose engine does not start is left out."""
        starts = (stack.enter_async_context(Engine(config)) for config in configs.values())
        for key, found in zip(configs, await asyncio.gather(*starts, return_exceptions=True), strict=True):
            if isinstance(found, Engine):
                self.ready[key] = found
            elif key == PLAIN_KEY or not isinstance(found, OverlapSpecError):
                raise found
            else:
                self.failed[key[0]] = f"{key[1]}: {found}"
                print(f"{key[0]} is left out, {self.failed[key[0]]}", flush=True)

    def compared(self) -> dict[Key, Engine]:
        """Plain decoding, and the engines of each case that has both."""
        return {key: engine for key, engine in self.ready.items() if key[0] not in self.failed}


async def measure_target(target: Target, cases: Mapping[str, Case], run: Run) -> None:
    """Adds rows for the cases, as long as there is time."""
    files = resolve_model(config_from({**target.model, "skip_tokenizer_init": True}))
    prompts = prompts_of(target, files.vocab_size)
    bounds = bounds_of(target, prompts, files.context_length)
    configs = {
        (name, policy): config_from({**bounds, **target.model, **flags})
        for name, case in cases.items()
        for policy, flags in case.flags().items()
    }
    plain = {PLAIN_KEY: without_speculation(next(iter(configs.values())))}
    kept: dict[Key, Engine] = {}
    names = list(cases)
    async with AsyncExitStack() as of_target:
        for begin in range(0, len(names), target.at_once):
            if not run.has_time(START_S):
                return
            group = names[begin : begin + target.at_once]
            async with AsyncExitStack() as stack:
                engines, begun = Engines(dict(kept)), time.monotonic()
                fixed = engines.start(stack, {(name, FIXED): configs[name, FIXED] for name in group})
                await asyncio.gather(fixed, *() if kept else (engines.start(of_target, plain),))
                for name in group:
                    await engines.start(stack, {(name, ADAPTIVE): configs[name, ADAPTIVE]})
                kept = {PLAIN_KEY: engines.ready[PLAIN_KEY]}
                describe(group, engines, time.monotonic() - begun, run)
                await measure_loads(engines.compared(), target, prompts, run)


def describe(group: Sequence[str], engines: Engines, took_s: float, run: Run) -> None:
    """Adds the cases to the report, before they are measured."""
    run.report["run"] = run.report["run"] or describe_engine(engines.ready[PLAIN_KEY])
    for name in group:
        ready = {policy: engines.ready.get((name, policy)) for policy in (FIXED, ADAPTIVE)}
        settings = {policy: describe_settings(engine) for policy, engine in ready.items() if engine is not None}
        about = {"settings": settings | {PLAIN: describe_settings(engines.ready[PLAIN_KEY])}}
        failed = {"failed": engines.failed[name]} if name in engines.failed else {}
        run.report["cases"][name] = {"start_s": round(took_s, 1), "started_with": list(group), **about, **failed}


async def measure_loads(
    engines: Mapping[Key, Engine], target: Target, prompts: Mapping[str, list[Tokens]], run: Run
) -> None:
    """Adds the rows of every load that there is time for."""
    freeze_heap()  # as in a server: no long garbage collections
    for load in target.loads:
        if not run.has_time(run.longest_s):
            print(f"no time for {load}", flush=True)
            return
        begun = time.monotonic()
        found = prompts[load.prompts]
        sent = [found[index % len(found)] for index in range(load.count)]
        runs = await measure_load(engines, load, sent, target.rounds)
        rows = list(rows_of(load, runs))
        run.report["rows"] += rows
        print_rows(rows)
        run.save()
        run.longest_s = max(run.longest_s, time.monotonic() - begun)


async def measure_load(
    engines: Mapping[Key, Engine], load: Load, sent: Sequence[Tokens], rounds: int
) -> dict[Key, list[Row]]:
    """The runs of each engine."""
    end_themselves = load.prompts != RANDOM  # random weights have no end of turn
    sampling = SamplingParams(max_new_tokens=load.num_tokens, temperature=0.0, seed=0, ignore_eos=not end_themselves)
    few = SamplingParams(max_new_tokens=WARM_UP_TOKENS, temperature=0.0, seed=0, ignore_eos=not end_themselves)
    keys, runs = list(engines), {key: list[Row]() for key in engines}
    for turn in range(rounds):
        shift = turn * len(keys) // rounds  # none of them is always the first
        for key in (*keys[shift:], *keys[:shift]):
            client = engines[key].client
            await run_load(client, sent[: max(load.batch, FEWEST_TO_WARM_UP)], load.batch, few)
            runs[key].append(await measured_run(client, load, sent, sampling))
    return runs


async def measured_run(client: Client, load: Load, sent: Sequence[Tokens], sampling: SamplingParams) -> Row:
    """Figures of one run, from the client and from the engine's own counters."""
    before = await client.stats()
    figures = (await run_load(client, sent, load.batch, sampling)).figures
    return figures | of_device(before, await client.stats())


def of_device(before: Stats, after: Stats) -> Row:
    """Decode steps between two reports: milliseconds of the device each, and guesses of a slot."""
    steps = after.decode_steps_total - before.decode_steps_total
    slots = after.verify_steps_total - before.verify_steps_total
    seconds = after.decode_time_total - before.decode_time_total
    proposed = after.proposed_tokens_total - before.proposed_tokens_total
    return {
        "decode_steps": steps,
        "device_ms": round(1000 * seconds / max(steps, 1), 4),
        "guesses": round(proposed / max(slots, 1), 3),
    }


def rows_of(load: Load, runs: Mapping[Key, list[Row]]) -> Iterator[Row]:
    """A row for each policy of each case; all cases have the same rows of plain decoding."""
    for name in dict.fromkeys(name for name, _ in runs if name):
        by_policy = {FIXED: runs[name, FIXED], ADAPTIVE: runs[name, ADAPTIVE], PLAIN: runs[PLAIN_KEY]}
        medians = {policy: medians_of(found) for policy, found in by_policy.items()}
        for policy, found in by_policy.items():
            speed = medians[policy]["tokens_per_second"]
            yield {
                **{"case": name, "prompts": load.prompts, "batch": load.batch, "policy": policy},
                **{"num_requests": load.count, **medians[policy], "runs": columns_of(found)},
                **{f"over_{other}": ratio(speed, medians[other]["tokens_per_second"]) for other in (FIXED, PLAIN)},
            }


def medians_of(runs: Sequence[Row]) -> Row:
    names = ("tokens_per_second", "step_ms", "device_ms", "accept_length", "guesses")
    return {name: statistics.median(run[name] for run in runs) for name in names}


def columns_of(runs: Sequence[Row]) -> dict[str, list[Any]]:
    """What each run had, by name: a report with the names of every run is twice as long."""
    return {name: [run[name] for run in runs] for name in (runs[0] if runs else ())}


def ratio(speed: float, other: float) -> float:
    return round(speed / other, 4)


def print_rows(rows: Sequence[Row]) -> None:
    """One line for each policy of a load; plain decoding once."""
    plain = [row for row in rows if row["policy"] == PLAIN]
    for row in [*plain[:1], *(row for row in rows if row["policy"] != PLAIN)]:
        speeds = row["runs"]["tokens_per_second"]
        case = "" if row["policy"] == PLAIN else row["case"]
        print(
            f"{case:10} {row['prompts']:7} {row['batch']:5d}  {row['policy']:8} {row['tokens_per_second']:10.1f}"
            f" {row['step_ms']:8.3f} {row['device_ms']:9.3f} {row['accept_length']:7.3f} {row['guesses']:7.2f}"
            f" {row['over_fixed']:7.3f} {row['over_plain']:7.3f}  {min(speeds):.0f}..{max(speeds):.0f}",
            flush=True,
        )


async def measure(targets: Mapping[str, Target], cases: Mapping[str, Case], run: Run) -> None:
    print(
        f"{'case':10} {'prompts':7} {'batch':>5}  {'policy':8} {'tok/s':>10} {'step ms':>8} {'device ms':>9}"
        f" {'accept':>7} {'guesses':>7} {'/fixed':>7} {'/plain':>7}  slowest..fastest run"
    )
    for name in dict.fromkeys(case.target for case in cases.values()):
        run.longest_s = 0.0
        await measure_target(targets[name], {key: case for key, case in cases.items() if case.target == name}, run)


def narrowed(target: Target, arguments: argparse.Namespace) -> Target:
    """As the command line asks for."""
    sizes = arguments.batch_sizes and [int(size) for size in arguments.batch_sizes.split(",")]
    loads = tuple(load for load in target.loads if not sizes or load.batch in sizes)
    return replace(target, loads=loads, rounds=arguments.rounds or target.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--heads", type=Path, help="folder with draft models for SmolLM2")
    parser.add_argument("--cases", help="8b-2.5, 8b-1.3, ngram, chain, tree, standalone (needs --heads); default: all")
    parser.add_argument("--batch-sizes", help="of 1, 8, 32, 64, 128, 256; default: all")
    parser.add_argument("--rounds", type=int, help="default: 2 for 8b, 3 for SmolLM2, whose runs are short")
    parser.add_argument("--limit-s", type=float, default=600.0, help="time of everything, at most")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a CPU")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        targets, known = tiny(directory) if arguments.tiny else (TARGETS, known_cases(arguments.heads))
        names = arguments.cases.split(",") if arguments.cases else list(known)
        if unknown := [name for name in names if name not in known]:
            parser.error(f"no case {', '.join(unknown)}; there are {', '.join(known)}")
        targets = {name: narrowed(target, arguments) for name, target in targets.items()}
        report: Row = {"benchmark": "width_policy", "run": {}, "cases": {}, "rows": []}
        run = Run(report, arguments.output, time.monotonic() + arguments.limit_s)
        asyncio.run(measure(targets, {name: known[name] for name in names}, run))


if __name__ == "__main__":
    main()
