"""Tools and reasoning of a chat: what it asks for, and how its answer's text is read.

It asks by `tools`, `tool_choice`, `separate_reasoning` and the like. Of the text of one answer:

    text --ReasoningParser--> the answer's text --CallParser--> content and calls

Reasoning is separated from the answer: `<think>why</think>what`. The text begins with the opening marker wherever it
was written: if the prompt ended with it, the frontend puts it before the answer's text. White space at the ends of the
reasoning, and before the answer that follows it, is dropped.
"""

from functools import partial
from typing import Any, Literal

import msgspec

from overlap_spec.entrypoints.http.body_fields import Json
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_runner import renamed
from overlap_spec.entrypoints.openai.requests import ChatRequest
from overlap_spec.entrypoints.parsers.call_rules import CallableTool, is_name
from overlap_spec.entrypoints.parsers.formats import CALL_FORMATS, REASONING_FORMATS, CallFormat, ReasoningFormat
from overlap_spec.entrypoints.parsers.pieces import (
    MOST_SPACE,
    CallWriter,
    Found,
    HeldSpace,
    Markers,
    ReasoningReader,
    ToolNames,
)
from overlap_spec.errors import RequestError
from overlap_spec.messages import Grammar, Reasoning, SamplingParams, shown


class ReasoningParser:
    """Reads one answer.

    `streams`: reasoning is given out while it grows, otherwise when it has ended.
    """

    def __init__(self, form: ReasoningFormat, streams: bool) -> None:
        self._opening = Markers(form.opening)
        self._closing = Markers(form.closing, *form.breaks)
        self._breaks = form.breaks
        self._is_implicit = form.is_implicit
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
        if marker in self._breaks:
            self._gap(marker)

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
        self._reasoning: ReasoningReader | None = None
        if form.reasoning is not None:
            reader = form.reasoning.reader or partial(ReasoningParser, form.reasoning)
            self._reasoning = reader(form.streams_reasoning)
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


MOST_NAMED = 16  # tools, in an error


class Function(msgspec.Struct):
    """A tool's function, as far as it is checked here; the chat template sees all of it."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """An item of `tools`."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct):
    """Part of a `tool_choice`."""

    name: str


class NamedTool(msgspec.Struct):
    """A `tool_choice` that names its tool."""

    type: Literal["function"]
    function: FunctionName


def template_tools(body: ChatRequest) -> list[Json]:
    """The tools that the chat template is given."""
    return [] if body.tool_choice == "none" else body.tools


def answer_format(body: ChatRequest, info: ServerInfo) -> AnswerFormat:
    """What is to be found in the answers. Raises: Problem naming the field."""
    tools = read_tools(body.tools)
    choice = read_choice(body.tool_choice, tools)
    calls = info.call_format if tools and choice != "none" else None
    return AnswerFormat(
        calls=calls,
        tools=ToolNames.of({tool.function.name: tool.function.parameters or {} for tool in tools}),
        most_calls=None if body.parallel_tool_calls else 1,
        reasoning=info.reasoning_format if body.separate_reasoning else None,
        streams_reasoning=body.stream_reasoning,
    )


def with_format(sampling: SamplingParams, body: ChatRequest, form: AnswerFormat, info: ServerInfo) -> SamplingParams:
    """What the engine has to know of the format: its markers, and a grammar if calls are forced.

    Raises: Problem or RequestError naming the field.
    """
    try:
        forced = forced_calls(body, info)
        reasoning = _reasoning(body, info, forced is not None)
        changes = {"shown_tokens": _markers(form), "reasoning": reasoning, "grammar": forced or sampling.grammar}
        return msgspec.structs.replace(sampling, **changes)
    except RequestError as error:
        raise renamed(error, {"grammar": "tools"}) from None


