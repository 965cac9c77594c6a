"""Bodies of `/v1/responses`, and the chat request that each becomes.

    instructions, role developer -> messages of role system    text.format      -> response_format
    function_call                -> tool_calls of the assistant reasoning.effort -> reasoning_effort
    function_call_output         -> a message of role tool      reasoning items  -> reasoning_content

Nothing is stored: `store` is false where it is left out, and what needs an earlier response is refused.
"""

import base64
import binascii
from collections.abc import Iterator
from typing import Annotated, Literal, assert_never

import msgspec
from msgspec import Struct

from overlap_spec.entrypoints.http.api_translation import (
    Dialect,
    choice_of,
    function_call,
    function_tool,
    joined_text,
    system_message,
    tool_result,
)
from overlap_spec.entrypoints.http.body_fields import Json
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_body import convert, without_nulls
from overlap_spec.entrypoints.openai.prompts import read_arguments

ENCRYPTED = "reasoning.encrypted_content"


class InputText(Struct, tag_field="type", tag="input_text"):
    """Text that goes in."""

    text: str


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text of an earlier answer."""

    text: str


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning of an earlier answer."""

    text: str


class MessageItem(Struct, tag_field="type", tag="message"):
    """One turn; the type may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText]


class CallItem(Struct, tag_field="type", tag="function_call"):
    """A call of an earlier answer. `arguments` is JSON."""

    call_id: str
    name: str
    arguments: str


class CallOutputItem(Struct, tag_field="type", tag="function_call_output"):
    """What a call returned."""

    call_id: str
    output: str | list[InputText]


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier answer: its text, or the text as `include` had asked for it."""

    content: list[ReasoningText] = []
    encrypted_content: str = ""


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


class Items(Struct):
    """The conversation."""

    input: list[Item]


class FunctionTool(Struct, omit_defaults=True):
    """A function of the client's own; other types would run on the server."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class NamedFunction(Struct):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class PlainFormat(Struct, frozen=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObject(Struct, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(Struct, frozen=True, tag_field="type", tag="json_schema", omit_defaults=True):
    """JSON of a schema."""

    name: str
    schema: Json
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True):
    """The form of the answer."""

    format: PlainFormat | JsonObject | JsonSchema = PlainFormat()
    verbosity: Literal["medium"] | None = None


class Reasoning(Struct, frozen=True, omit_defaults=True):
    """Reasoning before the answer. It is shown whole: "auto" is all that a summary may be."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class StreamOptions(Struct, frozen=True):
    """Of a stream."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Struct, kw_only=True):
    """Body of `/v1/responses`. Extensions of chat completions, such as `seed`, are accepted as well."""

    input: str | list[Json]
    model: str = "default"
    instructions: str = ""
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float | None = None
    top_p: float | None = None
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    tools: list[FunctionTool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    include: list[Literal["reasoning.encrypted_content"]] = []
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    service_tier: Literal["auto", "default"] = "auto"
    metadata: Json = {}
    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    prompt_cache_retention: str = ""


NOT_BUILT = {
    "store": "nothing is stored here; leave it out, or send false",
    "previous_response_id": "nothing is stored here; send the whole conversation as input",
    "conversation": "nothing is stored here; send the whole conversation as input",
    "background": "nothing is stored here; wait for the answer, or stream it",
    "prompt": "nothing is stored here; send the prompt as instructions and input",
    "context_management": "the client edits its own context",
    "max_tool_calls": "it limits tools that run on the server, and none does",
    "moderation": "answers are not moderated here",
    "top_logprobs": "log-probs are those of /v1/chat/completions",
    "prompt_cache_options": "prefixes are always cached",
}

RESPONSES = Dialect(
    path="/v1/responses",
    id_prefix="resp_",
    own=frozenset(ResponsesRequest.__struct_fields__),
    names={
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text",
        "reasoning_effort": "reasoning",
    },
    not_built=NOT_BUILT,
)


def chat_fields(body: ResponsesRequest) -> Json:
    """The fields of the chat request."""
    given = {
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "reasoning_effort": body.reasoning.effort,
        "response_format": _response_format(body.text),
    }
    return {"model": body.model, "messages": _messages(body), **_tools(body), **without_nulls(given)}


def text_format(text: TextConfig) -> Json:
    """The format as it was sent, with its type."""
    return without_nulls(msgspec.to_builtins(text.format))


def _response_format(text: TextConfig) -> Json | None:
    match text.format:
        case PlainFormat():
            return None
        case JsonObject():
            return {"type": "json_object"}
        case JsonSchema():
            schema = {name: value for name, value in text_format(text).items() if name != "type"}
            return {"type": "json_schema", "json_schema": schema}


def _tools(body: ResponsesRequest) -> Json:
    if not body.tools and body.tool_choice in ("auto", "none"):
        return {}
    made: Json = {"tools": [_function(tool) for tool in body.tools], "tool_choice": _choice(body.tool_choice)}
    return made if body.parallel_tool_calls else {**made, "parallel_tool_calls": False}


def _function(tool: FunctionTool) -> Json:
    function = {name: value for name, value in msgspec.to_builtins(tool).items() if name != "type"}
    return function_tool(function)


def _choice(choice: str | NamedFunction) -> str | Json:
    return choice if isinstance(choice, str) else choice_of(choice.name)


def _messages(body: ResponsesRequest) -> list[Json]:
    system = system_message(body.instructions)
    if isinstance(body.input, str):
        return [*system, {"role": "user", "content": body.input}]
    items = [{"type": "message", **without_nulls(item)} for item in body.input]
    return [*system, *_turns(convert({"input": items}, Items).input)]


def _turns(items: list[Item]) -> Iterator[Json]:
    """Reasoning, text and calls that follow one another are one message of the assistant."""
    turn: Json = {}
    for number, item in enumerate(items):
        if turn and not _belongs(item, turn):
            yield _assistant(turn)
            turn = {}
        match item:
            case ReasoningItem():
                turn.setdefault("reasoning_content", []).append(_reasoning(item, number))
            case CallItem():
                read_arguments(item.arguments, f"input[{number}].arguments", "input")
                turn.setdefault("tool_calls", []).append(function_call(item.call_id, item.name, item.arguments))
            case MessageItem(role="assistant"):
                turn["content"] = joined_text(item.content)
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                yield {"role": role, "content": joined_text(item.content)}
            case CallOutputItem():
                yield tool_result(item.call_id, joined_text(item.output))
            case _:
                assert_never(item)
    if turn:
        yield _assistant(turn)


def _belongs(item: Item, turn: Json) -> bool:
    match item:
        case CallItem():
            return True
        case ReasoningItem():
            return "content" not in turn and "tool_calls" not in turn
        case MessageItem(role="assistant"):
            return "content" not in turn and "tool_calls" not in turn
        case _:
            return False


def _assistant(turn: Json) -> Json:
    if "reasoning_content" in turn:
        turn["reasoning_content"] = "".join(turn["reasoning_content"])
    return {"role": "assistant", "content": None if "tool_calls" in turn else "", **turn}


def _reasoning(item: ReasoningItem, number: int) -> str:
    if item.content:
        return joined_text(item.content)
    try:
        return base64.b64decode(item.encrypted_content, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        text = f"input[{number}].encrypted_content: it is not of this server"
        raise Problem(400, text, "input", "invalid_value") from None
