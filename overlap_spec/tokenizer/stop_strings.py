"""Finds the first stop string or stop pattern in a text that arrives in pieces.

The first is the one that ends first (of those the longest), so with stop strings the answer does not depend on where
the pieces are cut. A pattern is searched for in the text so far, so it may end where the text does: callers feed one
token at a time. Text that may still become a match is held back:

    stop "END"   pieces  "to be"   " E"    "N"      "Dless"
                 out     "to be"   " "     ""       ""  matched "END"
"""

import regex

from overlap_spec.errors import RequestError

MOST_PATTERN = 1000  # characters of a pattern
LOOK_BACK = 1024  # characters that a pattern's match may begin before the end of the text
CONTEXT = 64  # characters before them, for \b and (?<=..)
SEARCH_S = 0.05  # what one search may take: patterns exist that take for ever

Pattern = regex.Pattern[str]


def compile_patterns(patterns: tuple[str, ...]) -> tuple[Pattern, ...]:
    """Raises: RequestError for what is no pattern, or one that the empty text matches."""
    compiled = []
    for pattern in patterns:
        if len(pattern) > MOST_PATTERN:
            raise _bad(pattern[:20] + "..", f"has {len(pattern)} characters, of at most {MOST_PATTERN}")
        try:
            compiled.append(regex.compile(pattern))
        except (regex.error, OverflowError, RecursionError) as error:
            raise _bad(pattern, f"is no regular expression: {error}") from None
        if compiled[-1].match(""):
            raise _bad(pattern, "matches the empty text, so every answer would end at once")
    return tuple(compiled)


def _bad(pattern: str, why: str) -> RequestError:
    return RequestError("stop_regex", f"stop_regex: {pattern!r} {why}")


class StopStrings:
    """The stop strings and patterns of one request. After a match it must not be fed again."""

    def __init__(self, stops: tuple[str, ...], keep_match: bool, patterns: tuple[Pattern, ...] = ()) -> None:
        self._stops = stops
        self._patterns = patterns
        self._keep_match = keep_match
        self._held = ""
        self._before = ""  # the end of the text that has been returned; only patterns look at it

    def feed(self, piece: str) -> tuple[str, str | None]:
        """Returns the text that is final, and the stop string or pattern found, if any; text from the match on is
        dropped.

        Raises: RequestError if a pattern takes too long.
        """
        text = self._held + piece
        found = self._first_match(text)
        if found is not None:
            start, end, matched = found
            return text[: end if self._keep_match else start], matched
        keep = len(text) - self._open_suffix(text)
        self._held = text[keep:]
        if self._patterns:
            self._before = (self._before + text[:keep])[-CONTEXT:]
        return text[:keep], None

    def flush(self) -> str:
        """The text held back, when the request ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        """Where it starts and ends, and what it is."""
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        for pattern in self._patterns:
            if match := self._search(pattern, text, partial=False):
                found.append((*match, pattern.pattern))
        if not found:
            return None
        end, start, matched = min(found, key=lambda each: each[:2])
        return start, end, matched

    def _open_suffix(self, text: str) -> int:
        """Length of the longest suffix that begins a stop string, or may begin a pattern's match."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        for pattern in self._patterns:
            if match := self._search(pattern, text, partial=True):
                longest = max(longest, min(len(text) - match[1], LOOK_BACK))
        return longest

    def _search(self, pattern: Pattern, text: str, partial: bool) -> tuple[int, int] | None:
        """Where the leftmost match ends and starts in `text`."""
        begin = len(self._before)
        try:
            match = pattern.search(self._before + text, begin, partial=partial, timeout=SEARCH_S)
        except TimeoutError:
            raise _bad(pattern.pattern, f"took longer than {SEARCH_S * 1e3:.0f} ms to search; simplify it") from None
        return None if match is None else (match.end() - begin, match.start() - begin)