def forced_calls(body: ChatRequest, info: ServerInfo) -> Grammar | None:
    """The grammar of an answer that has to be calls. Raises: Problem if none can be forced here."""
    tools = read_tools(body.tools)
    choice = read_choice(body.tool_choice, tools)
    if isinstance(choice, str) and choice != "required":
        return None
    if info.call_format is None:
        formats = ", ".join(each.name for each in CALL_FORMATS)
        text = f"tool_choice: calls can be forced once their format is known: start with --tool-call-parser {formats}"
        raise Problem(400, text, "tool_choice", "invalid_value")
    if body.grammar(info) is not None:
        text = f"{body.grammar_field}: the answer has to be tool calls (tool_choice): give one of them"
        raise Problem(400, text, body.grammar_field, "invalid_value")
    named = None if isinstance(choice, str) else choice.function.name
    callable_tools = [_callable(tool.function) for tool in tools if named in (None, tool.function.name)]
    return info.call_format.rules(callable_tools, named is None and body.parallel_tool_calls)


def _callable(function: Function) -> CallableTool:
    return CallableTool(function.name, function.parameters or {}, bool(function.strict))


def _markers(form: AnswerFormat) -> tuple[str, ...]:
    """They may be special tokens, and have to reach the parsers."""
    calls = form.calls.markers if form.calls is not None else ()
    reasoning = form.reasoning.markers if form.reasoning is not None else ()
    return tuple(dict.fromkeys(calls + reasoning))


def _reasoning(body: ChatRequest, info: ServerInfo, is_forced: bool) -> Reasoning | None:
    """`is_forced`: the answer is calls, whose rules begin with what precedes them."""
    known, budget = info.reasoning_format, body.thinking_tokens
    if known is None and budget is not None:
        formats = ", ".join(each.name for each in REASONING_FORMATS)
        name = body.thinking_field
        text = f"{name}: reasoning can be limited once its format is known: start with --reasoning-parser {formats}"
        raise Problem(400, text, name, "invalid_value")
    if known is None:
        return None
    marks, header = (known.opening, known.closing), "" if is_forced else known.header
    return Reasoning(*marks, known.is_implicit, body.separate_reasoning, budget, known.bridge, header)


def read_tools(tools: list[Json]) -> list[Tool]:
    """Check every tool. Raises: Problem naming the place."""
    read = [_convert(tool, Tool, f"tools[{index}]", "tools") for index, tool in enumerate(tools)]
    known: set[str] = set()
    for index, name in enumerate(tool.function.name for tool in read):
        where = f"tools[{index}].function.name"
        if not is_name(name):
            text = f"{where}: up to 128 letters, digits and any of _ . : / -, got {shown(name)}"
            raise Problem(400, text, "tools", "invalid_value")
        if name in known:
            raise Problem(400, f"{where}: another tool has the name {name!r} too", "tools", "invalid_value")
        known.add(name)
    return read


def read_choice(choice: str | Json, tools: list[Tool]) -> str | NamedTool:
    """Check a `tool_choice`: "none", "auto", "required" or a named tool. Raises: Problem."""
    named: NamedTool | None = None
    if isinstance(choice, dict):
        named = _convert(choice, NamedTool, "tool_choice", "tool_choice")
    if named is None and choice not in ("none", "auto", "required"):
        want = '"none", "auto", "required" or {"type": "function", "function": {"name": ..}}'
        raise Problem(400, f"tool_choice: expected {want}, got {shown(choice)}", "tool_choice", "invalid_value")
    if choice in ("none", "auto"):
        return str(choice)
    if not tools:
        raise Problem(400, "tool_choice: there are no tools to choose from", "tool_choice", "invalid_value")
    if named is None:
        return "required"
    names = [tool.function.name for tool in tools]
    if named.function.name not in names:
        text = (
            f"tool_choice: no tool has the name {shown(named.function.name)}: there are {', '.join(names[:MOST_NAMED])}"
        )
        raise Problem(400, text, "tool_choice", "invalid_value")
    return named


def _convert(value: Json, shape: type[Any], where: str, field: str) -> Any:
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        place = where + path.rstrip("`")
        raise Problem(400, f"{place}: {what[:1].lower()}{what[1:]}", field, "invalid_type") from None
