"""`overlap-spec COMMAND [flags]`: finds the command, runs it, turns an error into one sentence and a status.

A command is a module with `add_arguments(parser)` and `run(arguments) -> int`; only the one that is asked for is
imported. Status 2: a wrong flag, value or file, found before the first step.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from overlap_spec.config.keys import hide_keys
from overlap_spec.entrypoints import is_there, refusal
from overlap_spec.entrypoints.cli.flags import Parser, UsageError
from overlap_spec.errors import ActorDied, CheckpointError, ConfigError, OverlapSpecError
from overlap_spec.version import __version__

PROGRAM = "overlap-spec"
INTERRUPTED = 130  # what a shell reports for Ctrl-C


@dataclass(frozen=True)
class Command:
    """One subcommand: its module, what the help shows of it, and the entry point that it is of."""

    module: str
    usage: str
    summary: str
    entry_point: str = "cli"


COMMANDS = {
    "chat": Command("overlap_spec.entrypoints.cli.chat", "chat [MODEL] [flags]", "talk to a model in this terminal"),
    "serve": Command(
        "overlap_spec.entrypoints.cli.serve", "serve [--model PATH] [flags]", "serve a model over HTTP and ZeroMQ"
    ),
    "serve-ray": Command(
        "overlap_spec.entrypoints.ray.command",
        "serve-ray [--model PATH] [flags]",
        "serve a model by several engines, on the machines of a Ray cluster",
        "ray",
    ),
    "check": Command(
        "overlap_spec.entrypoints.cli.check", "check [MODEL] [flags]", "tell from headers what would run, and how"
    ),
    "bench": Command(
        "overlap_spec.entrypoints.cli.bench",
        "bench WHAT [flags]",
        "measure latency, throughput, the scheduler, a step, every method or traffic",
    ),
    "verify": Command(
        "overlap_spec.entrypoints.cli.verify",
        "verify [PROMPTS.jsonl] [flags]",
        "compare every token with plain decoding's: status 0 if all are the same",
        "native",  # whose names its files have
    ),
    "train-draft": Command(
        "overlap_spec.entrypoints.cli.train_draft",
        "train-draft --model-path M --method EAGLE3|DFLASH|DSPARK --prompts FILE.jsonl --output DIR",
        "make a draft for a model from prompts alone",
    ),
    "top": Command("overlap_spec.entrypoints.top", "top [--url URL] [flags]", "show what a running server does", "top"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        hide_keys()
        fill_standard_files()
    try:
        arguments = _parser(words).parse_args(words)
        return int(importlib.import_module(COMMANDS[arguments.command].module).run(arguments))
    except (UsageError, ConfigError, CheckpointError) as error:  # of this process, which reads no weights
        return _complain(error, 2)
    except OverlapSpecError as error:
        return _complain(error, 2 if isinstance(error, ActorDied) and error.refused else 1)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the answer has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
        return 1


def fill_standard_files() -> None:
    """Open those of 0, 1 and 2 that the parent process has closed: libuv aborts if a socket is one of them."""
    while (opened := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(opened)


def _parser(words: list[str]) -> argparse.ArgumentParser:
    """The parser for these words. Only the command that they name brings its flags.

    Raises: UsageError for a command that is not there.
    """
    for name in words[:1]:
        if name in COMMANDS and not is_there(COMMANDS[name].entry_point):
            raise UsageError(f"{name} {refusal(COMMANDS[name].entry_point)}")
    parser = Parser(prog=PROGRAM, description="An LLM engine built for speculative decoding that never waits.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, command in COMMANDS.items():
        if not is_there(command.entry_point):
            continue
        summary = f"{command.summary[0].upper()}{command.summary[1:]}."
        usage = f"{PROGRAM} {command.usage}"
        subparser = commands.add_parser(name, help=command.summary, description=summary, usage=usage)
        if name in words[:1]:
            importlib.import_module(command.module).add_arguments(subparser)
    return parser


def _complain(error: Exception, status: int) -> int:
    print(f"{PROGRAM}: {' '.join(str(error).split())}", file=sys.stderr)
    return status
