"""`overlap-spec check [MODEL]`: what would run and on which kernels, what it takes of memory, and what is refused.

Status 0: it will run. 2: it will not; each reason is a sentence. Only configs and the headers of tensors are read.
"""

import argparse
import sys

import msgspec

from overlap_spec.check.place import Asked, parse_bytes, parse_capability
from overlap_spec.config import DUMMY, EngineConfig
from overlap_spec.entrypoints.cli.check_table import print_check
from overlap_spec.entrypoints.cli.flags import add_engine_flags, engine_config
from overlap_spec.entrypoints.cli.parser import UsageError
from overlap_spec.entrypoints.parsers.formats import format_names
from overlap_spec.errors import ConfigError


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
    _refuse_download(config)
    asked = _asked(arguments)

    from overlap_spec.check.check import check  # imports torch

    report = check(config, asked, format_names)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
    else:
        print_check(report)
    sys.stdout.flush()
    return 0 if report.will_run else 2


def _asked(arguments: argparse.Namespace) -> Asked:
    """Raises: UsageError for a size or capability that cannot be read."""
    memory, capability = arguments.gpu_memory, arguments.gpu_capability
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
