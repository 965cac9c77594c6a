"""The pieces that parsers find in an answer: content, reasoning, and parts of tool calls.

A parser reads text character by character, so how the text was cut into deltas changes nothing. It writes what it
finds into a `CallWriter`. Two rules hold for every format:

- White space before a call and at the end of an answer with calls is no content.
- What begins like a call and is none is content, marker included. A stream has then sent the beginning of that call:
  its arguments stay unfinished, and `finish_reason` does not count it.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol

import msgspec

MOST_SPACE = 1024  # characters of white space around a call: after more, there is none


class ToolNames(frozenset[str]):
    """The names of a request's tools. `schemas`: of their arguments, by name."""

    schemas: Mapping[str, Mapping[str, Any]] = {}

    @classmethod
    def of(cls, schemas: Mapping[str, Mapping[str, Any]]) -> "ToolNames":
        """Of tools with these schemas."""
        found = cls(schemas)
        found.schemas = schemas
        return found

    @cached_property
    def _ordered(self) -> list[str]:
        return sorted(self)

    def begins(self, text: str) -> bool:
        index = bisect_left(self._ordered, text)
        return index < len(self._ordered) and self._ordered[index].startswith(text)


class ToolCallPiece(msgspec.Struct, frozen=True):
    """A part of a call: its first piece has the id and the name, later ones continue the text of its arguments."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class Found(msgspec.Struct, frozen=True):
    """What a stretch of text added."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallPiece, ...] = ()

    def then(self, more: "Found") -> "Found":
        """Both together."""
        calls = joined([*self.tool_calls, *more.tool_calls])
        return Found(self.content + more.content, self.reasoning + more.reasoning, calls)


class CallParser(Protocol):
    """Reads one answer in one format, and writes into the writer that it was made with."""

    def push(self, char: str) -> None:
        """Read one character."""

    def end(self, is_cut: bool) -> None:
        """No text follows. `is_cut`: it was ended by its length, inside a call perhaps."""


class ReasoningReader(Protocol):
    """Separates the reasoning of one answer from its rest."""

    def push(self, text: str) -> tuple[str, str]:
        """Read text. Returns what it adds to the reasoning, and to the rest."""

    def end(self) -> tuple[str, str]:
        """What was held back; no text follows."""


class CallWriter:
    """Collects content and calls.

    `streams`: calls are given out while they grow; otherwise whole, or as far as they came when the answer was cut.
    `most_calls`: calls after so many are left out. `new_id`: makes the id of a call.
    """

    def __init__(self, streams: bool, most_calls: int | None, new_id: Callable[[], str]) -> None:
        self.num_calls = 0  # complete ones
        self._streams = streams
        self._most_calls = most_calls
        self._new_id = new_id
        self._content: list[str] = []
        self._text = HeldSpace()
        self._pieces: list[ToolCallPiece] = []
        self._call: list[ToolCallPiece] = []  # of the open call, not yet given out
        self._next_index = 0
        self._is_open = False  # whether the name of a call has been written, and its end has not

    def text(self, text: str) -> None:
        """Add content."""
        self._content.append(self._text.push(text))

    def begin(self, name: str, call_id: str = "") -> None:
        """A call begins. `call_id`: the one that the model gives it; without one it gets a new one."""
        self._is_open = True
        self._text.drop()
        self._write(ToolCallPiece(self._next_index, "", call_id or self._new_id(), name))

    def arguments(self, text: str) -> None:
        """Continue the open call's arguments."""
        self._write(ToolCallPiece(self._next_index, text))

    def finish(self) -> None:
        """The open call is complete."""
        self._close(keeps=True)
        self.num_calls += 1

    def abandon(self, text: str) -> None:
        """What was read since the last call or content is no call: it is content."""
        if self._is_open:
            self._close(keeps=self._streams)
        self.text(text)

    def break_off(self, text: str, is_cut: bool) -> None:
        """The answer ends inside a call, of which `text` was read. One that the length has cut is given out."""
        if is_cut and self._is_open:
            self._close(keeps=True)
        else:
            self.abandon(text)

    def end(self) -> None:
        """No text follows."""
        space = self._text.drop()
        if not self._next_index:
            self._content.append(space)

    def take(self) -> Found:
        """What was added since the last time."""
        found = Found("".join(self._content), "", joined(self._pieces))
        self._content.clear()
        self._pieces.clear()
        return found

    def _write(self, piece: ToolCallPiece) -> None:
        if self._most_calls is None or self.num_calls < self._most_calls:
            (self._pieces if self._streams else self._call).append(piece)

    def _close(self, keeps: bool) -> None:
        if keeps:
            self._pieces += self._call
            self._next_index += 1
        self._call.clear()
        self._is_open = False


def joined(pieces: list[ToolCallPiece]) -> tuple[ToolCallPiece, ...]:
    """A call's name apart, and the pieces of its arguments that follow each other as one."""
    found: list[ToolCallPiece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and last.index == piece.index and not piece.name and not last.name:
            found[-1] = msgspec.structs.replace(last, arguments=last.arguments + piece.arguments)
        else:
            found.append(piece)
    return tuple(found)


class HeldSpace:
    """Holds back the white space at the end of a growing text: what follows decides whether it is shown."""

    def __init__(self) -> None:
        self._space: list[str] = []

    def push(self, text: str) -> str:
        """Returns the text that is no longer at the end."""
        shown = text.rstrip()
        if not shown:
            if text:
                self._space.append(text)
            return ""
        before, self._space = "".join(self._space), [text[len(shown) :]]
        return before + shown

    def drop(self) -> str:
        """Forget the white space at the end. Returns it."""
        space = "".join(self._space)
        self._space.clear()
        return space


class Markers:
    """Finds markers in a growing text: what may still become one is held back."""

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self.held = ""

    def push(self, char: str) -> tuple[str, str]:
        """Returns the text that is part of no marker, and the marker that is now complete."""
        self.held += char
        given = 0
        while not any(marker.startswith(self.held[given:]) for marker in self._markers):
            given += 1
        text, self.held = self.held[:given], self.held[given:]
        if self.held in self._markers:
            marker, self.held = self.held, ""
            return text, marker
        return text, ""

    def flush(self) -> str:
        """The text that is held back."""
        text, self.held = self.held, ""
        return text
