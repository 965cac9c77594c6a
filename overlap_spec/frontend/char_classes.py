"""Sets of characters in stop patterns: `a`, `.`, `[^a-z\\d]`, with Python's meaning of categories and case."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from re import _parser  # type: ignore[attr-defined]  # what re itself parses with, whose names have no stubs
from typing import Any

import numpy as np
import numpy.typing as npt

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
