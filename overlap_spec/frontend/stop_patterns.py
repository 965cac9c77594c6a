"""Reads stop patterns, regular expressions in Python's syntax, into the positions and edges of one automaton.

A position is one character that a pattern consumes, with repeats written out (Glushkov 1961). An edge leads from a
position to one that may come next; position 0 is before a match's first character. `a(?:b|cd){1,2}`:

    0 > a    a > b1 c1    c1 > d1    b1 d1 > b2 c2    c2 > d2    a match may end after b1 d1 b2 d2

Running it takes time that is linear in the text, so no pattern explodes. Its size follows from the pattern's text, and
what would be too large is refused before it is built. What such an automaton cannot do is refused by name.

A condition (`^`, `\\b`) is a set of contexts. A context is the kind of the character before a place in the text and the
kind of the one after it. An edge carries the contexts in which it may be taken.

Sets of characters, `a`, `.`, `[^a-z\\d]`, have Python's meaning of categories and case.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from re import _parser  # type: ignore[attr-defined]  # what re itself parses with; its names have no stubs
from typing import Any

import numpy as np
import numpy.typing as npt

from overlap_spec.errors import RequestError

Flags = npt.NDArray[np.bool_]


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


CATEGORIES: dict[str, Callable[[str], bool]] = {"DIGIT": str.isdecimal, "SPACE": str.isspace, "WORD": _is_word}


@dataclass(frozen=True)
class CharClass:
    """A set of characters: sorted ranges that do not touch, and categories such as "NOT_DIGIT"."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    categories: tuple[str, ...]
    is_negated: bool
    folds_case: bool
    is_ascii: bool  # (?a): categories and case know ASCII alone


def is_of(category: str, char: str, is_ascii: bool) -> bool:
    """Whether a character is of a category such as "NOT_DIGIT"."""
    holds = CATEGORIES[category.removeprefix("NOT_")](char) and (char.isascii() or not is_ascii)
    return holds != category.startswith("NOT_")


def cases_of(char: str, is_ascii: bool) -> set[str]:
    """The character in all its cases."""
    if is_ascii and not char.isascii():
        return {char}
    cases = {char, char.lower(), char.upper(), char.upper().lower(), char.lower().upper()}
    return {each for each in cases if len(each) == 1 and (each.isascii() or not is_ascii)}


def _class(items: Iterable[tuple[Any, Any]], flags: int) -> CharClass:
    """Of what is between brackets, or of one literal."""
    ranges, categories, is_negated = [], [], False
    folds, is_ascii = bool(flags & re.IGNORECASE), bool(flags & re.ASCII)
    for op, value in items:
        match op.name:
            case "NEGATE":
                is_negated = True
            case "CATEGORY":
                categories.append(value.name.removeprefix("CATEGORY_"))
            case "RANGE":
                ranges.append(value)
            case _:
                cases = cases_of(chr(value), is_ascii) if folds else {chr(value)}
                ranges += [(ord(each), ord(each)) for each in cases]
    starts, ends = _merged(ranges)
    return CharClass(starts, ends, tuple(categories), is_negated, folds, is_ascii)


def class_of(name: str, value: Any, flags: int) -> CharClass:
    """Of a part of a pattern that is one character, as `re` has parsed it."""
    match name:
        case "ANY":
            newline = () if flags & re.DOTALL else (10,)
            return CharClass(newline, newline, (), True, False, False)
        case "IN":
            return _class(value, flags)
        case "NOT_LITERAL":
            return _class([(_parser.NEGATE, None), (_parser.LITERAL, value)], flags)
        case _:
            return _class([(_parser.LITERAL, value)], flags)


