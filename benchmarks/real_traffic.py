"""Rows of the table of real traffic that no other benchmark measures (docs/benchmarks.md, "Real traffic").

    python benchmarks/real_traffic.py --output benchmarks/results/real_traffic_h200.json     six minutes on an H200
    python benchmarks/real_traffic.py --rows 1,2,6                                            some of the rows
    python benchmarks/real_traffic.py --tiny                                                  a minute on a CPU

    1    a sampled step over a greedy one, plain and chain      11   SSE connections over one batched request
    2    the first token of long prompts                        12   step efficiency of smaller shapes
    6    a chain's step at long contexts                        13   start to ready, with cold and warm kernel caches
    7    the next turn of a conversation                        15   one token of many new prompts
    10   steps of a batch of 256
    16   row 6 with KV pages of 8 bits
    17   steps with weights of 8 and 4 bits

Every engine starts once, and rows are measured in the order in which they are named. Each cell is written when it is
measured; a run that is cut off at `--limit-s` keeps them, and a part that fails does not stop the others. Cells of an
earlier run in the same file are kept if it ran the same code (`rows/results.py`).
"""

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import uvloop
from rows.measure import Bench
from rows.parts import ROWS, EnginePart, Part, ServerPart, chosen, seconds
from rows.results import Results
from rows.setups import ENGINES, SERVERS, TINY, Flags, Scale, tiny_engines

from overlap_spec.bench.report import describe_settings
from overlap_spec.bench.runs import Endpoint
from overlap_spec.bench.traffic.processes import Target
from overlap_spec.config.fields import config_from
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.cli.service import served


@dataclass(frozen=True)
class Run:
    """What is run, and where its cells go."""

    engines: dict[str, Flags]
    servers: dict[str, Flags]
    scale: Scale
    results: Results

    async def group(self, parts: list[Part]) -> None:
        """Measure parts that share an engine, or one that starts servers."""
        engine_parts = [part for part in parts if isinstance(part, EnginePart)]
        if engine_parts:
            await self._on_engine(engine_parts)
        for part in parts:
            if isinstance(part, ServerPart):
                await self._of_servers(part)

    async def _on_engine(self, parts: list[EnginePart]) -> None:
        setup, begun = parts[0].setup, time.monotonic()
        async with Engine(config_from(self.engines[setup])) as engine, served(engine) as (host, port):
            start_s = round(time.monotonic() - begun, 1)
            print(f"{setup}: started in {start_s} s", flush=True)
            self.results.describe(engine.facts.worker.device, engine.settings.num_threads)
            self.results.set_up(setup, {"start_s": start_s, **describe_settings(engine)})
            vocab_size = engine.settings.model.files.vocab_size
            target = Target(url=f"http://{host}:{port}", vocab_size=vocab_size)
            bench = Bench(engine, Endpoint(host, port), target, self.scale)
            for part in parts:
                try:
                    async for cell in part.cells(bench):
                        self.results.add(cell)
                except Exception as error:  # the other parts are measured all the same
                    self.results.fail(f"rows {part.rows} of {setup}", error)

    async def _of_servers(self, part: ServerPart) -> None:
        name = f"{part.setup} server"

        def introduce(info: dict[str, Any]) -> None:
            self.results.describe(info["worker"]["device"], 0)
            self.results.set_up(name, {"flags": self.servers[part.setup], "worker": info["worker"]})

        async for cell in part.cells(self.servers[part.setup], self.scale, introduce):
            self.results.add(cell)


async def measure(run: Run, rows: list[int], limit_s: float) -> None:
    """Measure the rows until the time is over."""
    ends_at = asyncio.get_running_loop().time() + limit_s
    for name, parts in chosen(rows).items():
        measured = sorted({row for part in parts for row in part.rows})
        print(f"{name}: rows {measured}, about {seconds(parts)} s", flush=True)
        limit = asyncio.timeout_at(ends_at)
        try:
            async with limit:
                await run.group(parts)
        except TimeoutError:
            if limit.expired():
                print(f"{limit_s:g} s are over", flush=True)
                return
            raise
        except Exception as error:  # such as an engine that does not start
            run.results.fail(name, error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,6,16,17,7,15,10,12,11,13")
    parser.add_argument("--limit-s", type=float, default=420.0, help="time of everything, at most")
    parser.add_argument("--output")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, for a CPU")
    arguments = parser.parse_args()
    rows = [int(row) for row in arguments.rows.split(",")]
    if unknown := [row for row in rows if row not in ROWS]:
        parser.error(f"no row {', '.join(map(str, unknown))}; there are {', '.join(map(str, ROWS))}")
    results = Results(arguments.output)
    with tempfile.TemporaryDirectory() as directory:
        engines, servers = tiny_engines(directory) if arguments.tiny else (ENGINES, SERVERS)
        run = Run(engines, servers, TINY if arguments.tiny else Scale(), results)
        uvloop.run(measure(run, rows, arguments.limit_s))


if __name__ == "__main__":
    main()
