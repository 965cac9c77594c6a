"""`overlap-spec bench methods`: its own flags, and its table."""

import argparse
import sys
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from overlap_spec.bench.methods import run_methods
from overlap_spec.bench.methods_plan import Comparison
from overlap_spec.bench.methods_records import Drafts, chosen, read_method_records
from overlap_spec.bench.methods_table import FULL, full_rows, notes
from overlap_spec.bench.report import write_report
from overlap_spec.bench.workload import Workload
from overlap_spec.config.fields import config_fields
from overlap_spec.entrypoints.cli.flags import engine_config, flag_name
from overlap_spec.entrypoints.cli.parser import UsageError

PROMPTS = "chat20,copy20"
BATCH_SIZES = "1,8,32"
OURS = ("draft", "token_map", "only", "methods", "num_prompts", "starts_at_once")
NOT_OURS = ("with_plain", "with_depth1", "with_chats", "with_sampled", "with_transformers")
WIDTHS = (9, 5, 6, 9, 9, 11, 7)  # of the printed columns, which are those of `FULL` between name and memory
COUNTS = ("num_prompts", "starts_at_once")


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
        for name in OURS:
            if getattr(arguments, name) is not None:
                raise UsageError(f"{flag_name(name)} goes with methods only")
        return
    for name in NOT_OURS:
        if getattr(arguments, name):
            raise UsageError(f"{flag_name(name)} does not go with methods")
    for field in config_fields():
        if field.name.startswith("speculative_") and field.name in arguments:
            flag = flag_name(field.name)
            raise UsageError(f"{flag} does not go with methods: give --draft, --token-map or a table (--methods FILE)")
    for name in COUNTS:
        count = getattr(arguments, name)
        if count is not None and count < 1:
            raise UsageError(f"{flag_name(name)}: must be at least 1, got {count}")


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
    prompts = arguments.prompts or PROMPTS
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


def methods_status(report: dict[str, Any]) -> int:
    """1 if a method failed although it had all that it needs."""
    return int(any(entry["status"] == "failed" for entry in report["methods"]))


def _paths(given: list[str]) -> dict[str, str]:
    paths: dict[str, str] = {}
    for word in given:
        name, _, path = word.partition("=")
        if not name or not path or name in paths:
            raise UsageError(f"--draft: must be NAME=PATH, once for each name, got {word!r}")
        paths[name] = path
    return paths