def _merged(ranges: list[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sorted ranges that do not touch: where they start, and where they end."""
    starts: list[int] = []
    ends: list[int] = []
    for start, end in sorted(ranges):
        if ends and start <= ends[-1] + 1:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    return tuple(starts), tuple(ends)


class ClassTable:
    """Looks up which of many classes a character is of."""

    def __init__(self, classes: Sequence[CharClass]) -> None:
        ranges = [
            (*each, number) for number, one in enumerate(classes) for each in zip(one.starts, one.ends, strict=True)
        ]
        self._starts, self._ends, self._owners = np.array(ranges, np.int32).reshape(-1, 3).T.copy()
        self._of_category: dict[tuple[str, bool], list[int]] = {}
        for number, one in enumerate(classes):
            for name in one.categories:
                self._of_category.setdefault((name, one.is_ascii), []).append(number)
        self._negated = np.array([one.is_negated for one in classes], np.bool_)
        self._folding = [
            (is_ascii, np.array([one.folds_case and one.is_ascii == is_ascii for one in classes], np.bool_))
            for is_ascii in {one.is_ascii for one in classes if one.folds_case}
        ]

    def of(self, char: str) -> Flags:
        """One flag for each class."""
        found = self._as_written(char)
        for is_ascii, folding in self._folding:
            for other in cases_of(char, is_ascii) - {char}:
                found |= self._as_written(other) & folding
        return found ^ self._negated

    def _as_written(self, char: str) -> Flags:
        found = np.zeros(len(self._negated), np.bool_)
        found[self._owners[(self._starts <= ord(char)) & (self._ends >= ord(char))]] = True
        for (name, is_ascii), numbers in self._of_category.items():
            if is_of(name, char, is_ascii):
                found[numbers] = True
        return found


MOST_CHARACTERS = 1000  # of one pattern
MOST_CHARACTERS_TOGETHER = 4000  # of all patterns of a request; they are read in this process
MOST_PARTS = 1000  # characters, classes, groups and conditions of all patterns, with their repeats written out
MOST_EDGES = 5000  # of all patterns, counted before they are made
DEEPEST = 60  # groups within groups

EDGE, NEWLINE, ASCII_WORD, OTHER_WORD, OTHER = range(5)  # kinds; EDGE: the answer begins or ends here
NUM_KINDS = 5
ALWAYS = (1 << NUM_KINDS * NUM_KINDS) - 1  # all contexts

REFUSED = {
    "ASSERT": "look-ahead or look-behind",
    "ASSERT_NOT": "look-ahead or look-behind",
    "FAILURE": "look-ahead or look-behind",
    "ATOMIC_GROUP": "an atomic group",
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a conditional group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}


def bad(pattern: str, why: str) -> RequestError:
    """What a request with this pattern is refused with."""
    shown = pattern if len(pattern) <= 80 else pattern[:60] + ".."
    return RequestError("stop_regex", f"stop_regex: {shown!r} {why}")


def _too_large(what: str, limit: int) -> RequestError:
    return RequestError("stop_regex", f"stop_regex: the patterns of a request have {what}, of at most {limit}")


# --- conditions ---


def kind_of(char: str) -> int:
    """What a condition can tell of a character."""
    if char.isalnum() or char == "_":
        return ASCII_WORD if char.isascii() else OTHER_WORD
    return NEWLINE if char == "\n" else OTHER


def _contexts(holds: Callable[[int, int], bool]) -> int:
    """The contexts (kinds before and after) in which a condition holds."""
    pairs = [(before, after) for before in range(NUM_KINDS) for after in range(NUM_KINDS)]
    return sum(1 << before * NUM_KINDS + after for before, after in pairs if holds(before, after))


def _condition(name: str, flags: int) -> int:
    """Contexts of a place that is `AT` something."""
    words = (ASCII_WORD,) if flags & re.ASCII else (ASCII_WORD, OTHER_WORD)
    match name:
        case "AT_BOUNDARY":
            return _contexts(lambda before, after: (before in words) != (after in words))
        case "AT_NON_BOUNDARY":
            return _contexts(lambda before, after: (before in words) == (after in words))
        case "AT_BEGINNING" if flags & re.MULTILINE:
            return _contexts(lambda before, after: before in (EDGE, NEWLINE))
        case _:
            return _contexts(lambda before, after: before == EDGE)


# --- positions and edges ---


@dataclass
class Fragment:
    """A part of a pattern. Each value is a set of contexts.

    `first` and `last`: positions that a match of the part may begin and end with. `empty`: where it matches nothing.
    """

    first: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    empty: int = ALWAYS


class PatternReader:
    """Reads the patterns of one request, one at a time. Each takes a few milliseconds at most.

    `classes` are the different ones; `class_of` names that of each position. Keys of `edges` are pairs of positions.
    `ends`: contexts and pattern by position that a match may end with.
    """

    def __init__(self) -> None:
        self.classes: dict[CharClass, int] = {}
        self.class_of: list[int] = [-1]
        self.edges: dict[tuple[int, int], int] = {}
        self.ends: dict[int, tuple[int, int]] = {}
        self.patterns: list[str] = []
        self._num_parts = self._num_edges = 0
        self._numbers: dict[tuple[str, Any, int], int] = {}  # of the classes in the pattern that is read

    def read(self, pattern: str) -> None:
        """Raises: RequestError for what is no pattern, too large, or more than an automaton can do."""
        if len(pattern) > MOST_CHARACTERS:
            raise bad(pattern, f"has {len(pattern)} characters, of at most {MOST_CHARACTERS}")
        parsed = _parsed(pattern)
        self._num_parts += _num_parts(parsed, pattern, 0)
        if self._num_parts > MOST_PARTS:
            raise _too_large(f"{self._num_parts} parts with their repeats written out", MOST_PARTS)
        self._numbers.clear()
        whole = self._sequence(parsed, parsed.state.flags, pattern, is_last=True)
        if whole.empty:
            raise bad(pattern, "matches the empty text, so every answer would end at once")
        if not whole.first:
            raise bad(pattern, "matches no text: its conditions exclude one another")
        self._connect({0: ALWAYS}, whole.first)
        self.ends |= {position: (contexts, len(self.patterns)) for position, contexts in whole.last.items()}
        self.patterns.append(pattern)

    def _sequence(self, items: Sequence[tuple[Any, Any]], flags: int, pattern: str, is_last: bool) -> Fragment:
        """Parts one after another. `is_last`: nothing of the pattern follows them."""
        ending = _first_of_end(items)
        whole, condition = Fragment(), ALWAYS
        for index, (op, value) in enumerate(items):
            part = self._part(op.name, value, flags, pattern, is_last and index >= ending)
            if not part.first:
                condition &= part.empty
                continue
            whole, condition = self._concatenated(_conditional(whole, condition), part), ALWAYS
        return _conditional(whole, condition)

    def _part(self, name: str, value: Any, flags: int, pattern: str, is_last: bool) -> Fragment:
        match name:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return self._position(name, value, flags)
            case "AT" if value.name in ("AT_END", "AT_END_STRING"):
                if not is_last:
                    raise bad(pattern, "has '$' or '\\Z' before its end, where it could never match")
                return Fragment()  # a match ends where the text does, as it is then
            case "AT":
                return Fragment(empty=_condition(value.name, flags))
            case "SUBPATTERN":
                _, added, removed, items = value
                return self._sequence(items, _combined(flags, added, removed), pattern, is_last)
            case "BRANCH":
                return _either([self._sequence(each, flags, pattern, is_last) for each in value[1]])
            case _:
                least, most, items = value
                return self._repeated(least, most, lambda: self._sequence(items, flags, pattern, is_last and most == 1))

    def _position(self, name: str, value: Any, flags: int) -> Fragment:
        key = name, id(value) if name == "IN" else value, flags
        number = self._numbers.get(key)
        if number is None:
            number = self.classes.setdefault(class_of(name, value, flags), len(self.classes))
            self._numbers[key] = number
        position = len(self.class_of)
        self.class_of.append(number)
        return Fragment({position: ALWAYS}, {position: ALWAYS}, 0)

    def _repeated(self, least: int, most: int, copy: Callable[[], Fragment]) -> Fragment:
        """`least` copies, and optional ones within one another: x{1,3} is x(x(x)?)?, which needs the fewest edges."""
        if most == 0:
            return Fragment()
        part = copy()
        if not part.first:
            return part if least else Fragment()
        is_empty = part.empty == ALWAYS
        least = 0 if is_empty else least
        endless = most == _parser.MAXREPEAT
        copies = [part, *(copy() for _ in range((max(least, 1) if endless else most) - 1))]
        if is_empty:
            for each in copies:
                each.empty = 0
        whole = Fragment()
        if endless:
            whole = copies.pop()
            self._connect(whole.last, whole.first)
            whole.empty = whole.empty if least else ALWAYS
        for index in reversed(range(len(copies))):
            whole = self._concatenated(copies[index], whole)
            if index >= least:
                whole.empty = ALWAYS
        return whole

    def _concatenated(self, left: Fragment, right: Fragment) -> Fragment:
        """Both in order. Neither is used again."""
        self._connect(left.last, right.first)
        first = _joined(left.first, _within(right.first, left.empty))
        last = _joined(right.last, _within(left.last, right.empty))
        return Fragment(first, last, left.empty & right.empty)

    def _connect(self, before: dict[int, int], after: dict[int, int]) -> None:
        self._num_edges += len(before) * len(after)
        if self._num_edges > MOST_EDGES:
            raise _too_large(f"{self._num_edges} pairs of parts that may follow one another", MOST_EDGES)
        for start, leaving in before.items():
            for end, entering in after.items():
                if contexts := leaving & entering:
                    self.edges[start, end] = self.edges.get((start, end), 0) | contexts


def check_lengths(patterns: tuple[str, ...]) -> None:
    """Raises: RequestError if the patterns of a request are too long together."""
    num = sum(map(len, patterns))
    if num > MOST_CHARACTERS_TOGETHER:
        raise _too_large(f"{num} characters", MOST_CHARACTERS_TOGETHER)


def _parsed(pattern: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of syntax that may change its meaning one day
            return _parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise bad(pattern, f"is no regular expression: {error}") from None
    except RecursionError:
        raise bad(pattern, f"has more than {DEEPEST} groups within groups") from None


def _num_parts(items: Sequence[tuple[Any, Any]], pattern: str, depth: int) -> int:
    """Parts that `items` come to with their repeats written out. Refuses what no automaton can do."""
    if depth > DEEPEST:
        raise bad(pattern, f"has more than {DEEPEST} groups within groups")
    total = 0
    for op, value in items:
        name = op.name
        if name in REFUSED:
            raise bad(pattern, f"uses {REFUSED[name]}, which a search without backtracking does not have")
        total += 1
        if name == "SUBPATTERN":
            total += _num_parts(value[3], pattern, depth + 1)
        elif name == "BRANCH":
            total += sum(1 + _num_parts(each, pattern, depth + 1) for each in value[1])
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, repeated = value
            copies = max(least, 1) if most == _parser.MAXREPEAT else most
            total += copies * _num_parts(repeated, pattern, depth + 1)
    return total


def _first_of_end(items: Sequence[tuple[Any, Any]]) -> int:
    """Index of the first item that only conditions follow."""
    index = len(items) - 1
    while index > 0 and items[index][0].name == "AT":
        index -= 1
    return index


def _combined(flags: int, added: int, removed: int) -> int:
    """Flags within a group such as (?i-s:..)."""
    if added & (re.ASCII | re.UNICODE):
        flags &= ~(re.ASCII | re.UNICODE)
    return (flags | added) & ~removed


def _within(positions: dict[int, int], contexts: int) -> dict[int, int]:
    if contexts == ALWAYS or not contexts:
        return positions if contexts else {}
    return {position: each & contexts for position, each in positions.items()}


def _conditional(part: Fragment, contexts: int) -> Fragment:
    """A part that ends where a condition holds."""
    if contexts == ALWAYS:
        return part
    return Fragment(part.first, _within(part.last, contexts), part.empty & contexts)


def _joined(some: dict[int, int], others: dict[int, int]) -> dict[int, int]:
    """Both, whose positions differ. The larger one is used up."""
    if len(some) < len(others):
        some, others = others, some
    some.update(others)
    return some


def _either(parts: list[Fragment]) -> Fragment:
    whole = Fragment(empty=0)
    for part in parts:
        whole.first = _joined(whole.first, part.first)
        whole.last = _joined(whole.last, part.last)
        whole.empty |= part.empty
    return whole
