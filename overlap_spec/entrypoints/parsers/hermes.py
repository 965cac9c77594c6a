"""Calls between tags, one each: `<tool_call>{"name": "f", "arguments": {..}}</tool_call>`.

Hermes 2 and 3, Qwen 2.5 and 3, SmolLM3.
"""

from overlap_spec.entrypoints.parsers.json_call import SPACE, JsonCall, Status
from overlap_spec.entrypoints.parsers.names import is_name
from overlap_spec.entrypoints.parsers.pieces import MOST_SPACE, CallWriter, Markers, ToolNames

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """A `CallParser`. Tools that a request has not are called too: its client can tell the model."""

    def __init__(self, writer: CallWriter, tools: ToolNames) -> None:
        self._writer = writer
        self._state = self._text
        self._opening = Markers(OPEN)
        self._closing = Markers(CLOSE)
        self._call = JsonCall(writer, is_name)
        self._before = ""  # what becomes content if no call, or no closing tag, follows

    def push(self, char: str) -> None:
        self._state(char)

    def end(self, is_cut: bool) -> None:
        if self._state == self._object:
            self._writer.break_off(self._before + self._call.text, is_cut)
        self._writer.text(self._opening.flush())

    def _text(self, char: str) -> None:
        text, marker = self._opening.push(char)
        self._writer.text(text)
        if marker:
            self._before, self._call = marker, JsonCall(self._writer, is_name)
            self._state = self._object

    def _object(self, char: str) -> None:
        if not self._call.length and char in SPACE and len(self._before) < MOST_SPACE:
            self._before += char
            return
        status = self._call.push(char)
        if status is Status.DONE:
            self._before, self._state = "", self._after
        elif status is not Status.OPEN:
            self._writer.abandon(self._before + self._call.text)
            self._state = self._text
            if status is Status.BROKEN:
                self._text(char)

    def _after(self, char: str) -> None:
        """The closing tag, or text if a model has left it out."""
        if not self._closing.held and char in SPACE and len(self._before) < MOST_SPACE:
            self._before += char
            return
        text, marker = self._closing.push(char)
        if text or marker:
            self._state = self._text
        if text:
            for each in self._before + text + self._closing.flush():
                self._text(each)
