"""Calls in a section: each between markers, with its arguments as JSON.

**DeepSeek**: V3 and R1 put the arguments into a fence, V3.1 does not. The parser reads both.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{..}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{..}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

**Kimi K2** numbers its calls, and finds their answers by that number: it is the call's id.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{..}<|tool_call_end|>
<|tool_calls_section_end|>
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from overlap_spec.entrypoints.parsers.call_rules import CallableTool, grammar, sequence, tool_rules
from overlap_spec.entrypoints.parsers.json_call import SPACE, JsonArguments, Status
from overlap_spec.entrypoints.parsers.pieces import MOST_SPACE, CallWriter, Markers, ToolNames
from overlap_spec.messages import Grammar

BAR, BLOCK = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
MOST_HEAD = 256  # characters between the markers before a call's arguments
NAME = r"(?P<name>[A-Za-z0-9_.:/-]{1,128}?)"
FENCE, JSON = "```", "```json"


def _deepseek(words: str) -> str:
    return f"<{BAR}{words.replace(' ', BLOCK)}{BAR}>"


@dataclass(frozen=True)
class SectionMarks:
    """How a family writes sections. `head`: what is between a call's first marker and its arguments: the group
    `name`, and perhaps `index`, its number. `tail`: what may precede its last marker."""

    begin: str
    call: str
    separator: str
    call_end: str
    end: str
    head: re.Pattern[str]
    tail: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return self.begin, self.call, self.separator, self.call_end, self.end


SEP, ARGUMENT = _deepseek("tool sep"), "<|tool_call_argument_begin|>"
DEEPSEEK = SectionMarks(
    _deepseek("tool calls begin"),
    _deepseek("tool call begin"),
    SEP,
    _deepseek("tool call end"),
    _deepseek("tool calls end"),
    re.compile(rf"\s*(?:function{SEP}\s*{NAME}\s*(?:{JSON}|{FENCE})?|{NAME.replace('name', 'bare')}\s*{SEP})\s*"),
    (FENCE,),
)
KIMI = SectionMarks(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    ARGUMENT,
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    re.compile(rf"\s*(?:functions\.)?{NAME}:(?P<index>[0-9]{{1,6}})\s*{re.escape(ARGUMENT)}\s*"),
)


class SectionParser:
    """A `CallParser`. Tools that a request has not are called too: its client can tell the model."""

    def __init__(self, marks: SectionMarks, writer: CallWriter, tools: ToolNames) -> None:
        self._marks = marks
        self._writer = writer
        self._ids = CallIds()
        self._state = self._text
        self._opening = Markers(marks.begin, marks.call)
        self._between = Markers(marks.call, marks.end)  # in a section, outside of its calls
        self._closing = Markers(*marks.tail, marks.call_end, marks.call, marks.end)
        self._before = ""  # what becomes content if no call follows
        self._head = ""  # as far as the head of a call has come
        self._call = JsonArguments(writer, "")

    def push(self, char: str) -> None:
        self._state(char)

    def end(self, is_cut: bool) -> None:
        if self._state == self._object:
            self._writer.break_off(self._before + self._head + self._call.text, is_cut)
        elif self._state in (self._section, self._call_head):
            held = self._between.flush()
            self._writer.text(self._before + self._head + held if self._before.strip() else "")
        self._writer.text(self._opening.flush())

    def _text(self, char: str) -> None:
        text, marker = self._opening.push(char)
        self._writer.text(text)
        if marker:
            self._before, self._head = marker, ""
            self._state = self._section if marker == self._marks.begin else self._call_head

    def _section(self, char: str) -> None:
        """After the section's first marker, and after a call."""
        if not self._between.held and char in SPACE and len(self._before) < MOST_SPACE:
            self._before += char
            return
        text, marker = self._between.push(char)
        if marker == self._marks.call:
            self._before, self._head, self._state = self._before + marker, "", self._call_head
        elif marker and self._before.strip():
            self._leave(self._before + marker, "")  # a section without calls
        elif marker:
            self._before, self._state = "", self._text
        elif text:
            self._leave(self._before, text + self._between.flush())

    def _call_head(self, char: str) -> None:
        if char == "{" and (found := self._marks.head.fullmatch(self._head)):
            groups = found.groupdict()
            name = groups["name"] or groups["bare"]
            call_id = self._ids.of(name, int(groups["index"])) if "index" in groups else ""
            self._call, self._state = JsonArguments(self._writer, name, call_id), self._object
            self._object(char)
        elif char == "{" or len(self._head) > MOST_HEAD:
            self._leave(self._before, self._head + char)
        else:
            self._head += char

    def _object(self, char: str) -> None:
        status = self._call.push(char)
        if status is Status.DONE:
            self._before, self._head, self._state = "", "", self._after
        elif status is not Status.OPEN:
            self._writer.abandon(self._before + self._head + self._call.text)
            self._leave("", char)

    def _after(self, char: str) -> None:
        """What closes the call, or text if a model has left that out."""
        if not self._closing.held and char in SPACE and len(self._before) < MOST_SPACE:
            self._before += char
            return
        text, marker = self._closing.push(char)
        if text:
            self._leave("", self._before + text + self._closing.flush())
        elif marker == self._marks.call:
            self._before, self._head, self._state = marker, "", self._call_head
        elif marker and marker not in self._marks.tail:
            self._before, self._state = "", self._section if marker == self._marks.call_end else self._text

    def _leave(self, content: str, unread: str) -> None:
        """No call is here: the rest is read as text."""
        self._writer.text(content)
        self._before, self._head, self._state = "", "", self._text
        for each in unread:
            self._state(each)


