"""`overlap-spec bench latency|throughput|scheduler|step|methods|serve`: measure, print a table, write JSON.

The flags of the engine are those of `serve`.
"""

import argparse
import logging
import sys
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.bench.runs import run_latency, run_throughput
from overlap_spec.bench.scheduler import measure_scheduler
from overlap_spec.bench.step import run_step
from overlap_spec.bench.workload import SAMPLED, Workload
from overlap_spec.config.fields import config_fields
from overlap_spec.entrypoints.cli.bench_methods import (
    BATCH_SIZES,
    add_methods_arguments,
    check_methods_arguments,
    measure_methods,
    methods_status,
    print_methods,
)
from overlap_spec.entrypoints.cli.bench_serve import add_serve_arguments, check_serve_arguments, measure_serve
from overlap_spec.entrypoints.cli.bench_serve_tables import print_serve
from overlap_spec.entrypoints.cli.bench_step import add_step_arguments, check_step_arguments, print_step
from overlap_spec.entrypoints.cli.flag_groups import ONLY_SERVED
from overlap_spec.entrypoints.cli.flags import add_engine_flags, engine_config, refuse_flags
from overlap_spec.entrypoints.cli.parser import UsageError
from overlap_spec.entrypoints.http.in_process import served

PLAIN_WIDTH = 140  # columns where stdout is no terminal
ABREAST = 4  # columns of figures that fit 80 characters
PROMPTS = "chat20"
NUM_TOKENS = 256
THROUGHPUT_BATCHES = "1,8,64"
SCHEDULER_BATCHES = (1, 8, 64, 256)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, on what, and the engine's flags."""
    what = ("latency", "throughput", "scheduler", "step", "methods", "serve")
    parser.add_argument("what", choices=what, metavar="|".join(what), help="what to measure")
    parser.add_argument("--output", metavar="FILE", help="write the figures to this JSON file")
    parser.add_argument("--prompts", metavar="NAME", help="chat20 (default), copy20, peer64, random or a file")
    parser.add_argument("--num-tokens", type=int, default=NUM_TOKENS, metavar="N", help="tokens per answer at most")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="of latency, methods and step runs")
    parser.add_argument("--batch-sizes", metavar="N,N,..", help="of throughput and methods runs")
    parser.add_argument("--with-plain", action="store_true", help="measure the engine without speculation too")
    parser.add_argument("--with-depth1", action="store_true", help="measure one step in flight too (throughput)")
    parser.add_argument(
        "--with-chats", metavar="NAME", help="answer these prompts one by one too, to the end of turn (throughput)"
    )
    drawn = ", and ".join(way.label for way in SAMPLED)
    parser.add_argument(
        "--with-sampled", action="store_true", help=f"measure {drawn} after greedy (latency, throughput)"
    )
    parser.add_argument("--with-transformers", action="store_true", help="measure transformers' generate too (latency)")
    parser.add_argument("--runs", type=int, metavar="N", help="the best of N counts (default: latency 1, methods 2)")
    add_step_arguments(parser)
    add_methods_arguments(parser)
    add_serve_arguments(parser)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status."""
    check_step_arguments(arguments)
    check_methods_arguments(arguments)
    check_serve_arguments(arguments, NUM_TOKENS)
    _check_runs(arguments)
    _refuse_ignored_flags(arguments)
    if arguments.temperature and arguments.what in ("throughput", "scheduler"):
        raise UsageError("--temperature goes with latency, methods and step; throughput takes --with-sampled")
    _show_progress(arguments.what)
    if arguments.what == "scheduler":
        run_facts = describe_run("cpu", 1)
        batches = [measure_scheduler(batch) for batch in SCHEDULER_BATCHES]
        report: dict[str, Any] = {"benchmark": "scheduler", "run": run_facts, "batches": batches}
    else:
        import uvloop  # the event loop of `serve`

        report = uvloop.run(_measure(arguments))
    _print(report)
    if arguments.output:
        write_report(arguments.output, report)
    return methods_status(report) if arguments.what == "methods" else 0


def _show_progress(what: str) -> None:
    """Lines on stderr: `what` at once, before slow imports, then what the benchmark logs."""
    logger = logging.getLogger("overlap_spec.bench")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.info("bench %s: starting", what)


def _refuse_ignored_flags(arguments: argparse.Namespace) -> None:
    """Raises: UsageError for a flag of the engine that this benchmark does not read."""
    if arguments.what == "scheduler":
        every = (field.name for field in config_fields())
        refuse_flags(arguments, every, "bench scheduler times the scheduler alone, without an engine")
    elif arguments.what != "serve":
        refuse_flags(arguments, ONLY_SERVED, f"bench {arguments.what} starts no HTTP server")


def _check_runs(arguments: argparse.Namespace) -> None:
    """Raises: UsageError if --runs would have no effect, or is no number of runs."""
    if arguments.runs is None:
        return
    if arguments.what not in ("latency", "methods"):
        raise UsageError("--runs goes with latency and methods only")
    if arguments.runs < 1:
        raise UsageError(f"--runs: must be at least 1, got {arguments.runs}")


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.what == "methods":
        return await measure_methods(arguments, _sizes(arguments.batch_sizes or BATCH_SIZES))
    if arguments.what == "serve":
        return await measure_serve(arguments, logging.getLogger("overlap_spec.bench"))
    config = engine_config(arguments, log_level="warning", audit_rate=0.0)
    if arguments.what == "step":
        return await run_step(config, _step_workload(arguments), arguments.trace)
    workload = Workload(
        arguments.prompts or PROMPTS,
        arguments.num_tokens,
        arguments.temperature,
        _sizes(arguments.batch_sizes or THROUGHPUT_BATCHES),
        arguments.with_chats,
        SAMPLED if arguments.with_sampled else (),
    )
    if arguments.what == "latency":
        if arguments.with_depth1 or arguments.with_chats:
            raise UsageError("--with-depth1 and --with-chats go with throughput only")
        runs = 1 if arguments.runs is None else arguments.runs
        return await run_latency(config, workload, arguments.with_plain, arguments.with_transformers, runs)
    if arguments.with_transformers:
        raise UsageError("--with-transformers goes with latency only")
    flags = {"plain": arguments.with_plain, "depth1": arguments.with_depth1}
    return await run_throughput(config, workload, [name for name, given in flags.items() if given], served)


def _step_workload(arguments: argparse.Namespace) -> Workload:
    sizes = (arguments.batch_size or 1,)
    return Workload(arguments.prompts or PROMPTS, arguments.num_tokens, arguments.temperature, sizes)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--batch-sizes: must be positive integers separated by commas, got {text!r}")
    return sizes


def _print(report: dict[str, Any]) -> None:
    """Tables of the figures; nested parts stay in the JSON."""
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    run = report["run"]
    device = f"{run['cpu']}, {run['num_threads']} threads" if run["device"] == "cpu" else run["device"]
    console.print(f"{report['benchmark']}, {device}, commit {run['commit']}")
    if report.get("acceptance", "real") not in ("real", ""):
        console.print(report["acceptance"])
    if report["benchmark"] == "serve":
        return print_serve(console, report)
    if "step" in report:
        return print_step(console, report)
    if "methods" in report:
        return print_methods(console, report)
    alike: dict[tuple[str, ...], list[tuple[str, dict[str, Any]]]] = {}  # what has the same figures
    for name, part in report.items():
        for row in _rows(name, part):
            alike.setdefault(tuple(row), []).append((name, row))
    for figures, rows in alike.items():
        for first in range(0, len(rows), ABREAST):
            console.print(_table(figures, rows[first : first + ABREAST]))


def _table(figures: tuple[str, ...], rows: list[tuple[str, dict[str, Any]]]) -> Table:
    """A line for each figure, so that its name fits any terminal."""
    table = Table("", *(Column(name, overflow="fold") for name, _ in rows))
    for figure in figures:
        table.add_row(figure, *(str(row[figure]) for _, row in rows))
    return table


def _rows(name: str, part: Any) -> list[dict[str, Any]]:
    if name in ("run", "workload", "benchmark", "acceptance"):
        return []
    if isinstance(part, list):
        return [_flat(row) for row in part]
    also = [part[key] for key in ("first_token", "chats") if key in part]
    rows = [*part.get("batches", [part]), *also]
    sampled = [drawn for row in rows for drawn in row.get("sampled", [])]
    return [_flat(row) for row in (*rows, *sampled)]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Scalars only, at a readable precision."""
    scalars = {key: value for key, value in row.items() if not isinstance(value, dict | list)}
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in scalars.items()}
