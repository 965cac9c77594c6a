"""From the text of one answer to reasoning, content and calls.

text --ReasoningParser--> the answer's text --CallParser--> content and calls
"""

import msgspec

from overlap_spec.entrypoints.parsers.formats import CallFormat, ReasoningFormat
from overlap_spec.entrypoints.parsers.pieces import CallWriter, Found, ToolNames
from overlap_spec.entrypoints.parsers.reasoning import ReasoningParser


class AnswerFormat(msgspec.Struct, frozen=True):
    """What is to be found in the answers to one request. Without formats all text is content."""

    calls: CallFormat | None = None
    tools: ToolNames = ToolNames()
    most_calls: int | None = None
    reasoning: ReasoningFormat | None = None
    streams_reasoning: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return self.calls is None and self.reasoning is None


class AnswerParser:
    """Reads one answer. `streams`: calls are given out while they grow."""

    def __init__(self, form: AnswerFormat, streams: bool) -> None:
        self._reasoning = None
        if (reasoning := form.reasoning) is not None:
            marks = reasoning.opening, reasoning.closing
            self._reasoning = ReasoningParser(*marks, reasoning.is_implicit, form.streams_reasoning)
        self._writer = self._calls = None
        if form.calls is not None:
            self._writer = CallWriter(streams, form.most_calls, form.calls.new_id)
            self._calls = form.calls.parser(self._writer, form.tools)

    @property
    def num_calls(self) -> int:
        """Complete calls so far."""
        return self._writer.num_calls if self._writer is not None else 0

    def push(self, text: str) -> Found:
        """Read text."""
        reasoning, answer = self._reasoning.push(text) if self._reasoning is not None else ("", text)
        return self._read(reasoning, answer)

    def end(self, is_cut: bool) -> Found:
        """What was held back; no text follows. `is_cut`: the answer was ended by its length."""
        reasoning, answer = self._reasoning.end() if self._reasoning is not None else ("", "")
        found = self._read(reasoning, answer)
        if self._writer is None or self._calls is None:
            return found
        self._calls.end(is_cut)
        self._writer.end()
        return found.then(self._writer.take())

    def _read(self, reasoning: str, answer: str) -> Found:
        if self._writer is None or self._calls is None:
            return Found(answer, reasoning)
        for char in answer:
            self._calls.push(char)
        return msgspec.structs.replace(self._writer.take(), reasoning=reasoning)
