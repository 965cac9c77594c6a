"""`overlap-spec check [MODEL]`: what would run and on which kernels, what it takes of memory, and what is refused.

Status 0: it will run. 2: it will not; each reason is a sentence. Only configs and the headers of tensors are read.
"""

import argparse
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.table import Table

from overlap_spec.check import (
    Asked,
    CheckReport,
    DraftPart,
    MemoryPart,
    ModelPart,
    TextPart,
    parse_bytes,
    parse_capability,
)
from overlap_spec.config import DUMMY, MIB, EngineConfig
from overlap_spec.entrypoints.cli.flags import UsageError, add_engine_flags, engine_config
from overlap_spec.entrypoints.parsers.formats import format_names
from overlap_spec.errors import ConfigError

PLAIN_WIDTH = 120  # columns where stdout is no terminal


def print_check(report: CheckReport) -> None:
    """One table, then notes, then the verdict with a line for each reason."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    table = Table(show_header=False, title="overlap-spec check")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in check_rows(report):
        table.add_row(name, value)
    if table.row_count:
        console.print(table)
    for note in report.notes:
        print(f"note: {note}")
    for sentence in report.refused:
        print(f"refused: {sentence}")
    print("it will run" if report.will_run else "it will not run")


def check_rows(report: CheckReport) -> Iterator[tuple[str, str]]:
    """Names and values."""
    if report.model is not None:
        yield from _of_model(report.model)
    if report.device:
        yield "dtype, device", f"{report.dtype}, {report.device}"
    if report.ranks > 1:
        yield "ranks", f"{report.ranks}, each on a device of its own; what follows is of one of them"
    yield from report.kernels.items()
    if report.memory is not None:
        yield from _of_memory(report.memory)
    if report.draft is not None:
        yield from _of_draft(report.draft)
    if report.text is not None:
        yield from _of_text(report.text)


def _of_model(part: ModelPart) -> Iterator[tuple[str, str]]:
    yield "model", part.path
    sizes = f"{part.num_layers} layers of {part.hidden_size}, {part.vocab_size} tokens"
    yield "family", f"{part.architecture}: {sizes}, context {part.context_length}"
    yield "stored as", _formats(part.stored) or "no sizes in headers"


def _of_memory(part: MemoryPart) -> Iterator[tuple[str, str]]:
    yield "weights in memory", _formats(part.formats)
    yield "memory", ", ".join(f"{num_bytes // MIB} MiB {purpose}" for purpose, num_bytes in part.held.items())
    if part.total:
        rest = int(part.total * (1 - part.share)) // MIB
        shared = f"{part.share:g} of {part.total // MIB} MiB; CUDA graphs come out of the other {rest} MiB"
        yield "memory, static share", shared
    of_draft = f", {part.draft_kv_bytes_per_token} of them the draft's" if part.draft_kv_bytes_per_token else ""
    yield "KV cache", f"{part.kv_tokens} tokens fit, at {part.kv_bytes_per_token} bytes each{of_draft}"


def _of_draft(part: DraftPart) -> Iterator[tuple[str, str]]:
    yield "method", f"{part.method} {part.numbers}: steps, topk, draft tokens"
    if part.path is not None:
        yield "draft", part.path
        yield "draft, stored as", _formats(part.stored) or "no sizes in headers"
    for name, value in part.fits.items():
        yield f"draft, {name}", value


def _of_text(part: TextPart) -> Iterator[tuple[str, str]]:
    yield "tokenizer", part.tokenizer
    yield "chat template", "present" if part.has_chat_template else "none: prompts of chats are refused"
    yield "tool calls", part.tool_calls or "not read"
    yield "reasoning", part.reasoning or "not read"
    given = ", ".join(f"{name} {value:g}" for name, value in part.sampling_defaults.items())
    yield "sampling defaults", given or "OpenAI's"


def _formats(sizes: dict[str, int]) -> str:
    return ", ".join(f"{num_bytes / MIB:.1f} MiB {name}" for name, num_bytes in sizes.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `check`, its own before the engine's."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a directory or .gguf file (default: --model-path)")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="of a GPU that need not be here: 141GiB, 80GB")
    parser.add_argument(
        "--gpu-capability", metavar="X.Y", help="of a GPU that need not be here (default: 9.0, that of an H100 or H200)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check and print. Returns the exit status."""
    given = {} if arguments.model is None else {"model_path": arguments.model}
    if given and "model_path" in arguments:
        raise UsageError("MODEL and --model-path are the same: give one of them")
    config = engine_config(arguments, **given)
    asked = _asked(arguments)
    _refuse_download(config)

    from overlap_spec.check.check import check  # imports torch

    report = check(config, asked, format_names)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
    else:
        print_check(report)
    print(end="", flush=True)  # there may be no standard output
    return 0 if report.will_run else 2


def _asked(arguments: argparse.Namespace) -> Asked:
    """Raises: UsageError for a size or capability that cannot be read."""
    memory, capability = arguments.gpu_memory, arguments.gpu_capability
    if capability is not None and memory is None:
        raise UsageError("--gpu-capability goes with --gpu-memory, which says that there is a GPU")
    try:
        size = None if memory is None else parse_bytes(memory)
    except ValueError:
        raise UsageError(f"--gpu-memory: expected a size such as 141GiB or 80GB, got {memory!r}") from None
    try:
        return Asked(size, None if capability is None else parse_capability(capability))
    except ValueError:
        raise UsageError(f"--gpu-capability: expected two numbers such as 9.0, got {capability!r}") from None


def _refuse_download(config: EngineConfig) -> None:
    """Raises: ConfigError for a model of the hub whose weights are not here: a check fetches a config at most."""
    from overlap_spec import hub

    if config.load_format != DUMMY and not hub.is_local(config):
        raise ConfigError(
            "model_path",
            f"{config.model_path} is not on this machine; --load-format {DUMMY} checks its config alone, without its"
            " tensors",
        )
