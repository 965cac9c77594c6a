"""Whether default numbers are ever slower than plain decoding, or than the best fixed width.

    python benchmarks/never_slower.py --output benchmarks/results/never_slower_h200.json
    python benchmarks/never_slower.py --cases 8b-2.5 --limit-s 540 --output FILE       goes on with FILE
    python benchmarks/never_slower.py --cases 8b-1.3 --batches 8,24,32,256 --rounds 2  cells of these requests alone
    python benchmarks/never_slower.py --tiny                                           some minutes on a CPU
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

`grid/cases.py` has the cases, `grid/calls.py` what one call sends and counts, `grid/report.py` what is kept of it.
"""

import argparse
import asyncio
import copy
import dataclasses
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from grid.calls import WAVES, Load, Row, run_cell
from grid.cases import (
    FALLS,
    HIGH,
    LOW,
    Case,
    accepting,
    bounds_of,
    drawn,
    known_cases,
    longest,
    of_one_method,
    prompts_of,
    tiny_case,
)
from grid.report import DEFAULT, PLAIN, Run, defaults_are_whole, is_whole, joined, row_of

from overlap_spec.bench.report import describe_engine, describe_settings, write_report
from overlap_spec.client import Client
from overlap_spec.config import EngineConfig
from overlap_spec.config.fields import config_from
from overlap_spec.config.resolve import deterministic, without_speculation
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.http.http_server import freeze_heap
from overlap_spec.hub import resolve_model

ROUNDS = 3
_UNKEPT = deterministic._unkept


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


async def measure(cases: Mapping[str, Case], run: Run) -> None:
    left = {name: case for name, case in cases.items() if not is_whole(name, case, run)}
    for beside in dict.fromkeys(case.beside for case in left.values()):
        names = [name for name, case in left.items() if case.beside == beside]
        at_once = left[names[0]].at_once
        for begin in range(0, len(names), at_once):
            if run.has_time(left[names[0]].start_s):
                await measure_together({name: left[name] for name in names[begin : begin + at_once]}, run)


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
