"""Renders chat messages with a template: the model's, or one of the request's own.

The environment is what templates on the Hugging Face hub are written for: a sandboxed Jinja with trimmed
blocks, `break` and `continue`, `raise_exception`, `strftime_now`, a plain `tojson`, `{% generation %}`.

Ordinary conversations are rendered here, what may take long in a process that is killed at its limits:

    the model's template, an ordinary conversation    here: some ms at most
    the model's template, many messages or values     MODEL_S of CPU time, in a process
    a template of the request's own, with its Python  OWN_S of CPU time, in a process, compilation included

Jinja's sandbox keeps a template from Python's internals, but not from filters, formats and functions that take any time
and memory, and holds Python's lock meanwhile. Clients take turns.
"""

import base64
import json
import zlib
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from overlap_spec.errors import RequestError
from overlap_spec.messages import MAX_TEMPLATE_CHARS, ChatPrompt
from overlap_spec.runtime.isolated import Isolated, TooLarge, TooLong, WorkFailed
from overlap_spec.runtime.turns import Turns

END_MARK = "\N{OBJECT REPLACEMENT CHARACTER}final message ends\N{OBJECT REPLACEMENT CHARACTER}"
RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
PROBE = "a probe, to see whether a list is read as text"

CALLED = {"probe": PROBE}  # arguments of a call: templates write JSON of them, or add their text to other text

ChatMessage = dict[str, Any]


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template and the names of the model's special tokens. Nothing bounds what it takes."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._template = _environment().from_string(source)
        self.special_tokens = dict(special_tokens)
        self._reads_parts = self._can_read_parts()
        self._wants_text = not self._can_read_calls(CALLED) and self._can_read_calls(json.dumps(CALLED))

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt as text, special tokens included. Raises: RequestError saying what the template refuses."""
        if clash := RESERVED & prompt.template_kwargs.keys():
            raise RequestError("chat_template_kwargs", f"{min(clash)} cannot be set through chat_template_kwargs")
        if not prompt.messages:
            raise RequestError("messages", "messages must not be empty")
        try:
            messages = [self._prepared(message) for message in prompt.messages]
            if prompt.continue_final_message:
                messages[-1] = {**messages[-1], "content": _continued(messages[-1].get("content"))}
            text = self._render(messages, prompt)
        except (RequestError, MemoryError):
            raise
        except jinja2.TemplateError as error:
            raise RequestError("messages", f"the chat template refuses these messages: `{error.message}`") from error
        except Exception as error:  # a template may index and add whatever the client sent
            raise RequestError("messages", f"the chat template cannot render these messages: `{error}`") from error
        return _cut_after(text) if prompt.continue_final_message else text

    def _render(self, messages: list[ChatMessage], prompt: ChatPrompt) -> str:
        names = {"documents": None, **self.special_tokens, **prompt.template_kwargs}
        opens = prompt.add_generation_prompt and not prompt.continue_final_message
        return self._template.render(messages=messages, tools=prompt.tools, add_generation_prompt=opens, **names)

    def _prepared(self, message: ChatMessage) -> ChatMessage:
        if self._wants_text and isinstance(message.get("tool_calls"), list):
            message = {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        content = message.get("content")
        if not isinstance(content, list) or self._reads_parts:
            return message
        return {**message, "content": "\n".join(_text_of(part) for part in content)}

    def _can_read_parts(self) -> bool:
        """True if the template itself turns a list of text parts into their text."""
        parts = [{"type": "text", "text": PROBE}]
        try:
            text = self._render([{"role": "user", "content": parts}], ChatPrompt([]))
        except Exception:  # an error of any kind means that it cannot read parts
            return False
        return PROBE in text and str(parts) not in text and json.dumps(parts) not in text

    def _can_read_calls(self, arguments: object) -> bool:
        """Whether the template writes such arguments of a call as JSON."""
        call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": arguments}}
        asked: ChatMessage = {"role": "user", "content": "a"}
        messages = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            text = self._render(messages, ChatPrompt([], add_generation_prompt=False))
        except Exception:  # as above
            return False
        return PROBE in text and str(CALLED) not in text


class NoChatTemplate:
    """The template of a model that has none: it refuses every chat."""

    source = ""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        self.special_tokens = dict(special_tokens)

    def render(self, prompt: ChatPrompt) -> str:
        """Raises: RequestError, always."""
        raise RequestError("messages", "this model has no chat template: send a text prompt or token ids")


def _continued(content: object) -> str:
    """The final message with a mark at its end, after which the rendered text is cut off."""
    if not isinstance(content, str) or not content:
        text = "continue_final_message: the last message needs content to go on from"
        raise RequestError("continue_final_message", text)
    return content + END_MARK


def _cut_after(text: str) -> str:
    end = text.rfind(END_MARK)
    if end < 0:
        raise RequestError("continue_final_message", "continue_final_message: the template leaves the message out")
    return text[:end]


def _with_text(call: object) -> object:
    """A call whose arguments are JSON as text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": _tojson(function["arguments"])}}


