"""Renders chat messages with the template that comes with a model.

The environment is what templates on the Hugging Face hub are written for: a sandboxed Jinja with trimmed
blocks, `break` and `continue`, `raise_exception`, `strftime_now`, a plain `tojson`, `{% generation %}`.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from overlap_spec.errors import RequestError
from overlap_spec.messages import ChatPrompt

END_MARK = "\N{OBJECT REPLACEMENT CHARACTER}final message ends\N{OBJECT REPLACEMENT CHARACTER}"
RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
PROBE = "a probe, to see whether a list is read as text"

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

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt as text, special tokens included. Raises: RequestError saying what the template refuses."""
        if clash := RESERVED & prompt.template_kwargs.keys():
            raise RequestError("chat_template_kwargs", f"{min(clash)} cannot be set through chat_template_kwargs")
        if not prompt.messages:
            raise RequestError("messages", "messages must not be empty")
        messages = [self._prepared(message) for message in prompt.messages]
        if prompt.continue_final_message:
            messages[-1] = {**messages[-1], "content": _continued(messages[-1].get("content"))}
        try:
            text = self._render(messages, prompt)
        except (RequestError, MemoryError):
            raise
        except jinja2.TemplateError as error:
            raise RequestError("messages", f"the chat template refuses these messages: {error.message}") from error
        except Exception as error:  # a template may index and add whatever the client sent
            raise RequestError("messages", f"the chat template cannot render these messages: {error}") from error
        return _cut_after(text) if prompt.continue_final_message else text

    def _render(self, messages: list[ChatMessage], prompt: ChatPrompt) -> str:
        names = {"documents": None, **self.special_tokens, **prompt.template_kwargs}
        opens = prompt.add_generation_prompt and not prompt.continue_final_message
        return self._template.render(messages=messages, tools=prompt.tools, add_generation_prompt=opens, **names)

    def _prepared(self, message: ChatMessage) -> ChatMessage:
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
