"""Times an engine of two ranks beside one of one rank, on two GPUs, and what its bytes and sums take at least.

    python benchmarks/tensor_parallel.py --output FILE        about 430 s on two H200; goes on with a FILE that is there
    python benchmarks/tensor_parallel.py --cases 8b,mixture   of 8b, 70b, mixture
    python benchmarks/tensor_parallel.py --tiny               tiny shapes on a CPU, to see that everything runs

Weights are random with a model's true shape; acceptance is synthetic. The engines of a setup are up together and are
measured in turns; which of them starts first changes from setup to setup. Figures are medians of rounds:

    step     what the engine's own counts say: the device's time of decode steps and its idle time before them
    prompt   from sending a prompt of random tokens to the first token; nothing else runs, and nothing is cached

Floors are those of a rank: `metrics/step_floor.py` at the device's ceilings, with the experts that the engine has
counted, and for a prompt its operations; then the sums over ranks, two of a layer, by what `reductions.py` has measured
between GPUs of this kind. Sums of a divided draft, two of a layer, and gathered logits are not counted.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from documents.two_gpus import SUMS, reports
from rows.rank_floors import Card, Needs, needs_of, times_of
from rows.rank_setups import Setup, setups, tiny
from rows.rank_steps import first_token, long_prompt, timed_steps

from overlap_spec.bench.report import describe_engine, write_report
from overlap_spec.engine import Engine
from overlap_spec.errors import OverlapSpecError
from overlap_spec.metrics.step_floor import H200, Ceiling
from overlap_spec.runtime import machine

RESULTS = Path(__file__).parent / "results"
MUSTS = {("8b plain", 1): 2.6, ("8b chain", 1): 3.2}  # ms of a step on two H200, by setup and batch
PROMPT_TOKENS, TOKENS = 128, {"plain": 48, "chain": 96}  # of the requests of a batch
ROUNDS, LIMIT_S = 3, 500.0
SETUP_S, START_MOST_S, ROUND_MOST_S = 40.0, 150.0, 60.0  # what a setup takes at least; what starts and rounds may take

Row = dict[str, Any]


@dataclass
class Run:
    """The report so far, and until when there is time."""

    report: Row
    output: str | None
    ends_at: float
    rounds: int

    def missing(self, setup: Setup) -> list[tuple[int, str, int]]:
        """Rows that are not in the report: ranks, kind and size."""
        there = {(row["setup"], row["ranks"], kind, row.get(kind)) for row in self.rows for kind in ("batch", "prompt")}
        return [key for key in setup.sizes() if (setup.name, *key) not in there]

    @property
    def rows(self) -> list[Row]:
        rows: list[Row] = self.report["rows"]
        return rows

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        self.save()

    def save(self) -> None:
        """With what must be, if these are the GPUs that it is said of."""
        if self.report["run"].get("device") == H200:
            self.report["musts"] = list(compared(self.rows))
        if self.output is not None:
            write_report(self.output, self.report)


def compared(rows: Sequence[Row]) -> Sequence[Row]:
    """What a step of two ranks takes, and what it must take at most."""
    found = {(row["setup"], row["batch"]): row["ms"] for row in rows if row["ranks"] == 2 and "batch" in row}
    return [
        {"setup": name, "batch": batch, "ms": found[name, batch], "most_ms": most, "kept": found[name, batch] <= most}
        for (name, batch), most in MUSTS.items()
        if (name, batch) in found
    ]


class Measured:
    """A setup whose engines run, by their ranks."""

    def __init__(self, setup: Setup, run: Run, counting: Executor) -> None:
        self.setup, self.run, self.counting = setup, run, counting
        self.engines: dict[int, Engine] = {}
        self.needs: dict[int, Needs] = {}

    async def start(self, stack: AsyncExitStack, ranks: int) -> None:
        """Raises: OverlapSpecError, TimeoutError."""
        config, begun = self.setup.config(ranks), time.monotonic()
        needs = self.counting.submit(needs_of, config, machine.inspect())
        async with asyncio.timeout(START_MOST_S):
            engine = await stack.enter_async_context(Engine(config))
        self.engines[ranks] = engine
        self.run.report["run"] = self.run.report["run"] or describe_engine(engine)
        held = [round((each.weight_bytes + each.kv_bytes) / 1e9, 2) for each in engine.facts.worker.ranks]
        about = {"start_s": round(time.monotonic() - begun, 1), "held_gb": held}
        self.run.report["engines"][f"{self.setup.name}, {ranks}"] = about
        print(f"{self.setup.name}, ranks {ranks}: {about}", flush=True)
        self.needs[ranks] = await asyncio.wrap_future(needs)

    async def measure(self, kind: str, size: int, wanted: Sequence[int]) -> None:
        """Add the rows of a batch or of a prompt's length: one round that does not count, then rounds in turns."""
        runs: dict[int, list[float]] = {ranks: [] for ranks in wanted}
        experts: dict[int, float | None] = {}
        for turn in range(self.run.rounds + 1):
            for ranks in wanted if turn % 2 else wanted[::-1]:
                async with asyncio.timeout(ROUND_MOST_S):
                    ms, experts[ranks] = await self.once(ranks, kind, size, turn)
                if turn:
                    runs[ranks].append(round(ms, 4))
        for ranks, found in runs.items():
            row = {"setup": self.setup.name, "ranks": ranks, kind: size, "ms": round(statistics.median(found), 4)}
            row |= self.floor(ranks, kind, size, experts[ranks]) | {"runs": found}
            self.run.add(row | ({} if experts[ranks] is None else {"experts": round(experts[ranks] or 0.0, 2)}))

    async def once(self, ranks: int, kind: str, size: int, turn: int) -> tuple[float, float | None]:
        """Milliseconds, and the experts that a layer of a step has read."""
        client, vocab_size = self.engines[ranks].client, self.engines[ranks].settings.model.files.vocab_size
        if kind == "prompt":
            return await first_token(client, long_prompt(size, turn, vocab_size)), None
        ms, stats = await timed_steps(client, size, TOKENS[self.setup.method], vocab_size)
        return ms, stats.experts_read

    def floor(self, ranks: int, kind: str, size: int, experts: float | None) -> Row:
        facts = self.engines[ranks].facts.worker
        card = Card(Ceiling(facts.bytes_per_s, facts.flop_per_s), times_of(known_sums(facts.device)))
        if kind == "prompt":
            return self.needs[ranks].prompt(size, card)
        context = size * (PROMPT_TOKENS + TOKENS[self.setup.method] // 2)
        return self.needs[ranks].step(size, context, experts, card)


def known_sums(device: str) -> list[Row]:
    """Rows of `reductions.py` on such GPUs, the newest; none if there are none."""
    _, report = reports(RESULTS).get(SUMS, ("", {"run": {"device": ""}}))
    return list(report["rows"]) if report["run"]["device"] == device else []


async def measure_setup(setup: Setup, run: Run, turned: bool, counting: Executor) -> None:
    """Add what is missing of it. Engines that cannot start, or fail, are rows that say so."""
    missing, measured = run.missing(setup), Measured(setup, run, counting)
    wanted = sorted({ranks for ranks, _, _ in missing}, reverse=turned)
    async with AsyncExitStack() as stack:
        for ranks in wanted:
            try:
                await measured.start(stack, ranks)
            except (OverlapSpecError, TimeoutError) as error:
                said = f"{type(error).__name__}: {error}"[:300]
                run.add({"setup": setup.name, "ranks": ranks, "refused": said})
        for kind, size in dict.fromkeys((kind, size) for _, kind, size in missing):
            there = [ranks for ranks in wanted if ranks in measured.engines and (ranks, kind, size) in missing]
            if there:
                await measured.measure(kind, size, there)


async def measure(chosen: Sequence[Setup], run: Run) -> None:
    """All setups that have rows missing, as long as there is time."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as counting:  # it takes seconds: engines wait
        for index, setup in enumerate(chosen):
            if not run.missing(setup):
                continue
            if time.monotonic() + SETUP_S > run.ends_at:
                print(f"no time for {setup.name}", flush=True)
                continue
            try:
                async with asyncio.timeout(run.ends_at - time.monotonic()):
                    await measure_setup(setup, run, bool(index % 2), counting)
            except (OverlapSpecError, TimeoutError) as error:
                print(f"{setup.name}: {type(error).__name__}: {error}", flush=True)


def main() -> int:
    """Returns the exit status: 2 where GPUs are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--cases", help="8b, 70b, mixture, with commas; default: all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time of everything, at most")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on a CPU")
    arguments = parser.parse_args()
    if not arguments.tiny and (count := machine.inspect().num_gpus * machine.inspect().has_cuda) < 2:
        print(f"two ranks need two GPUs: this machine has {count}", file=sys.stderr)
        return 2
    known = setups()
    names = arguments.cases.split(",") if arguments.cases else [setup.case for setup in known]
    if unknown := set(names) - {setup.case for setup in known}:
        parser.error(f"no case {', '.join(sorted(unknown))}")
    report: Row = {"benchmark": "tensor_parallel", "run": {}, "engines": {}, "rows": []}
    if arguments.output and Path(arguments.output).exists():
        report = json.loads(Path(arguments.output).read_text())
        report["rows"] = [row for row in report["rows"] if "refused" not in row]
    run = Run(report, arguments.output, time.monotonic() + arguments.limit_s, arguments.rounds)
    with tempfile.TemporaryDirectory() as directory:
        chosen = [setup for setup in known if setup.case in names]
        if arguments.tiny:
            chosen = [tiny(setup, Path(directory)) for setup in chosen]
        asyncio.run(measure(chosen, run))
    for must in run.report.get("musts", ()):
        print(must, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