def _text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RequestError("messages", f"only text parts are supported in message content, got {kind!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model has seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


RENDERER = f"{__name__}:renderer"
OWN_S = 1.0
MODEL_S = 5.0
MOST_BYTES = 96 << 20  # of memory that a rendering may take
AT_ONCE = 2
MOST_MESSAGES = 128  # that are rendered here: up to 0.1 ms each, where a template looks at what was said
MOST_VALUES = 4_000  # the same, in messages and tools together: up to 3 us each
MOST_CHARS = 1 << 20  # the same: up to 10 ns each
FEW_BYTES = 2_000  # no conversation of so many takes long
MOST_ARGUMENT = 100_000  # bytes of a process's argument: Linux takes 128 KiB


class Failed(msgspec.Struct, array_like=True):
    """Why a conversation is refused, as a `RequestError` tells it."""

    field: str
    text: str


class Rendering:
    """The renderings of one engine, with its model's template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        argument = _packed([source, dict(special_tokens)])
        self._source = ""  # of the model's template, where the process does not have it
        if len(argument) > MOST_ARGUMENT:
            self._source, argument = source, _packed(["", dict(special_tokens)])
        self._isolated = Isolated(RENDERER, argument, most_bytes=MOST_BYTES)
        self._turns = Turns[str](AT_ONCE)

    async def render(self, prompt: ChatPrompt, owner: str) -> str:
        """The prompt as text, special tokens included. `owner`: whose turn it takes.

        Raises: RequestError saying what the template refuses, or that it takes too much.
        Cancellation: the process is killed.
        """
        field, limit_s = ("chat_template", OWN_S) if prompt.template else ("messages", MODEL_S)
        if len(prompt.template) > MAX_TEMPLATE_CHARS:
            text = f"chat_template: it has {len(prompt.template)} characters, of at most {MAX_TEMPLATE_CHARS}"
            raise RequestError(field, text)
        try:
            payload = msgspec.msgpack.encode((prompt.template or self._source, prompt))
        except (RecursionError, OverflowError, ValueError, TypeError) as error:
            raise RequestError("messages", f"messages: they cannot be passed on: {error}") from error
        try:
            async with self._turns.turn(owner):
                answer = await self._isolated.run(payload, limit_s)
        except TooLong:
            raise RequestError(field, f"{field}: rendering took more than {limit_s:g} s") from None
        except TooLarge:
            raise RequestError(field, f"{field}: rendering took more than {MOST_BYTES >> 20} MiB") from None
        except WorkFailed as error:
            raise RequestError(field, f"{field}: rendering failed: {error}") from None
        found = msgspec.msgpack.decode(answer, type=str | Failed)
        if isinstance(found, Failed):
            raise RequestError(found.field, found.text)
        return found

    def close(self) -> None:
        """End the process."""
        self._isolated.close()


def takes_long(prompt: ChatPrompt) -> bool:
    """Whether to render a conversation in a process: it has a template of its own, or is large."""
    if prompt.template or len(prompt.messages) > MOST_MESSAGES:
        return True
    try:
        encoded = msgspec.json.encode((prompt.messages, prompt.tools, prompt.template_kwargs))
    except (RecursionError, OverflowError, ValueError, TypeError):
        return True
    if len(encoded) <= FEW_BYTES:
        return False
    # Values of lists and objects are separated by commas; those in a text count too.
    return len(encoded) > MOST_CHARS or encoded.count(b",") + encoded.count(b"[") > MOST_VALUES


def renderer(argument: str) -> Callable[[bytes], bytes]:
    """Compile the model's template. The function takes an encoded source, or "" for that, and a prompt."""
    source, special_tokens = json.loads(zlib.decompress(base64.b85decode(argument)))
    model = ChatTemplate(source, special_tokens) if source else None

    def render(payload: bytes) -> bytes:
        source, prompt = msgspec.msgpack.decode(payload, type=tuple[str, ChatPrompt])
        try:
            template = _compiled(source, special_tokens) if source else model
            if template is None:
                raise RequestError("messages", "this model has no chat template: send a text prompt or token ids")
            return msgspec.msgpack.encode(template.render(prompt))
        except RequestError as error:
            return msgspec.msgpack.encode(Failed(error.field, str(error)))

    return render


def _compiled(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """Raises: RequestError if a template does not compile."""
    try:
        return ChatTemplate(source, special_tokens)
    except MemoryError:
        raise
    except Exception as error:  # of Jinja's parser, or of Python's compiler
        raise RequestError("chat_template", f"chat_template: it does not compile: {error}") from error


def _packed(value: object) -> str:
    return base64.b85encode(zlib.compress(json.dumps(value).encode())).decode()
