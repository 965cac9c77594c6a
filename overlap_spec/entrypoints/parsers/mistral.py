"""Mistral: calls after a marker, as a list or one by one.

[TOOL_CALLS] [{"name": "f", "arguments": {..}}, ..]
[TOOL_CALLS]f[ARGS]{..}[TOOL_CALLS]g[CALL_ID]a1B2c3D4e[ARGS]{..}
"""

import re

from overlap_spec.entrypoints.parsers.call_rules import is_name
from overlap_spec.entrypoints.parsers.json_call import SPACE, JsonArguments, JsonCall, Status
from overlap_spec.entrypoints.parsers.pieces import MOST_SPACE, CallWriter, Markers, ToolNames

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
