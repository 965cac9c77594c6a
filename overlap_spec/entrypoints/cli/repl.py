"""A conversation typed line by line.

In a terminal: history, Ctrl-C stops an answer, Ctrl-D leaves. From a pipe: the same lines, without history; the first
that is refused ends the conversation with an error.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from overlap_spec.config import cache_directory
from overlap_spec.config.private_files import open_private
from overlap_spec.entrypoints.cli.background import BackgroundLoop
from overlap_spec.entrypoints.cli.conversation import Conversation
from overlap_spec.errors import RequestError

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
