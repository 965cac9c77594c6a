"""Keeps a log readable whatever strangers send: a process's warnings and errors have an allowance for each kind.

A kind is a logger, a level and the beginning of the message before its values are filled in. What is withheld is
counted, and the next line of the kind tells how much it was. A traceback is shown once a minute for each kind; between,
its last line is.

Nor does a log have texts of requests: what an error quotes is left out (`without_quotes`).
"""

import logging
import re
import time
import traceback
from dataclasses import dataclass, field

BURST = 100  # lines that may come at once
LINES_PER_S = 20.0
BURST_OF_KIND = 10
LINES_OF_KIND_PER_S = 0.2
TRACEBACK_S = 60.0  # from one traceback of a kind to the next
MOST_KINDS = 256
KIND_CHARACTERS = 40  # of a message, that tell its kind: some libraries fill in values before
QUOTED = re.compile(r"""(?<!\w)(['"`])(?:.*\1|.*)""", re.DOTALL)  # to the last such quote: a text may have some, too
LEFT_OUT = "'..'"
OF_A_STACK = re.compile(r'[ |]*(?:File "|\+|Exception Group Traceback|Traceback)')  # also in a group of errors


def without_quotes(text: str) -> str:
    """An error's text without what it quotes, which is a client's as a rule. A quote that does not end is one, too."""
    return QUOTED.sub(LEFT_OUT, text)


def traceback_text(error: BaseException) -> str:
    """As `traceback.format_exception`, but no error of the chain quotes anything."""
    shown = traceback.TracebackException.from_exception(error)
    return "".join(line if OF_A_STACK.match(line) else without_quotes(line) for line in shown.format())


class Allowance:
    """How many lines may be written now: a burst, and so many each second after it."""

    def __init__(self, burst: int = BURST, per_s: float = LINES_PER_S) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = float(burst)
        self._at = time.monotonic()
        self._withheld = 0

    def take(self) -> int | None:
        """Spend one line. Returns how many were withheld before it; None if this one is to be."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            self._withheld += 1
            return None
        self._left -= 1
        withheld, self._withheld = self._withheld, 0
        return withheld


@dataclass
class _Kind:
    """What one kind of lines has spent."""

    lines: Allowance = field(default_factory=lambda: Allowance(BURST_OF_KIND, LINES_OF_KIND_PER_S))
    traced_at: float = -TRACEBACK_S


class LineLimits(logging.Filter):
    """A handler's filter. Lines below warnings pass: they have limits of their own, or come with steps."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, int, str], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written. It may lose its traceback and gain a count."""
        if record.levelno < logging.WARNING:
            return True
        kind = self._kind_of(record)
        withheld = kind.lines.take()
        if withheld is None:
            return False
        if record.exc_info and record.exc_info[0] is not None:
            self._shorten(record, kind)
        if withheld:
            _append(record, f" ({withheld} lines of this kind withheld before this one)")
        return True

    def _kind_of(self, record: logging.LogRecord) -> _Kind:
        key = record.name, record.levelno, str(record.msg)[:KIND_CHARACTERS]
        if key not in self._kinds and len(self._kinds) >= MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return self._kinds.setdefault(key, _Kind())

    def _shorten(self, record: logging.LogRecord, kind: _Kind) -> None:
        """Leave out a traceback that comes soon after another of its kind."""
        now = time.monotonic()
        assert record.exc_info and record.exc_info[1] is not None
        error = record.exc_info[1]
        if now - kind.traced_at >= TRACEBACK_S:
            kind.traced_at = now
            record.exc_text = traceback_text(error).rstrip()  # formatters take it as it is
            return
        _append(record, f": {type(error).__name__}: {without_quotes(str(error))}")
        record.exc_info, record.exc_text = None, None


def limit_lines() -> None:
    """Limit what this process logs from now on."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(LineLimits())


def _append(record: logging.LogRecord, text: str) -> None:
    record.msg, record.args = record.getMessage().rstrip() + " ".join(text.split("\n")), ()
