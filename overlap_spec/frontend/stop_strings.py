"""Finds the first stop string or stop pattern in a text that arrives in pieces.

The first is the one that ends first; of those that end together, the one that begins first. It is found character by
character, so the answer does not depend on where the pieces are cut. A pattern's `$` is the end of the text so
far. Text that may still become a match is held back, at most the last `LOOK_BACK` characters of it for a pattern; what
of a longer match has been given out stays.

    stop "END"   pieces  "to be"   " E"    "N"      "Dless"
                 out     "to be"   " "     ""       ""  matched "END"

A pattern that ends with a condition on what follows (`END\\b`) matches when that has come. If another match has ended
by then, that one counts.
"""

import asyncio
from array import array
from collections import OrderedDict
from dataclasses import dataclass

from overlap_spec.errors import RequestError
from overlap_spec.frontend.stop_automaton import Automaton, PatternSearch
from overlap_spec.frontend.stop_patterns import PatternReader, check_lengths
from overlap_spec.runtime.turns import Turns

MOST_BYTES = 32 << 20  # of compiled stops that are kept
FEW = 4  # stop strings that are searched for at once, as OpenAI's API takes them
SHORT = 256  # characters of them together

Key = tuple[tuple[str, ...], tuple[str, ...]]  # stop strings and patterns


class StopString:
    """Searches for one string, in constant time a character on average (Knuth, Morris, Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = array("i", (0, 0))  # of its first n characters: the longest end that is a beginning

    def advance(self, matched: int, piece: str) -> tuple[int, int]:
        """Read a piece after `matched` characters of the string. Returns how many are matched then, and where in the
        piece the string is complete, or -1."""
        text, at = self.text, 0
        while at < len(piece):
            if not matched:
                at = piece.find(text[0], at)
                if at < 0:
                    return 0, -1
            while matched and text[matched] != piece[at]:
                matched = self._border(matched)
            matched += text[matched] == piece[at]
            at += 1
            if matched == len(text):
                return matched, at
        return matched, -1

    def _border(self, length: int) -> int:
        text, borders = self.text, self._borders
        while len(borders) <= length:
            char = text[len(borders) - 1]
            border = borders[-1]
            while border and text[border] != char:
                border = borders[border]
            borders.append(border + (text[border] == char))
        return borders[length]


@dataclass(frozen=True)
class Stops:
    """The stop strings and patterns of a request, as all its choices share them."""

    strings: tuple[StopString, ...] = ()
    automaton: Automaton | None = None

    def __bool__(self) -> bool:
        return bool(self.strings) or self.automaton is not None

    @property
    def takes_long(self) -> bool:
        """Whether their search takes more than a few microseconds a token."""
        is_long = len(self.strings) > FEW or sum(len(each.text) for each in self.strings) > SHORT
        return is_long or self.automaton is not None


class StopCompiler:
    """Compiles stops, and keeps the last ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, Stops | RequestError] = OrderedDict()
        self._num_bytes = 0
        self._turns: Turns[str] = Turns(1)

    async def compiled(self, strings: tuple[str, ...], patterns: tuple[str, ...], owner: str) -> Stops:
        """Owners take turns, a pattern at a time. Raises: RequestError for a bad pattern.

        Cancellation: nothing is kept.
        """
        if not strings and not patterns:
            return Stops()
        check_lengths(patterns)
        key = strings, patterns
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        elif not patterns:
            kept = self._keep(key, Stops(tuple(map(StopString, strings))))
        else:
            async with self._turns.turn(owner):
                kept = self._kept.get(key) or self._keep(key, await _compiled(strings, patterns))
        if isinstance(kept, RequestError):
            raise RequestError(kept.field, str(kept))
        return kept

    def _keep(self, key: Key, kept: Stops | RequestError) -> Stops | RequestError:
        self._kept[key] = kept
        self._num_bytes += _num_bytes(key, kept)
        while self._num_bytes > MOST_BYTES and len(self._kept) > 1:
            self._num_bytes -= _num_bytes(*self._kept.popitem(last=False))
        return kept


def _num_bytes(key: Key, kept: Stops | RequestError) -> int:
    """At most, with all that is computed on the way."""
    automaton = kept.automaton if isinstance(kept, Stops) else None
    return 500 + 8 * sum(map(len, key[0] + key[1])) + (automaton.num_bytes if automaton is not None else 0)


async def _compiled(strings: tuple[str, ...], patterns: tuple[str, ...]) -> Stops | RequestError:
    """Lets other tasks run after each pattern. An error is kept as well: all choices of a request ask for the same."""
    reader = PatternReader()
    try:
        for pattern in patterns:
            reader.read(pattern)
            await asyncio.sleep(0)
    except RequestError as error:
        return error
    return Stops(tuple(map(StopString, strings)), Automaton(reader))


class StopStrings:
    """Searches one answer for the stops of its request. After a match it must not be fed again."""

    def __init__(self, stops: Stops, keep_match: bool) -> None:
        self._strings = stops.strings
        self._matched = [0] * len(stops.strings)  # characters of each string that the text ends with
        self._patterns = PatternSearch(stops.automaton) if stops.automaton is not None else None
        self._keep_match = keep_match
        self._place = 0  # characters that have come
        self._held = ""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """Returns the text that is final, and the stop string or pattern found, if any; text from the match on is
        dropped."""
        if not piece:
            return "", None
        found = self._first_string(piece)
        if self._patterns is not None:
            until = piece if found is None else piece[: found[0] - self._place]
            found = _earlier(found, self._patterns.feed(until))
        text = self._held + piece
        self._place += len(piece)
        if found is not None:
            return self._cut(text, *found)
        self._held = text[len(text) - self._num_open() :]
        return text[: len(text) - len(self._held)], None

    def skip(self, text: str) -> None:
        """Text comes that is not searched, and has been given out."""
        self._place += len(text)
        if self._patterns is not None:
            self._patterns.skip(text)

    def flush(self) -> tuple[str, str | None]:
        """The text held back, when the answer ends for another reason; a pattern may match by that."""
        found = self._patterns.end() if self._patterns is not None else None
        text = self.rest()
        return (text, None) if found is None else self._cut(text, *found)

    def rest(self) -> str:
        """The text held back."""
        held, self._held = self._held, ""
        return held

    def _first_string(self, piece: str) -> tuple[int, int, str] | None:
        """Where the first stop string ends and begins, and which it is."""
        first = None
        for index, stop in enumerate(self._strings):
            self._matched[index], end = stop.advance(self._matched[index], piece)
            if end >= 0:
                found = self._place + end, self._place + end - len(stop.text), stop.text
                first = _earlier(first, found)
        return first

    def _num_open(self) -> int:
        """How many characters at the end may become a match."""
        longest = max(self._matched, default=0)
        if self._patterns is not None:
            longest = max(longest, self._place - self._patterns.open_from)
        return longest

    def _cut(self, text: str, end: int, start: int, matched: str) -> tuple[str, str]:
        """`text` ends at this place. What of it is shown."""
        shown = end if self._keep_match else start
        return text[: len(text) - self._place + shown], matched


def _earlier(one: tuple[int, int, str] | None, other: tuple[int, int, str] | None) -> tuple[int, int, str] | None:
    """The match that ends first; of those that end together, the one that begins first, or else the first one."""
    if one is None or other is None:
        return other if one is None else one
    return other if other[:2] < one[:2] else one