class CallIds:
    """The ids of one answer's calls. Those that a model gives twice are counted on, for a client to tell them apart."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._next = 0

    def of(self, name: str, index: int) -> str:
        """The id of the call that the model gives this number."""
        if f"functions.{name}:{index}" in self._given:
            index = self._next
        self._next = max(self._next, index + 1)
        self._given.add(f"functions.{name}:{index}")
        return f"functions.{name}:{index}"


def is_deepseek_v3(template: str) -> bool:
    """Whether a chat template writes arguments into fences."""
    return DEEPSEEK.call in template and JSON in template


def is_deepseek_v31(template: str) -> bool:
    """Whether a chat template writes arguments behind names."""
    return DEEPSEEK.call in template and JSON not in template


deepseek_parser = partial(SectionParser, DEEPSEEK)
kimi_parser = partial(SectionParser, KIMI)


def deepseek_v3_rules(tools: Sequence[CallableTool], many: bool) -> Grammar:
    """Calls whose arguments are in a fence."""
    call = 'call_{index}: marker_1 "function" marker_2 "{name}\\n```json\\n" arguments_{index} "\\n```" marker_3'
    return _section(DEEPSEEK, call, "\\n", tools, many)


def deepseek_v31_rules(tools: Sequence[CallableTool], many: bool) -> Grammar:
    """Calls whose arguments follow the name."""
    return _section(DEEPSEEK, 'call_{index}: marker_1 "{name}" marker_2 arguments_{index} marker_3', "", tools, many)


def kimi_rules(tools: Sequence[CallableTool], many: bool) -> Grammar:
    """Calls with numbers."""
    call = 'call_{index}: marker_1 "functions.{name}:" /[0-9]{{1,3}}/ marker_2 arguments_{index} marker_3'
    return _section(KIMI, call, "", tools, many)


def _section(marks: SectionMarks, call: str, separator: str, tools: Sequence[CallableTool], many: bool) -> Grammar:
    rules = ["start: marker_0 calls marker_4", sequence("call", separator, many, "calls"), *tool_rules(tools, call)]
    return grammar(rules, *marks.all)
