"""Reads a tool call that is a JSON object, character by character, and gives its arguments out while they come.

    {"name": "weather", "arguments": {"city": "Rome"}}
                                     ^ given out from here, exactly as written

Only what is a beginning of valid JSON is ever given out.

Mistral: calls after a marker, as a list or one by one.

[TOOL_CALLS] [{"name": "f", "arguments": {..}}, ..]
[TOOL_CALLS]f[ARGS]{..}[TOOL_CALLS]g[CALL_ID]a1B2c3D4e[ARGS]{..}
"""

import json
import re
from collections.abc import Callable
from enum import Enum

from overlap_spec.entrypoints.parsers.call_rules import is_name
from overlap_spec.entrypoints.parsers.pieces import MOST_SPACE, CallWriter, Markers, ToolNames

SPACE = " \t\n\r"
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
BEGUN_NUMBER = re.compile(r"-?((0|[1-9][0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]*)?)?")
DIGITS = frozenset("0123456789")
WORDS = ("true", "false", "null")
ARGUMENTS = ("arguments", "parameters")
MOST_DEPTH = 500  # what json.loads reads in every process
MOST_DIGITS = 1000  # as above


class Status(Enum):
    """Of an object that is being read."""

    OPEN = 0
    DONE = 1
    BROKEN = 2  # the last character was not read
    NO_CALL = 3  # it is complete, and asks for no call


class JsonObject:
    """Checks one object. `members`: of its own keys, where in `text` their values begin and end."""

    def __init__(self) -> None:
        self.members: dict[str, tuple[int, int | None]] = {}
        self.length = 0
        self._text: list[str] = []
        self._open: list[str] = []  # closing brackets, the innermost last
        self._next = self._value
        self._key = ""  # of the outermost object
        self._begun = 0  # where the string, number or word that is being read began
        self._is_key = False

    def text(self, begin: int = 0, end: int | None = None) -> str:
        """What was read, or a part of it."""
        return "".join(self._text[begin:end])

    @property
    def is_in_string(self) -> bool:
        """Whether a string has begun and has not ended."""
        return self._next in (self._string, self._escape, self._hex)

    def push(self, char: str) -> Status:
        """Read one character. Nothing may follow when the object is not OPEN any more."""
        if not self._next(char):
            return Status.BROKEN
        self._text.append(char)
        self.length += 1
        return Status.OPEN if self._open else Status.DONE

    # Each of these reads a character in one state, and returns whether it may stand there.

    def _value(self, char: str) -> bool:
        if char in SPACE:
            return bool(self._open)
        if not self._open and char != "{":
            return False
        self._note_begin()
        if char in "{[":
            self._open.append("}" if char == "{" else "]")
            self._next = self._first_key if char == "{" else self._first_value
            return len(self._open) <= MOST_DEPTH
        if char == '"':
            return self._start_string(is_key=False)
        self._begun, self._next = self.length, self._scalar
        return char in "-0123456789tfn"

    def _first_value(self, char: str) -> bool:
        return self._close(char) if char == "]" else self._value(char)

    def _first_key(self, char: str) -> bool:
        return self._close(char) if char == "}" else self._before_key(char)

    def _before_key(self, char: str) -> bool:
        return self._start_string(is_key=True) if char == '"' else char in SPACE

    def _colon(self, char: str) -> bool:
        if char == ":":
            self._next = self._value
        return char == ":" or char in SPACE

    def _comma(self, char: str) -> bool:
        if char == ",":
            self._next = self._before_key if self._open[-1] == "}" else self._value
        return char == "," or char in SPACE or self._close(char)

    def _scalar(self, char: str) -> bool:
        if char in DIGITS and self.length - self._begun in range(2, MOST_DIGITS) and DIGITS.issuperset(self._text[-2:]):
            return True  # after two digits one more may always stand
        so_far = self.text(self._begun)
        if char in ",]}" or char in SPACE:
            self._note_end(self.length)
            self._next = self._comma
            return (so_far in WORDS or NUMBER.fullmatch(so_far) is not None) and self._comma(char)
        longer = so_far + char
        is_number = len(longer) <= MOST_DIGITS and BEGUN_NUMBER.fullmatch(longer) is not None
        return is_number or any(word.startswith(longer) for word in WORDS)

    def _start_string(self, is_key: bool) -> bool:
        self._begun, self._is_key, self._next = self.length, is_key, self._string
        return True

    def _string(self, char: str) -> bool:
        if char == '"':
            return self._end_string()
        if char == "\\":
            self._next = self._escape
        return char >= " "

    def _escape(self, char: str) -> bool:
        self._next = self._hex if char == "u" else self._string
        self._hex_from = self.length + 1
        return char in '"\\/bfnrtu'

    def _hex(self, char: str) -> bool:
        if self.length - self._hex_from == 3:
            self._next = self._string
        return char in "0123456789abcdefABCDEF"

    def _end_string(self) -> bool:
        if not self._is_key:
            self._note_end(self.length + 1)
            self._next = self._comma
            return True
        self._next = self._colon
        if len(self._open) > 1:
            return True
        self._key = json.loads(self.text(self._begun) + '"')
        return self._key not in self.members

    def _close(self, char: str) -> bool:
        if char != self._open[-1]:
            return False
        self._open.pop()
        self._note_end(self.length + 1)
        self._next = self._comma
        return True

    def _note_begin(self) -> None:
        if len(self._open) == 1:
            self.members[self._key] = (self.length, None)

    def _note_end(self, end: int) -> None:
        if len(self._open) == 1:
            self.members[self._key] = (self.members[self._key][0], end)

    def value(self, key: str) -> str | None:
        """The text of a member's value; None while it has not ended."""
        begin, end = self.members.get(key, (0, None))
        return None if end is None else self.text(begin, end)


