"""`overlap-spec bench latency|throughput|scheduler|step|methods|serve`: measure, print a table, write JSON.

The flags of the engine are those of `serve`; `step` and `methods` have flags and tables of their own.
"""

import argparse
import logging
import math
import sys
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from overlap_spec import features
from overlap_spec.bench.methods import Comparison, run_methods
from overlap_spec.bench.methods_records import FULL, Drafts, chosen, full_rows, notes, read_method_records
from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.bench.runs import run_latency, run_throughput
from overlap_spec.bench.scheduler import measure_scheduler
from overlap_spec.bench.step import run_step
from overlap_spec.bench.workload import RANDOM, SAMPLED, Workload, load_prompts
from overlap_spec.config.fields import config_fields
from overlap_spec.entrypoints.cli.bench_serve import (
    add_serve_arguments,
    check_serve_arguments,
    measure_serve,
    print_serve,
)
from overlap_spec.entrypoints.cli.flags import (
    ONLY_SERVED,
    UsageError,
    add_engine_flags,
    engine_config,
    flag_name,
    refuse_flags,
    result_file,
)
from overlap_spec.entrypoints.cli.service import served

OURS = ("draft", "token_map", "only", "methods", "num_prompts", "starts_at_once")  # of `methods` alone
READ_BY = {  # flags that not every benchmark reads, and those that do
    **dict.fromkeys(("prompts", "num_tokens"), ("latency", "throughput", "step", "methods")),
    "temperature": ("latency", "methods", "step"),
    "batch_sizes": ("throughput", "methods"),
    "with_plain": ("latency", "throughput", "serve"),
    "with_sampled": ("latency", "throughput"),
    **dict.fromkeys(("with_depth1", "with_chats"), ("throughput",)),
    "with_transformers": ("latency",),
    "runs": ("latency", "methods"),
    **dict.fromkeys(("trace", "batch_size"), ("step",)),
    **dict.fromkeys(OURS, ("methods",)),
}


