"""`overlap-spec bench step`: its own flags, and its table."""

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from overlap_spec.entrypoints.cli.parser import UsageError

FLAGS = {"trace": "--trace", "batch_size": "--batch-size"}
OTHERS = {"with_plain": "--with-plain", "with_transformers": "--with-transformers", "with_depth1": "--with-depth1"}
NOT_OURS = OTHERS | {"with_chats": "--with-chats", "with_sampled": "--with-sampled"}


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that only `bench step` takes."""
    parser.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev to this file (step)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="requests that run together (step; default: 1)")


def check_step_arguments(arguments: argparse.Namespace) -> None:
    """A flag that would have no effect is refused. Raises: UsageError naming it."""
    if arguments.what == "step":
        for name, flag in NOT_OURS.items():
            if getattr(arguments, name, None):
                raise UsageError(f"{flag} does not go with step")
        if arguments.batch_size is not None and arguments.batch_size < 1:
            raise UsageError(f"--batch-size: must be at least 1, got {arguments.batch_size}")
        return
    for name, flag in FLAGS.items():
        if getattr(arguments, name) is not None:
            raise UsageError(f"{flag} goes with step only")


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
