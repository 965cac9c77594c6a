"""`overlap-spec chat ["prompt"]`: the engine in this terminal. One answer, or a conversation without a prompt.

Answers go to stdout, everything else to stderr, so that `overlap-spec chat "..." > answer.txt` holds the answer.
"""

import argparse
import logging
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from overlap_spec.config import EngineConfig, asks_for_spec_v2
from overlap_spec.entrypoints.cli.flag_groups import ONLY_SERVED
from overlap_spec.entrypoints.cli.flags import add_engine_flags, engine_config, flag_name, refuse_bench_flags
from overlap_spec.entrypoints.cli.parser import UsageError
from overlap_spec.errors import ConfigError, RequestError
from overlap_spec.messages import SamplingParams

QUIET = "warning"  # log level of a chat without --log-level
OWN_FLAGS = {"max_new_tokens": "--max-tokens", "temperature": "--temperature", "seed": "--seed"}

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `chat`, its own before the engine's."""
    parser.add_argument("prompt", nargs="?", help="what to ask; without it, a conversation (Ctrl-D ends it)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="most tokens of an answer (default: 512, or what the context leaves)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    parser.add_argument("--seed", type=int, metavar="N", help="makes an answer at temperature > 0 repeatable")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Start the engine, answer, stop it. Returns the exit status."""
    sampling = _sampling(arguments)
    config = engine_config(arguments, log_level=QUIET, audit_rate=0.0)
    if config.skip_tokenizer_init:
        raise ConfigError("skip_tokenizer_init", "a chat needs the tokenizer; leave it out")
    refuse_bench_flags(config)
    _say_what_has_no_effect(arguments)
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s: %(message)s")
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    return _talk(config, sampling, arguments)


def _sampling(arguments: argparse.Namespace) -> SamplingParams:
    """Raises: UsageError in the words of this command's flags."""
    if arguments.max_tokens == 0:
        raise UsageError("--max-tokens must be at least 1, got 0")
    try:
        return SamplingParams(
            max_new_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=arguments.seed
        )
    except RequestError as error:
        raise UsageError(str(error).replace(error.field, OWN_FLAGS[error.field])) from None


def _say_what_has_no_effect(arguments: argparse.Namespace) -> None:
    for field in ONLY_SERVED:
        if field in arguments:
            print(f"{flag_name(field)} has no effect in a chat: there is no HTTP server", file=sys.stderr)
    if asks_for_spec_v2():
        print("SGLANG_ENABLE_SPEC_V2 is set: overlap is always on here", file=sys.stderr)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _is_missing(path: str) -> bool:
    """True if it can only be a path, and does not exist."""
    return path.startswith(("/", ".", "~")) and not Path(path).expanduser().exists()


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _talk(config: EngineConfig, sampling: SamplingParams, arguments: argparse.Namespace) -> int:
    if not _is_missing(config.model_path):  # else its error is the only line to show
        _say(f"starting {config.model_path}")  # before anything that takes time, such as imports
    from overlap_spec.engine import Engine
    from overlap_spec.entrypoints.cli.background import BackgroundLoop
    from overlap_spec.entrypoints.cli.conversation import Conversation
    from overlap_spec.entrypoints.cli.progress import shown_progress
    from overlap_spec.entrypoints.cli.repl import converse

    with BackgroundLoop() as loop:
        engine = Engine(config)
        try:
            with shown_progress(_say) as engine.progress:
                loop.run(engine.start())
            for note in engine.notes:
                log.info("%s", note)
            conversation = Conversation(engine, sampling, arguments.system)
            if arguments.prompt is None:
                converse(loop, conversation)
            else:
                loop.run(conversation.answer(arguments.prompt))
        finally:
            loop.run(engine.stop())
    return 0
