"""`overlap-spec bench latency|throughput|scheduler`: measure, print a table, write JSON.

Not here: how anything is measured (`bench/`). The flags of the engine are those of `serve`.
"""

import argparse
import asyncio
from typing import Any

from rich.console import Console
from rich.table import Table

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.bench.runs import Workload, run_latency, run_throughput
from overlap_spec.bench.scheduler import measure_scheduler
from overlap_spec.cli.flags import add_engine_flags, engine_config
from overlap_spec.cli.parser import UsageError

SCHEDULER_BATCHES = (1, 8, 64, 256)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, on what, and the engine's flags."""
    parser.add_argument("what", choices=("latency", "throughput", "scheduler"), help="what to measure")
    parser.add_argument("--output", metavar="FILE", help="write the figures to this JSON file")
    parser.add_argument("--prompts", default="chat20", metavar="NAME", help="chat20, peer64, random or a JSON file")
    parser.add_argument("--num-tokens", type=int, default=256, metavar="N", help="tokens per answer at most")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="of latency runs")
    parser.add_argument("--batch-sizes", default="1,8,64", metavar="N,N,..", help="of throughput runs")
    parser.add_argument("--with-plain", action="store_true", help="measure the engine without speculation too")
    parser.add_argument("--with-transformers", action="store_true", help="measure transformers' generate too (latency)")
    parser.add_argument("--commit", metavar="SHA", help="of the source, where there is no git metadata")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status."""
    if arguments.what == "scheduler":
        run_facts = describe_run("cpu", 1, arguments.commit)
        batches = [measure_scheduler(batch) for batch in SCHEDULER_BATCHES]
        report: dict[str, Any] = {"benchmark": "scheduler", "run": run_facts, "batches": batches}
    else:
        report = asyncio.run(_measure(arguments))
    Console().print(_table(report))
    if arguments.output:
        write_report(arguments.output, report)
    return 0


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    config = engine_config(arguments, log_level="warning")
    workload = Workload(
        arguments.prompts, arguments.num_tokens, arguments.temperature, _sizes(arguments.batch_sizes), arguments.commit
    )
    if arguments.what == "latency":
        return await run_latency(config, workload, arguments.with_plain, arguments.with_transformers)
    if arguments.with_transformers:
        raise UsageError("--with-transformers goes with latency only")
    return await run_throughput(config, workload, arguments.with_plain)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--batch-sizes: must be positive integers separated by commas, got {text!r}")
    return sizes


def _table(report: dict[str, Any]) -> Table:
    """One row per measurement; nested parts stay in the JSON."""
    table = Table(title=f"{report['benchmark']}, {report['run']['device']}, commit {report['run']['commit']}")
    rows = [{"": name} | row for name, part in report.items() for row in _rows(name, part)]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    return table


def _rows(name: str, part: Any) -> list[dict[str, Any]]:
    if name in ("run", "workload", "benchmark"):
        return []
    if isinstance(part, list):
        return [_flat(row) for row in part]
    return [_flat(row) for row in part.get("batches", [part])]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Scalars only, at a readable precision."""
    scalars = {key: value for key, value in row.items() if not isinstance(value, dict | list)}
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in scalars.items()}