class JsonCall:
    """Reads `{"name": .., "arguments": {..}}`, keys in any order; `parameters` is the same as `arguments`."""

    def __init__(self, writer: CallWriter, is_tool: Callable[[str], bool]) -> None:
        self._writer = writer
        self._is_tool = is_tool
        self._object = JsonObject()
        self._has_name = False  # the member "name" is complete
        self._known_name: str | None = None  # it, if it is a tool's
        self._given: int | None = None  # up to where the arguments have been given out; None: not begun
        self._key = ""

    @property
    def length(self) -> int:
        """Of `text`, which takes as long to make as it is."""
        return self._object.length

    @property
    def text(self) -> str:
        return self._object.text()

    def push(self, char: str) -> Status:
        """Read one character."""
        status = self._object.push(char)
        if status is Status.OPEN:
            self._give()
        return self._finish() if status is Status.DONE else status

    def _give(self) -> None:
        """Give out what there is of the arguments, once the name is known."""
        if self._given is None:
            self._begin()
        elif self._given < self._end():
            self._writer.arguments(self._object.text(self._given, self._end()))
            self._given = self._end()

    def _begin(self) -> None:
        key = next((key for key in ARGUMENTS if key in self._object.members), None)
        if key is None or (name := self._name()) is None:
            return
        begin, _ = self._object.members[key]
        if self._object.text(begin, begin + 1) == "{":
            self._key, self._given = key, begin
            self._writer.begin(name)
            self._give()

    def _end(self) -> int:
        end = self._object.members[self._key][1]
        return self._object.length if end is None else end

    def _name(self) -> str | None:
        if not self._has_name and (text := self._object.value("name")) is not None:
            self._has_name, name = True, json.loads(text)
            self._known_name = name if isinstance(name, str) and name and self._is_tool(name) else None
        return self._known_name

    def _finish(self) -> Status:
        if self._given is None:
            name, arguments = self._name(), self._late_arguments()
            if name is None or arguments is None:
                return Status.NO_CALL
            self._writer.begin(name)
            self._writer.arguments(arguments)
        self._writer.finish()
        return Status.DONE

    def _late_arguments(self) -> str | None:
        """Arguments that came before the name, as a string, or not at all; None if they are no object."""
        texts = [text for key in ARGUMENTS if (text := self._object.value(key)) is not None]
        if not texts or texts == ["null"]:
            return "{}"
        value = json.loads(texts[0])
        if isinstance(value, str):
            try:
                value.encode()  # an escape may be half a character
                return value if isinstance(json.loads(value), dict) else None
            except (ValueError, RecursionError):
                return None
        return texts[0] if isinstance(value, dict) and len(texts) == 1 else None


