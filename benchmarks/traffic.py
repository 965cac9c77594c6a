"""Traffic at the 8B shape, with speculation and plain: a long prompt among streams, Poisson arrivals, the highest rate.

    python benchmarks/traffic.py --parts interruption,poisson --output benchmarks/results/traffic_h200.json    100 s
    python benchmarks/traffic.py --parts rate --output benchmarks/results/traffic_rate_h200.json    200 s on an H200
    python benchmarks/traffic.py --tiny                                               two minutes on a CPU

The 8B shape has random weights, its acceptance is synthetic, and the same engine decodes plainly after it. Requests are
server-sent events over HTTP, from client processes. What was measured is written after every part, so a run that is cut
off at `--limit-s` leaves what it has. The parts:

    interruption   8 streams decode, and a long prompt arrives: the longest gap of a stream, the prompt's first token
    poisson        16 requests a second (prompts lognormal 6.6, 1, 64-8,000 tokens; answers 5, 0.7, 16-600)
    rate           the highest rate of such requests at which first tokens and time per token keep their limits
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from _tests_path import ROOT
from msgspec.structs import replace

from overlap_spec.bench.report import acceptance_of, describe_engine, describe_settings, write_report
from overlap_spec.bench.traffic.arrivals import ANSWERS, Lengths, Poisson, long_prompt
from overlap_spec.bench.traffic.processes import Running, Target
from overlap_spec.bench.traffic.rate_search import Limits
from overlap_spec.bench.traffic.runs import Clients, Measurement, Search, Traffic
from overlap_spec.config import EngineConfig
from overlap_spec.config.fields import config_from
from overlap_spec.config.resolve import without_speculation
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.cli.bench_serve import VERDICTS
from overlap_spec.entrypoints.cli.service import served

SHAPES = Path(os.path.relpath(ROOT / "benchmarks" / "shapes"))  # reports name it
CHAIN: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "log_level": "warning",
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_simulate_acc_len": (2.5,),
}
EIGHT_B = CHAIN | {
    "model_path": str(SHAPES / "llama-3.1-8b"),
    "speculative_draft_model_path": str(SHAPES / "llama-3.1-8b-eagle3"),
    "max_total_tokens": 262144,
    "context_length": 65536,
    "max_running_requests": 128,
}
PARTS = ("interruption", "poisson", "rate")
LEAST_S = 5.0  # a part is not begun with less time than that
FIRST_RATES = {"chain": 12.0, "apart": 12.0, "plain": 8.0}  # requests a second, near where an H200 breaks its promises

Row = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """The sizes of the parts."""

    long_prompts: tuple[int, ...] = (16_000, 40_000)
    stream_answer: int = 16_000  # cut off when the long prompt is answered
    poisson: Poisson = Poisson(16.0, Lengths(6.6, 1.0, 64, 8000), ANSWERS)
    poisson_s: float = 20.0
    trial_s: float = 10.0
    limits: Limits = Limits()
    first_rates: Mapping[str, float] = field(default_factory=FIRST_RATES.copy)  # of the search, by engine

    def parts(
        self, engine: str, wanted: list[str], num_processes: int, search_s: float
    ) -> Iterator[tuple[Row, Traffic]]:
        """What is measured, in this order, with the columns that name it."""
        clients, search_clients = Clients(num_processes), Clients(num_processes, limit_s=search_s)
        if "interruption" in wanted:
            for length in self.long_prompts:
                arrivals = long_prompt(length, 8, self.stream_answer)
                apart = Clients(num_processes, seed=length)  # a longer prompt of the same seed begins as a shorter one
                yield {"part": "interruption", "long_prompt": length}, Traffic(arrivals, apart, self.limits)
        arrivals = self.poisson.arrivals(self.poisson.count_for(self.poisson_s), seed=0)
        if "poisson" in wanted:
            yield {"part": "poisson", "rate": self.poisson.rate}, Traffic(arrivals, clients, self.limits)
        if "rate" in wanted:
            first = self.first_rates.get(engine, self.poisson.rate)
            near = Poisson(first, self.poisson.prompts, self.poisson.answers)
            search = Search(near, self.trial_s, precision=0.08, growth=1.3)
            yield {"part": "rate"}, Traffic(arrivals, search_clients, self.limits, search)


TINY = Scale(
    long_prompts=(800,),
    stream_answer=1800,
    poisson=Poisson(4.0, Lengths(3.0, 0.7, 4, 100), Lengths(2.5, 0.5, 4, 40)),
    poisson_s=4.0,
    trial_s=3.0,
    limits=Limits(first_token_ms=1000.0, tpot_ms=60.0),
    first_rates={},
)


def tiny_flags(directory: str) -> Row:
    """A tiny target and head whose config files are all there is of them."""
    from support.tiny.models import tiny_eagle3, tiny_target  # imports torch, which no other shape needs here

    target = tiny_target(seed=1, max_position_embeddings=2048)
    for name, checkpoint in (("target", target), ("head", tiny_eagle3(seed=2, target=target))):
        (Path(directory) / name).mkdir()
        (Path(directory) / name / "config.json").write_text(json.dumps(checkpoint.config))
    paths = {"model_path": f"{directory}/target", "speculative_draft_model_path": f"{directory}/head"}
    return CHAIN | paths | {"max_total_tokens": 16000, "max_running_requests": 16}


async def measure(arguments: argparse.Namespace, scale: Scale, config: EngineConfig, report: Row) -> None:
    """Adds a row for every engine and part, as long as there is time."""
    ends_at = time.monotonic() + arguments.limit_s
    apart = replace(config, enable_mixed_chunk=False)
    engines = {"chain": config, "apart": apart, "plain": without_speculation(config)}
    wanted = arguments.parts.split(",")
    for name in arguments.engines.split(","):
        if ends_at - time.monotonic() < LEAST_S:
            return
        started = time.monotonic()
        async with Engine(engines[name]) as engine, served(engine) as (host, port):
            if "run" not in report:
                report |= {"run": describe_engine(engine), "acceptance": acceptance_of(engine)}
            report["engines"][name] = {"start_s": round(time.monotonic() - started, 1), **describe_settings(engine)}
            vocab_size = engine.settings.model.files.vocab_size
            target = Target(url=f"http://{host}:{port}", vocab_size=vocab_size)
            for columns, traffic in scale.parts(name, wanted, arguments.client_processes, arguments.search_s):
                now = time.monotonic()
                if ends_at - now < LEAST_S:
                    return
                until = min(ends_at, now + (traffic.clients.limit_s or arguments.limit_s))
                figures = await Measurement(target, traffic, quiet, until).figures()
                row = {"engine": name, **columns, "took_s": round(time.monotonic() - now, 1), **figures}
                report["rows"].append(row)
                print(line_of(row), flush=True)
                save(arguments.output, report)


def line_of(row: Row) -> str:
    """The figures that a part is about."""
    head = f"{row['engine']} {row['part']}"
    if "search" in row:
        search = row["search"]
        tried = ", ".join(f"{trial['rate']:g} {VERDICTS[trial['met']]}" for trial in search["trials"])
        return f"{head}: {search['requests_per_second']:g} requests/s ({tried}) in {row['took_s']} s"
    busy = f"client {max(row['client']['cpu_shares']):.0%}, took {row['took_s']} s"
    if seen := row.get("interruption"):
        return (
            f"{head} {row['long_prompt']}: longest gap {seen['longest_gap_ms']} ms"
            f" ({seen['longest_gap_before_ms']} before), first token {seen['first_token_among_streams_ms']} ms,"
            f" {seen['first_token_ratio']}x alone, {seen['streams_that_ended_before']} streams ended before; {busy}"
        )
    spread = {name: row[name].get("p99") for name in ("first_token_ms", "time_per_token_ms")}
    longest = row["longest_gap_ms"].get("max")
    return (
        f"{head}: first token p99 {spread['first_token_ms']}, per token p99 {spread['time_per_token_ms']},"
        f" longest gap {longest} ms; {row['answered']}/{row['planned']} answered, {row['tokens_per_second']} tok/s,"
        f" errors {row['errors']}; {busy}"
    )


def quiet(what: str, running: Running) -> None:
    """Show nothing."""


def save(path: str | None, report: Row) -> None:
    """Write what there is so far."""
    if path is not None:
        rates = {row["engine"]: row["search"]["requests_per_second"] for row in report["rows"] if "search" in row}
        if rates.get("plain"):
            report["rate_over_plain"] = round(rates.get("chain", 0.0) / rates["plain"], 3)
        write_report(path, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--engines", default="chain,plain", help="of chain, apart (--no-enable-mixed-chunk) and plain")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--search-s", type=float, default=75.0, help="time of one engine's search for a rate, at most")
    parser.add_argument("--limit-s", type=float, default=300.0, help="time of everything, at most")
    parser.add_argument("--client-processes", type=int, default=2)
    arguments = parser.parse_args()
    report: Row = {"benchmark": "traffic", "engines": {}, "rows": []}
    with tempfile.TemporaryDirectory() as directory:
        config = config_from(tiny_flags(directory) if arguments.tiny else EIGHT_B)
        uvloop.run(measure(arguments, TINY if arguments.tiny else Scale(), config, report))


if __name__ == "__main__":
    main()