def print_step(console: Console, report: dict[str, Any]) -> None:
    """Where the time goes: the device's parts and gap add up to the step, the host's run beside them."""
    step = report["step"]
    if not step["num_steps"]:
        console.print("no decode step was followed by another: give more --num-tokens")
        return
    table = Table("a decode step", "ms", "share of step")
    rows = {**step["parts_ms"], "gap": step["gap_ms"]}
    for name, ms in rows.items():
        table.add_row(name, f"{ms:.3f}", f"{ms / step['step_ms']:.1%}")
    table.add_section()
    table.add_row("step", f"{step['step_ms']:.3f}", "100%")
    table.add_section()
    for name, ms in step["host_ms"].items():
        table.add_row(f"host: {name}", f"{ms:.3f}", f"{ms / step['step_ms']:.1%}")
    table.add_row(
        "host time hidden", f"{step['host_hidden_ms']:.3f}", f"{step['host_hidden_ms'] / step['step_ms']:.1%}"
    )
    console.print(table)
    if split := step.get("last_step_split_ms"):
        console.print("of the last step alone: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in split.items()))
    widths = ", ".join(f"{count} of width {width}" for width, count in step["steps_by_width"].items())
    console.print(
        f"{widths}, at batch {report['workload']['batch']}: {step['tokens_per_second']} tok/s,"
        f" {step['queued_ahead']:.0%} of them queued before the tokens of the step before were read"
    )
    if step["efficiency"] is None:
        console.print("step efficiency: unknown, because this device's ceilings are")
    else:
        console.print(
            f"step efficiency: {step['efficiency']:.1%} (floor {step['floor_ms']:.3f} ms at {report['ceilings']})"
        )


METHOD_PROMPTS = "chat20,copy20"
BATCH_SIZES = "1,8,32"
WIDTHS = (9, 5, 6, 9, 9, 11, 7)  # of the printed columns, which are those of `FULL` between name and memory


def add_methods_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that only `bench methods` takes. None is the default of each: then it was not given."""
    group = parser.add_argument_group("methods")
    group.add_argument("--draft", action="append", metavar="NAME=PATH", help="draft of a method: EAGLE=DIRECTORY, ..")
    group.add_argument("--token-map", metavar="FILE", help="for the rows with a token map")
    group.add_argument("--only", metavar="NAME,NAME,..", help="algorithms to measure beside plain decoding")
    group.add_argument("--methods", metavar="FILE", help="JSON table of methods; default: the one that ships")
    group.add_argument("--num-prompts", type=int, metavar="N", help="take the first N of each set of prompts")
    group.add_argument("--starts-at-once", type=int, metavar="N", help="engines that start together (default: 1)")


def check_methods_arguments(arguments: argparse.Namespace) -> None:
    """A flag that would have no effect is refused. Raises: UsageError naming it."""
    if arguments.what != "methods":
        return
    for field in config_fields():
        if field.name.startswith("speculative_") and field.name in arguments:
            flag = flag_name(field.name)
            raise UsageError(f"{flag} does not go with methods: give --draft, --token-map or a table (--methods FILE)")


async def measure_methods(arguments: argparse.Namespace, batch_sizes: tuple[int, ...]) -> dict[str, Any]:
    """Run it. The report goes to --output after every method, so that an interrupted run leaves a part of it."""
    drafts = Drafts(_paths(arguments.draft or []), arguments.token_map)
    only = arguments.only.split(",") if arguments.only else []
    comparison = Comparison(
        chosen(read_method_records(arguments.methods), only, drafts),
        drafts,
        arguments.num_prompts,
        2 if arguments.runs is None else arguments.runs,
        1 if arguments.starts_at_once is None else arguments.starts_at_once,
    )
    prompts = arguments.prompts or METHOD_PROMPTS
    workload = Workload(prompts, arguments.num_tokens, arguments.temperature, batch_sizes)

    def told(report: dict[str, Any]) -> None:
        entry = report["methods"][-1]
        print(f"{entry['label']}: {entry['status']} {entry.get('reason', '')}".rstrip(), file=sys.stderr)
        if arguments.output:
            write_report(arguments.output, report)

    return await run_methods(engine_config(arguments, log_level="warning", audit_rate=0.0), workload, comparison, told)


def print_methods(console: Console, report: dict[str, Any]) -> None:
    """A table for each method, under its name and memory, and a line for everything that is in none."""
    for index, (head, rows) in enumerate(groupby(full_rows(report), lambda row: (row[0], *row[-2:]))):
        table = Table(*_columns(), show_header=index == 0, box=box.SQUARE)
        for row in rows:
            table.add_row(*(str(cell).replace("**", "") for cell in row[1:-2]))
        name, weights, cache = head
        about = f"{name}: weights {weights} MiB, KV {cache} bytes a token"
        console.print(about, table, sep="\n", highlight=False, markup=False)
    for sentence in notes(report):
        console.print(sentence, highlight=False, markup=False)


def _columns() -> list[Column]:
    return [Column(name, width=width, overflow="fold") for name, width in zip(FULL[1:-2], WIDTHS, strict=True)]


def _paths(given: list[str]) -> dict[str, str]:
    paths: dict[str, str] = {}
    for word in given:
        name, _, path = word.partition("=")
        if not name or not path or name in paths:
            raise UsageError(f"--draft: must be NAME=PATH, once for each name, got {word!r}")
        paths[name] = path
    return paths


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
    parser.add_argument("--output", type=result_file, metavar="FILE", help="write the figures to this JSON file")
    parser.add_argument("--prompts", metavar="NAME", help="chat20 (default), copy20, peer64, random or a file")
    parser.add_argument("--num-tokens", type=int, metavar="N", help="tokens per answer at most")
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
    trace = "write a trace for ui.perfetto.dev to this file (step)"
    parser.add_argument("--trace", type=result_file, metavar="FILE", help=trace)
    parser.add_argument("--batch-size", type=int, metavar="N", help="requests that run together (step; default: 1)")
    add_methods_arguments(parser)
    add_serve_arguments(parser)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status."""
    if arguments.what == "step" and not features.is_there("tracing"):
        raise UsageError("step: needs the feature 'tracing', which is not part of this installation")
    check_methods_arguments(arguments)
    check_serve_arguments(arguments)
    _refuse_ignored_flags(arguments)
    _check_values(arguments)
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
    return int(any(entry["status"] == "failed" for entry in report.get("methods", ())))  # with all that it needs


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
    """Raises: UsageError for a flag that this benchmark does not read."""
    for name, readers in READ_BY.items():
        if arguments.what not in readers and getattr(arguments, name):
            raise UsageError(f"{flag_name(name)} goes with {' and '.join(readers)} only")
    if arguments.what == "scheduler":
        every = (field.name for field in config_fields())
        refuse_flags(arguments, every, "bench scheduler times the scheduler alone, without an engine")
    elif arguments.what != "serve":
        refuse_flags(arguments, ONLY_SERVED, f"bench {arguments.what} starts no HTTP server")


def _check_values(arguments: argparse.Namespace) -> None:
    """Before an engine starts. Raises: UsageError if nothing is to be counted, ConfigError for unknown prompts."""
    for name in ("runs", "num_tokens", "batch_size", "num_prompts", "starts_at_once"):
        if (number := getattr(arguments, name, None)) is not None and number < 1:
            raise UsageError(f"{flag_name(name)}: must be at least 1, got {number}")
    arguments.num_tokens = arguments.num_tokens or NUM_TOKENS
    if not 0 <= arguments.temperature < math.inf:
        raise UsageError(f"--temperature: must be a finite number >= 0, got {arguments.temperature}")
    if arguments.what == "latency" or arguments.what != "methods" and arguments.prompts not in (None, RANDOM):
        load_prompts(arguments.prompts or PROMPTS)
    if arguments.with_chats:
        load_prompts(arguments.with_chats, "with_chats")


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.what == "methods":
        return await measure_methods(arguments, _sizes(arguments.batch_sizes or BATCH_SIZES))
    if arguments.what == "serve":
        return await measure_serve(arguments, logging.getLogger("overlap_spec.bench"))
    config = engine_config(arguments, log_level="warning", audit_rate=0.0)
    one = str(arguments.batch_size or 1) if arguments.what == "step" else None
    workload = Workload(
        arguments.prompts or PROMPTS,
        arguments.num_tokens,
        arguments.temperature,
        _sizes(one or arguments.batch_sizes or THROUGHPUT_BATCHES),
        arguments.with_chats,
        SAMPLED if arguments.with_sampled else (),
    )
    if arguments.what == "step":
        return await run_step(config, workload, arguments.trace)
    if arguments.what == "latency":
        runs = arguments.runs or 1
        return await run_latency(config, workload, arguments.with_plain, arguments.with_transformers, runs)
    flags = {"plain": arguments.with_plain, "depth1": arguments.with_depth1}
    return await run_throughput(config, workload, [name for name, given in flags.items() if given], served)


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
    if name in ("run", "workload", "benchmark", "acceptance") or not part:
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