class JsonArguments:
    """Reads a call's arguments alone; the name came before them, and perhaps the id."""

    def __init__(self, writer: CallWriter, name: str, call_id: str = "") -> None:
        self._writer = writer
        self._name = name
        self._id = call_id
        self._object = JsonObject()

    @property
    def text(self) -> str:
        return self._object.text()

    def push(self, char: str) -> Status:
        """Read one character."""
        status = self._object.push(char)
        if status is Status.BROKEN:
            return status
        if self._object.length == 1:
            self._writer.begin(self._name, self._id)
        self._writer.arguments(char)
        if status is Status.DONE:
            self._writer.finish()
        return status


CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
HEAD = re.compile(r"\s*([A-Za-z0-9_.:/-]{1,128})(\[CALL_ID\][A-Za-z0-9]*)?(\[ARGS\])?\s*")
MOST_HEAD = 256  # characters


class MistralParser:
    """A `CallParser`. Tools that a request has not are called too: its client can tell the model."""

    def __init__(self, writer: CallWriter, tools: ToolNames) -> None:
        self._writer = writer
        self._marker = Markers(CALLS)
        self._state = self._text
        self._call: JsonCall | JsonArguments = JsonCall(writer, is_name)
        self._before = ""  # what becomes content if no call follows
        self._in_list = False

    def push(self, char: str) -> None:
        self._state(char)

    def end(self, is_cut: bool) -> None:
        if self._state == self._object:
            self._writer.break_off(self._before + self._call.text, is_cut)
        elif self._state != self._text:
            self._writer.text(self._before)
        self._writer.text(self._marker.flush())

    def _text(self, char: str) -> None:
        text, marker = self._marker.push(char)
        self._writer.text(text)
        if marker:
            self._before, self._in_list, self._state = "", False, self._after_marker

    def _after_marker(self, char: str) -> None:
        if char in SPACE and len(self._before) < MOST_SPACE:
            self._before += char
        elif char == "[":
            self._before += char
            self._in_list, self._state = True, self._before_item
        else:
            self._state = self._head
            self._head(char)

    def _before_item(self, char: str) -> None:
        if char == "{":
            self._start(JsonCall(self._writer, is_name), char)
        elif char in SPACE and len(self._before) < MOST_SPACE:
            self._before += char
        else:
            self._give_up(char)

    def _after_item(self, char: str) -> None:
        if char == "]":
            self._before, self._state = "", self._text
        elif char == ",":
            self._before, self._state = char, self._before_item
        elif char not in SPACE:
            self._give_up(char)

    def _head(self, char: str) -> None:
        """A tool's name, perhaps an id of the call, which gets another one, and what announces the arguments."""
        if char == "{" and (found := HEAD.fullmatch(self._before)):
            self._start(JsonArguments(self._writer, found[1]), char)
        elif char in "{\n" or len(self._before) > MOST_HEAD:
            self._give_up(char)
        else:
            self._before += char

    def _start(self, call: JsonCall | JsonArguments, char: str) -> None:
        self._call, self._state = call, self._object
        self._object(char)

    def _object(self, char: str) -> None:
        status = self._call.push(char)
        if status is Status.DONE:
            self._before, self._state = "", self._after_item if self._in_list else self._text
        elif status is not Status.OPEN:
            self._writer.abandon(self._before + self._call.text)
            self._before, self._state = "", self._text
            if status is Status.BROKEN:
                self._text(char)

    def _give_up(self, char: str) -> None:
        text, self._before, self._state = self._before + char, "", self._text
        for each in text:
            self._state(each)
