"""gpt-oss: an answer is several messages, each on a channel (OpenAI's harmony format).

<|channel|>analysis<|message|>Let me see.<|end|>                                                             reasoning
<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>                                       content
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{..}<|call|>              a call
<|start|>assistant<|channel|>final<|message|>It rains.<|return|>                                             content

The prompt ends with `<|start|>assistant`. `to=` may also precede the channel. `<|call|>` and `<|return|>` are end
tokens of the model, so an answer has one call at most, and its text ends before them.

    text --ChannelReader--> reasoning | content, and messages with a recipient as they are --ChannelCalls--> calls

The package openai-harmony is not used: its only way to a vocabulary is a download of `o200k_base`, or that very file,
compared by its hash, in a directory that the environment names. A model's tokenizer.json cannot be given to it, and an
engine may not depend on the network. So the model's own chat template writes the prompt, and its own tokens the answer:
special tokens are shown by their ids, and read as text here. A model that spells such a marker with other tokens is
misunderstood, as with the markers of every other format.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overlap_spec.entrypoints.parsers.call_rules import CallableTool, grammar, is_name, tool_rules
from overlap_spec.entrypoints.parsers.json_call import SPACE, JsonArguments, Status
from overlap_spec.entrypoints.parsers.pieces import MOST_SPACE, CallWriter, HeldSpace, Markers, ToolNames
from overlap_spec.messages import Grammar

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
OPENING, BRIDGE, HEADER = f"{CHANNEL}analysis{MESSAGE}", f"{START}assistant", f"{CHANNEL}final{MESSAGE}"
ANALYSIS, TO, FUNCTIONS = "analysis", "to=", "functions."
ENDS, BEGINS = (END, CALL, RETURN), (START, CHANNEL)
MOST_HEAD = 512  # characters before a message's body: a recipient, a channel and a type of content
HEAD = re.compile(
    r"\s*(?:<\|start\|>[^\s<]*)?\s*(?:to=(?P<first>[^\s<]+)\s*)?"
    r"<\|channel\|>\s*(?P<channel>[^\s<]*)\s*(?:to=(?P<second>[^\s<]+)\s*)?"
    r"(?:<\|constrain\|>)?[^<]*<\|message\|>"
)
State = Callable[[str], None]  # reads a character


def is_harmony(template: str) -> bool:
    """Whether a chat template writes channels."""
    return CHANNEL in template and MESSAGE in template


@dataclass(frozen=True)
class Head:
    """What precedes the body of a message. `recipient`: "" or whom it calls."""

    channel: str
    recipient: str

    @property
    def tool(self) -> str:
        """The name of the tool that is called; "" if none is."""
        name = self.recipient.removeprefix(FUNCTIONS)
        return name if name != self.recipient and is_name(name) else ""


def read_head(text: str) -> Head | None:
    """A complete head; None if it is none."""
    found = HEAD.fullmatch(text)
    return None if found is None else Head(found["channel"], found["first"] or found["second"] or "")


def may_become_head(text: str) -> bool:
    """Whether a head may begin so."""
    begun = text.lstrip(SPACE)
    has_ended = MESSAGE in begun or begun.count(CHANNEL) > 1 or begun.rfind(START) > 0
    begins = any(each.startswith(begun[: len(each)]) for each in (*BEGINS, TO))
    return begins and not has_ended and len(text) <= MOST_HEAD


def split_marker(text: str) -> tuple[str, str]:
    """What begins like a head and is none: the marker that it begins with, and the rest, in which one may begin."""
    begun = next((each for each in BEGINS if text.lstrip(SPACE).startswith(each)), "")
    at = text.index(begun) + len(begun)
    return text[:at], text[at:]


class ChannelReader:
    """Separates reasoning from the rest. `streams`: it is given out while it grows, otherwise when it has ended.

    Messages of one kind are apart by a line feed. Text without a head is content.
    """

    def __init__(self, streams: bool) -> None:
        self._streams = streams
        self._state: State = self._before_body
        self._head = ""
        self._body = Markers(*ENDS, *BEGINS)
        self._write: State = self._say  # where the body belongs
        self._space = HeldSpace()  # at the end of the reasoning
        self._reasoning: list[str] = []
        self._rest: list[str] = []
        self._in_reasoning = self._has_reasoned = self._has_spoken = self._has_read = False

    def push(self, text: str) -> tuple[str, str]:
        """Read text. Returns what it adds to the reasoning, and to the rest."""
        for char in text:
            self.read(char)
        return self._take()

    def end(self) -> tuple[str, str]:
        """What was held back; no text follows. A head without a body is left out."""
        if self._state == self._before_body:
            head = self._head.lstrip(SPACE)
            if not head.startswith(BEGINS) and (head or not self._has_read):
                self._say(self._head)
        else:
            self._write(self._body.flush())
        self._in_reasoning = False
        return self._take()

    def _before_body(self, char: str) -> None:
        self._head += char
        if self._head.endswith(MESSAGE) and (head := read_head(self._head)) is not None:
            self._begin(head)
        elif not may_become_head(self._head):
            begun, rest = split_marker(self._head)
            self._head, self._write, self._state = "", self._say, self._in_body
            self._say(begun)
            for each in rest:
                self.read(each)

    def read(self, char: str) -> None:
        """Read a character."""
        self._state(char)

    def _begin(self, head: Head) -> None:
        self._has_read, self._state = True, self._in_body
        self._in_reasoning = head.channel == ANALYSIS and not head.recipient
        if self._in_reasoning:
            self._write = self._think
            if self._has_reasoned:
                self._space.push("\n")
        elif head.recipient:
            self._write = self._pass
            self._pass(self._head)
        else:
            self._write = self._say
            if self._has_spoken:
                self._pass("\n")
        self._head = ""

    def _in_body(self, char: str) -> None:
        text, marker = self._body.push(char)
        if text:
            self._write(text)
        if not marker:
            return
        if self._write == self._pass:
            self._pass(marker if marker in ENDS else END)
        self._in_reasoning, self._write, self._state = False, self._say, self._before_body
        self._head = "" if marker in ENDS else marker
        self._has_read = True

    def _think(self, text: str) -> None:
        shown = self._space.push(text if self._has_reasoned else text.lstrip())
        self._has_reasoned = self._has_reasoned or bool(shown)
        self._reasoning.append(shown)

    def _say(self, text: str) -> None:
        self._has_spoken = self._has_spoken or bool(text)
        self._rest.append(text)

    def _pass(self, text: str) -> None:
        self._rest.append(text)

    def _take(self) -> tuple[str, str]:
        rest = "".join(self._rest)
        self._rest.clear()
        if self._in_reasoning and not self._streams:
            return "", rest
        reasoning = "".join(self._reasoning)
        self._reasoning.clear()
        return reasoning, rest


class ChannelCalls:
    """A `CallParser`. Tools that a request has not are called too: its client can tell the model."""

    def __init__(self, writer: CallWriter, tools: ToolNames) -> None:
        self._writer = writer
        self._state: State = self._before_body
        self._opening = Markers(*BEGINS)
        self._closing = Markers(*ENDS, *BEGINS)
        self._head = self._before = ""  # what becomes content if no call follows
        self._call = JsonArguments(writer, "")

    def push(self, char: str) -> None:
        self._state(char)

    def end(self, is_cut: bool) -> None:
        if self._state == self._object:
            self._writer.break_off(self._head + self._before + self._call.text, is_cut)
        elif self._state in (self._before_body, self._before_object):
            self._writer.text(self._head + self._before + self._closing.flush())
        self._writer.text(self._opening.flush())

    def _text(self, char: str) -> None:
        text, marker = self._opening.push(char)
        self._writer.text(text)
        if marker:
            self._head, self._state = marker, self._before_body

    def _before_body(self, char: str) -> None:
        self._head += char
        if self._head.endswith(MESSAGE) and (head := read_head(self._head)) is not None:
            if head.tool:
                self._call, self._before = JsonArguments(self._writer, head.tool), ""
                self._state = self._before_object
            else:
                self._leave(self._head, "")
        elif not may_become_head(self._head):
            self._leave(*split_marker(self._head))

    def _before_object(self, char: str) -> None:
        if char in SPACE and len(self._before) < MOST_SPACE:
            self._before += char
        elif char == "{":
            self._state = self._object
            self._object(char)
        else:
            self._leave(self._head + self._before, char)

    def _object(self, char: str) -> None:
        status = self._call.push(char)
        if status is Status.DONE:
            self._head, self._before, self._state = "", "", self._after
        elif status is not Status.OPEN:
            self._writer.abandon(self._head + self._before + self._call.text)
            self._leave("", char)

    def _after(self, char: str) -> None:
        """What ends the message."""
        if not self._closing.held and char in SPACE and len(self._before) < MOST_SPACE:
            self._before += char
            return
        text, marker = self._closing.push(char)
        if text:
            self._leave("", self._before + text + self._closing.flush())
        elif marker in ENDS:
            self._leave("", "")
        elif marker:
            self._head, self._before, self._state = marker, "", self._before_body

    def _leave(self, content: str, unread: str) -> None:
        """No call is here: the rest is read as text."""
        self._writer.text(content)
        self._head, self._before, self._state = "", "", self._text
        for each in unread:
            self._state(each)


def harmony_rules(tools: Sequence[CallableTool], many: bool) -> Grammar:
    """One call: its end is the end of the answer."""
    call = (
        f'call_{{index}}: marker_3 "commentary {TO}{FUNCTIONS}{{name}} " marker_4 "json" marker_2 arguments_{{index}}'
    )
    return grammar(["start: call", *tool_rules(tools, call)], *MARKERS)
