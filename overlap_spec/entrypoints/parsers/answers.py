"""From the text of one answer to reasoning, content and calls.

text --ReasoningParser--> the answer's text --CallParser--> content and calls

Reasoning is separated from the answer: `<think>why</think>what`. The text begins with the opening marker wherever it
was written: if the prompt ended with it, the tokenizer puts it before the answer's text. White space at the ends of the
reasoning, and before the answer that follows it, is dropped.
"""

import msgspec

from overlap_spec.entrypoints.parsers.formats import CallFormat, ReasoningFormat
from overlap_spec.entrypoints.parsers.pieces import MOST_SPACE, CallWriter, Found, HeldSpace, Markers, ToolNames


class ReasoningParser:
    """Reads one answer.

    `is_implicit`: an answer without the opening marker begins with reasoning all the same. `streams`: reasoning is
    given out while it grows, otherwise when it has ended.
    """

    def __init__(self, opening: str, closing: str, is_implicit: bool, streams: bool) -> None:
        self._opening = Markers(opening)
        self._closing = Markers(closing)
        self._is_implicit = is_implicit
        self._streams = streams
        self._state = self._start
        self._before = ""  # white space at the beginning
        self._text = HeldSpace()  # of the reasoning
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._has_begun = False  # some of the reasoning has been read
        self._has_ended = False

    def push(self, text: str) -> tuple[str, str]:
        """Read text. Returns what it adds to the reasoning and to the answer."""
        for index, char in enumerate(text):
            if self._state == self._answer:
                self._content.append(text[index:])
                break
            self._state(char)
        return self._take()

    def end(self) -> tuple[str, str]:
        """What was held back; no text follows."""
        self._has_ended = True
        if self._state == self._start:
            self._go_on("")
        if self._state == self._thought:
            self._think(self._closing.flush())
        return self._take()

    def _start(self, char: str) -> None:
        if not self._opening.held and char.isspace() and len(self._before) < MOST_SPACE:
            self._before += char
            return
        text, marker = self._opening.push(char)
        if marker:
            self._state = self._thought
        elif text:
            self._go_on(text)

    def _go_on(self, text: str) -> None:
        """The answer does not begin with the marker."""
        self._state = self._thought if self._is_implicit else self._answer
        for char in self._before + text + self._opening.flush():
            self._state(char)

    def _thought(self, char: str) -> None:
        text, marker = self._closing.push(char)
        self._think(text)
        if marker:
            self._has_ended, self._state = True, self._gap

    def _think(self, text: str) -> None:
        shown = self._text.push(text if self._has_begun else text.lstrip())
        self._has_begun = self._has_begun or bool(shown)
        self._reasoning.append(shown)

    def _gap(self, char: str) -> None:
        if not char.isspace():
            self._state = self._answer
            self._answer(char)

    def _answer(self, char: str) -> None:
        self._content.append(char)

    def _take(self) -> tuple[str, str]:
        content = "".join(self._content)
        self._content.clear()
        if not (self._streams or self._has_ended):
            return "", content
        reasoning = "".join(self._reasoning)
        self._reasoning.clear()
        return reasoning, content


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
