"""`overlap-spec chat ["prompt"]`: the engine in this terminal. One answer, or a conversation without a prompt.

Answers go to stdout, everything else to stderr, so that `overlap-spec chat "..." > answer.txt` holds the answer.

The main thread reads lines and takes interrupts, so Ctrl-C ends only the call that it waits for, and the engine's
heartbeats go on in a thread of their own while a person types. In a terminal: history, Ctrl-C
stops an answer, Ctrl-D leaves. From a pipe: the same lines, without history; the first that is refused ends the
conversation with an error.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

import msgspec

from overlap_spec.config import EngineConfig, asks_for_spec_v2, cache_directory
from overlap_spec.config.keys import open_private
from overlap_spec.entrypoints.cli.flags import (
    ONLY_SERVED,
    UsageError,
    add_engine_flags,
    engine_config,
    flag_name,
    refuse_bench_flags,
)
from overlap_spec.errors import ConfigError, RequestError
from overlap_spec.messages import ChatPrompt, Finish, FinishKind, SamplingParams, Usage

if TYPE_CHECKING:
    from overlap_spec.engine import Engine  # it takes time, and a line is printed before

DEFAULT_MAX_TOKENS = 512


@dataclass
class Figures:
    """Figures of one answer. Times in seconds on the monotonic clock."""

    began_at: float
    first_at: float = 0.0
    num_first: int = 1  # tokens that came then: more if this process looked late
    ended_at: float = 0.0
    usage: Usage | None = None
    finish: Finish | None = None

    def line(self) -> str:
        """Tokens, tok/s after the first, accept length, time to first token."""
        if self.usage is None:
            return "no answer"
        tokens, steps = self.usage.completion_tokens, self.usage.spec_verify_ct
        parts = [f"{tokens} tokens"]
        if tokens > self.num_first and self.ended_at > self.first_at:
            parts.append(f"{(tokens - self.num_first) / (self.ended_at - self.first_at):.1f} tok/s")
        if steps:
            parts.append(f"accept length {(tokens - 1) / steps:.2f}")
        parts.append(f"first token {self.first_at - self.began_at:.2f} s")
        if self.finish is not None and self.finish.kind is not FinishKind.STOP:
            parts.append("cut at the token limit" if self.finish.kind is FinishKind.LENGTH else "stopped")
        return ", ".join(parts)


class Conversation:
    """Messages so far; `answer` adds a turn. A refused turn is not added."""

    def __init__(self, engine: "Engine", sampling: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._sampling = sampling
        self._opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = list(self._opening)

    async def answer(self, text: str) -> None:
        """Print the answer as it comes, then the figures. Cancellation: keeps what has been printed as the answer."""
        prompt = ChatPrompt([*self._messages, {"role": "user", "content": text}])
        figures = Figures(began_at=time.monotonic())
        said: list[str] = []
        try:
            async for delta in self._engine.generate(prompt, await self._limited(prompt)):
                if not figures.first_at:
                    figures.first_at, figures.num_first = time.monotonic(), delta.usage.completion_tokens
                figures.usage, figures.finish = delta.usage, delta.finish
                said.append(delta.text)
                print(delta.text, end="", flush=True)
        finally:
            if figures.usage is not None:
                figures.ended_at = time.monotonic()
                self._messages = [*prompt.messages, {"role": "assistant", "content": "".join(said)}]
                print(flush=True)
        print(figures.line(), file=sys.stderr)

    async def _limited(self, prompt: ChatPrompt) -> SamplingParams:
        """Without a limit of the user's, an answer may be as long as the context leaves, within reason."""
        if self._sampling.max_new_tokens is not None:
            return self._sampling
        most = self._engine.settings.model.max_len
        room = most - len(await self._engine.client.tokenize(prompt))
        if room < 1:
            way_out = "ask for less, or start a new conversation with /reset"
            raise RequestError("messages", f"this fills the maximum context length of {most} tokens: {way_out}")
        return msgspec.structs.replace(self._sampling, max_new_tokens=min(DEFAULT_MAX_TOKENS, room))


T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines for a thread that is not asynchronous."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result.

        Cancellation: an interrupt of this thread cancels `work`, waits until it has cleaned up, and is raised.
        """
        job = _Job(work)
        try:
            self._loop.call_soon_threadsafe(job.start)
            job.ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(job.cancel)
            job.ended.wait()
            raise
        return job.result()


class _Job(Generic[T]):
    """A coroutine that one thread waits for and another runs. All but `ended` and `result` is the loop's."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.ended = threading.Event()
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(lambda task: self.ended.set())

    def cancel(self) -> None:
        if self._task is None:  # interrupted before the start was queued
            self._work.close()
            self.ended.set()
        else:
            self._task.cancel()

    def result(self) -> T:
        assert self._task is not None, "it has ended"
        return self._task.result()


HISTORY_LINES = 1000
QUIT = "/quit"
HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


def converse(loop: BackgroundLoop, conversation: Conversation) -> None:
    """Answer until the input ends."""
    if not sys.stdin.isatty():
        _answer_lines(loop, conversation)
        return
    print(HELP, file=sys.stderr)
    with _history(Path(cache_directory()) / "chat_history"):
        for line in _typed_lines():
            try:
                _obey(loop, conversation, line)
            except KeyboardInterrupt:
                continue
            except RequestError as error:
                print(error, file=sys.stderr)


def _answer_lines(loop: BackgroundLoop, conversation: Conversation) -> None:
    for line in map(str.strip, sys.stdin):
        if line == QUIT:
            return
        if line:
            _obey(loop, conversation, line)


def _typed_lines() -> Iterator[str]:
    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        except EOFError:
            print(file=sys.stderr)
            return
        if line == QUIT:
            return
        if line:
            yield line


def _obey(loop: BackgroundLoop, conversation: Conversation, line: str) -> None:
    if line == "/reset":
        conversation.reset()
    elif line == "/help":
        print(HELP, file=sys.stderr)
    else:
        loop.run(conversation.answer(line))


@contextlib.contextmanager
def _history(path: Path) -> Iterator[None]:
    """Arrow keys bring back earlier lines, of earlier chats too. Without the readline module there is none."""
    try:
        import readline
    except ImportError:
        yield
        return
    with contextlib.suppress(OSError):
        open_private(path, "ab").close()  # readline's own file may be open to others
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            readline.write_history_file(path)


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
    from overlap_spec.entrypoints.cli.progress import shown_progress

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
