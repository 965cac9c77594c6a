"""The formats of tool calls and of reasoning: their names, which are SGLang's and vLLM's, and how templates tell them.

`--tool-call-parser` and `--reasoning-parser` take a name; `auto` looks for the formats' markers in the chat template.

**Hermes** 2 and 3, Qwen 2.5 and 3, SmolLM3: `<tool_call>{"name": "f", "arguments": {..}}</tool_call>`, one each.

**Llama** 3.1 and later: `{"name": "f", "parameters": {..}}`, several apart by `;`. An answer that begins with an object
which names a tool of the request is a call; so is what follows `<|python_tag|>` anywhere.

**Mistral**: `json_call.py`. **DeepSeek** and **Kimi K2**: `sections.py`. **gpt-oss**: `harmony.py`.
**GLM**: `tagged.py`. **Qwen3-Coder**: `xml_calls.py`. **Gemma 4**: `gemma4.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overlap_spec.config import ServerSettings
from overlap_spec.entrypoints.parsers import gemma4, harmony, json_call, pythonic, sections, tagged, xml_calls
from overlap_spec.entrypoints.parsers.call_rules import (
    CallableTool,
    hermes_rules,
    is_name,
    llama3_json_rules,
    mistral_rules,
    new_id,
    pythonic_rules,
    short_id,
)
from overlap_spec.entrypoints.parsers.json_call import SPACE, JsonCall, Status
from overlap_spec.entrypoints.parsers.pieces import (
    MOST_SPACE,
    CallParser,
    CallWriter,
    Markers,
    ReasoningReader,
    ToolNames,
)
from overlap_spec.messages import Grammar

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


AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls.

    `markers`: they stay in the text for the parser, also where they are special tokens of a tokenizer.
    """

    name: str
    aliases: tuple[str, ...]
    parser: Callable[[CallWriter, ToolNames], CallParser]
    is_in: Callable[[str], bool]  # whether a chat template is of such a family
    markers: tuple[str, ...]
    rules: Callable[[Sequence[CallableTool], bool], Grammar]  # of an answer that calls one tool, or several
    new_id: Callable[[], str] = new_id


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks reasoning.

    `is_implicit`: answers may begin with it without the opening marker. `breaks`: markers of
    the answer that end the reasoning too. `bridge`, `header`: what the model writes between the reasoning and its next
    message, and before the text of its answer. `reader`: separates reasoning, where that is more than two markers;
    `shown`: the special tokens that it reads. `history`: where a chat template finds earlier reasoning.
    """

    name: str
    aliases: tuple[str, ...]
    is_in: Callable[[str], bool]
    is_implicit: bool = False
    opening: str = "<think>"
    closing: str = "</think>"
    breaks: tuple[str, ...] = ()
    bridge: str = ""
    header: str = ""
    reader: Callable[[bool], ReasoningReader] | None = None
    shown: tuple[str, ...] = ()
    history: str = "reasoning_content"

    @property
    def markers(self) -> tuple[str, ...]:
        """They may be special tokens, and stay in the text for the reader."""
        return self.shown or (self.opening, self.closing)


def _is_llama3(template: str) -> bool:
    return "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template)


def _is_hermes(template: str) -> bool:
    """Other families put something else than JSON between the same tags."""
    return "<tool_call>" in template and not any(other in template for other in ("<function=", "<arg_key>"))


def _is_deepseek(template: str) -> bool:
    return "</think>" in template and f"<{sections.BAR}Assistant" in template


def _is_deepseek_v31(template: str) -> bool:
    """Its requests say whether it reasons, and its prompts end with one of the markers."""
    return _is_deepseek(template) and "thinking" in template


def _is_kimi(template: str) -> bool:
    return "</think>" in template and sections.KIMI.begin in template


def _is_glm(template: str) -> bool:
    return "</think>" in template and tagged.KEY in template


CALL_FORMATS = (  # in the order in which a template is looked at
    CallFormat(
        "mistral",
        (),
        json_call.MistralParser,
        lambda template: json_call.CALLS in template,
        (json_call.CALLS, json_call.ARGS, json_call.CALL_ID),
        mistral_rules,
        short_id,
    ),
    CallFormat(
        "pythonic",
        ("llama4_pythonic",),
        pythonic.PythonicParser,
        lambda template: pythonic.START in template,
        (pythonic.START, pythonic.END),
        pythonic_rules,
    ),
    CallFormat(
        "deepseekv3",
        ("deepseek_v3",),
        sections.deepseek_parser,
        sections.is_deepseek_v3,
        sections.DEEPSEEK.all,
        sections.deepseek_v3_rules,
    ),
    CallFormat(
        "deepseekv31",
        ("deepseek_v31",),
        sections.deepseek_parser,
        sections.is_deepseek_v31,
        sections.DEEPSEEK.all,
        sections.deepseek_v31_rules,
    ),
    CallFormat(
        "kimi_k2",
        (),
        sections.kimi_parser,
        lambda template: sections.KIMI.begin in template,
        sections.KIMI.all,
        sections.kimi_rules,
    ),
    CallFormat(
        "glm45",
        ("glm", "glm47"),
        tagged.TaggedParser,
        lambda template: tagged.KEY in template,
        tagged.MARKERS,
        tagged.tagged_rules,
    ),
    CallFormat(
        "gpt-oss",
        ("openai",),
        harmony.ChannelCalls,
        harmony.is_harmony,
        harmony.MARKERS,
        harmony.harmony_rules,
    ),
    CallFormat(
        "qwen3_coder",
        ("qwen3_xml", "mimo", "step3p5"),
        xml_calls.XmlParser,
        lambda template: xml_calls.FUNCTION in template and xml_calls.PARAMETER in template,
        xml_calls.MARKERS,
        xml_calls.xml_rules,
    ),
    CallFormat(
        "gemma4",
        (),
        gemma4.Gemma4Parser,
        lambda template: gemma4.OPEN in template,
        gemma4.MARKERS,
        gemma4.gemma4_rules,
    ),
    CallFormat("hermes", ("qwen25", "qwen"), HermesParser, _is_hermes, (OPEN, CLOSE), hermes_rules),
    CallFormat("llama3_json", ("llama3",), Llama3JsonParser, _is_llama3, (TAG,), llama3_json_rules),
)
REASONING_FORMATS = (
    ReasoningFormat(
        "gpt-oss",
        ("openai_gptoss",),
        harmony.is_harmony,
        opening=harmony.OPENING,
        closing=harmony.END,
        bridge=harmony.BRIDGE,
        header=harmony.HEADER,
        reader=harmony.ChannelReader,
        shown=harmony.MARKERS,
        history="thinking",
    ),
    ReasoningFormat(
        "deepseek-r1",
        ("deepseek_r1", "step3p5"),
        lambda template: _is_deepseek(template) and not _is_deepseek_v31(template),
        is_implicit=True,
    ),
    ReasoningFormat("kimi_k2", (), _is_kimi, breaks=(sections.KIMI.begin,)),
    ReasoningFormat("deepseek-v3", ("deepseek_v3",), _is_deepseek_v31),
    ReasoningFormat("glm45", (), _is_glm, breaks=(tagged.OPEN,)),
    ReasoningFormat(
        "gemma4",
        (),
        lambda template: all(channel in template for channel in gemma4.CHANNELS),
        opening=gemma4.THOUGHT,
        closing=gemma4.THOUGHT_END,
        breaks=(gemma4.OPEN,),
        shown=gemma4.CHANNELS,
    ),
    ReasoningFormat("qwen3", ("qwen3-thinking", "mimo"), lambda template: "</think>" in template),
)


def call_format(name: str, template: str) -> CallFormat | None:
    """The format of this name, or of this template if the name is auto; None if there is none."""
    return next((each for each in CALL_FORMATS if _fits(name, template, each)), None)


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """As `call_format`."""
    return next((each for each in REASONING_FORMATS if _fits(name, template, each)), None)


def format_names(server: ServerSettings, template: str) -> tuple[str, str]:
    """The formats in which tool calls and reasoning are read behind this template; "" where they are not."""
    calls, reasoning = (
        call_format(server.tool_call_parser, template),
        reasoning_format(server.reasoning_parser, template),
    )
    return calls.name if calls else "", reasoning.name if reasoning else ""


def _fits(name: str, template: str, known: CallFormat | ReasoningFormat) -> bool:
    return known.is_in(template) if name == AUTO else name in (known.name, *known.aliases)
