"""Calls as bare JSON objects: `{"name": "f", "parameters": {..}}`, several apart by `;`.

Llama 3.1 and later. An answer that begins with an object which names a tool of the request is a call; so is what
follows `<|python_tag|>` anywhere.
"""

from overlap_spec.entrypoints.parsers.json_call import SPACE, JsonCall, Status
from overlap_spec.entrypoints.parsers.pieces import MOST_SPACE, CallWriter, Markers, ToolNames

TAG = "<|python_tag|>"
SEPARATOR = ";"


class Llama3JsonParser:
    """A `CallParser`."""

    def __init__(self, writer: CallWriter, tools: ToolNames) -> None:
        self._writer = writer
        self._is_tool = tools.__contains__
        self._tag = Markers(TAG)
        self._call = JsonCall(writer, self._is_tool)
        self._before = ""  # white space and separators that become content if no call follows
        self._state = self._before_call

    def push(self, char: str) -> None:
        self._state(char)

    def end(self, is_cut: bool) -> None:
        if self._state == self._object:
            self._writer.break_off(self._before + self._call.text, is_cut)
        elif self._state == self._before_call:
            self._writer.text(self._before)
        self._writer.text(self._tag.flush())

    def _before_call(self, char: str) -> None:
        """At the beginning, after the tag, and after a call."""
        is_between = char in SPACE or (char == SEPARATOR and self._writer.num_calls)
        if is_between and len(self._before) < MOST_SPACE:
            self._before += char
        elif char == "{":
            self._call, self._state = JsonCall(self._writer, self._is_tool), self._object
            self._object(char)
        else:
            self._writer.text(self._before)
            self._before, self._state = "", self._text
            self._text(char)

    def _object(self, char: str) -> None:
        status = self._call.push(char)
        if status is Status.DONE:
            self._before, self._state = "", self._before_call
        elif status is not Status.OPEN:
            self._writer.abandon(self._before + self._call.text)
            self._before, self._state = "", self._text
            if status is Status.BROKEN:
                self._text(char)

    def _text(self, char: str) -> None:
        text, marker = self._tag.push(char)
        self._writer.text(text)
        if marker:
            self._state = self._before_call
