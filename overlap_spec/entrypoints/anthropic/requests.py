"""Bodies of `/v1/messages`, and the chat request that each becomes.

    system             -> a first message of role system       tools        -> tools of type function
    tool_use           -> tool_calls of the assistant          tool_choice  -> auto, required, none or a named function
    tool_result        -> a message of role tool               thinking     -> enable_thinking, thinking_budget
    thinking           -> reasoning_content                    output_config -> response_format, reasoning_effort

`cache_control` and `metadata` are accepted: prefixes are cached without being asked, and no request is stored.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, assert_never

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
from overlap_spec.entrypoints.http.request_body import without_nulls


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer. Nothing is signed here, so no signature is checked."""

    thinking: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call of an earlier answer."""

    id: str
    name: str
    input: Json


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    """What a call returned."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class InputMessage(Struct):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class Tool(Struct):
    """A tool of the client's own. Those that Anthropic runs have another `type`."""

    name: str
    input_schema: Json
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None


class ToolChoice(Struct):
    """Whether and which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(Struct):
    """Reasoning before the answer. `budget_tokens` is exact; `display` omitted is not built."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(Struct, frozen=True):
    """Structured output."""

    type: Literal["json_schema"]
    schema: Json


class OutputConfig(Struct, frozen=True):
    """How the answer is made."""

    effort: str | None = None
    format: OutputFormat | None = None


class MessagesRequest(Struct, kw_only=True):
    """Body of `/v1/messages`. Extensions of chat completions, such as `seed`, are accepted as well."""

    messages: list[InputMessage]
    max_tokens: int
    model: str = "default"
    system: str | list[TextBlock] = ""
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[Tool] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    metadata: Json = {}
    cache_control: Json = {}
    service_tier: Literal["auto", "standard_only"] = "auto"
    speed: Literal["standard"] = "standard"


class CountRequest(Struct, kw_only=True):
    """Body of `/v1/messages/count_tokens`: what of `/v1/messages` is in the prompt."""

    messages: list[InputMessage]
    model: str = "default"
    system: str | list[TextBlock] = ""
    tools: list[Tool] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: Json = {}


NOT_BUILT = {
    "container": "code is not run here",
    "mcp_servers": "the client connects to MCP servers",
    "context_management": "the client edits its own context",
    "inference_geo": "there is one place",
    "diagnostics": "there are none",
}

MESSAGES = Dialect(
    path="/v1/messages",
    id_prefix="msg_",
    own=frozenset(MessagesRequest.__struct_fields__),
    names={
        "stop": "stop_sequences",
        "response_format": "output_config",
        "reasoning_effort": "output_config",
        "thinking_budget": "thinking",
        "continue_final_message": "messages",
        "add_generation_prompt": "messages",
        "parallel_tool_calls": "tool_choice",
        "max_completion_tokens": "max_tokens",
    },
    not_built=NOT_BUILT,
)


def chat_fields(body: MessagesRequest | CountRequest, given: Json) -> Json:
    """The fields of the chat request. `given`: the body as it came, of which the template's arguments are kept."""
    made: Json = {"model": body.model, "messages": _messages(body), **_tools(body), **_thinking(body, given)}
    if body.output_config.effort:
        made["reasoning_effort"] = body.output_config.effort
    if _continues(body.messages):
        made |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesRequest):
        made |= _sampling(body)
    return made


def _sampling(body: MessagesRequest) -> Json:
    if body.max_tokens < 1:
        raise Problem(400, f"max_tokens: must be at least 1, got {body.max_tokens}", "max_tokens", "invalid_value")
    made: Json = {"max_tokens": body.max_tokens}
    if body.stop_sequences:
        made["stop"] = body.stop_sequences
    if body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema, "strict": True}
        made["response_format"] = {"type": "json_schema", "json_schema": schema}
    return made | without_nulls({"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k})


def _tools(body: MessagesRequest | CountRequest) -> Json:
    made: Json = {"tools": [_function(tool) for tool in body.tools]} if body.tools else {}
    choice = body.tool_choice
    if choice is None:
        return made
    if choice.disable_parallel_tool_use:
        made["parallel_tool_calls"] = False
    match choice.type:
        case "auto" | "none":
            made["tool_choice"] = choice.type
        case "any":
            made["tool_choice"] = "required"
        case "tool":
            made["tool_choice"] = choice_of(choice.name)
        case _:
            assert_never(choice.type)
    return made


def _function(tool: Tool) -> Json:
    parameters = {"type": "object", **tool.input_schema}
    optional = without_nulls({"description": tool.description, "strict": tool.strict})
    return function_tool({"name": tool.name, "parameters": parameters, **optional})


def _thinking(body: MessagesRequest | CountRequest, given: Json) -> Json:
    if body.thinking is None:
        return {}
    if body.thinking.type == "disabled" and body.thinking.budget_tokens is not None:
        raise Problem(400, "thinking: budget_tokens bounds nothing where type is disabled", "thinking", "invalid_value")
    kwargs = given.get("chat_template_kwargs", {})
    switch = {"enable_thinking": body.thinking.type != "disabled"}
    made: Json = {"chat_template_kwargs": {**switch, **kwargs} if isinstance(kwargs, dict) else kwargs}
    if body.thinking.budget_tokens is not None and isinstance(body, MessagesRequest):
        made["thinking_budget"] = body.thinking.budget_tokens
    return made


def _messages(body: MessagesRequest | CountRequest) -> list[Json]:
    messages = system_message(joined_text(body.system))
    for index, message in enumerate(body.messages):
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        else:
            messages += _turn(message, f"messages[{index}].content")
    return messages


def _turn(message: InputMessage, where: str) -> Iterator[Json]:
    """A turn of blocks is one message, and one more before it for every result of a tool."""
    texts: list[str] = []
    reasoning = ""
    calls: list[Json] = []
    assert not isinstance(message.content, str)
    for number, block in enumerate(message.content):
        _check_role(block, message.role, f"{where}[{number}]")
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                reasoning += block.thinking
            case ToolUseBlock():
                calls.append(function_call(block.id, block.name, msgspec.json.encode(block.input).decode()))
            case ToolResultBlock():
                yield _result(block)
            case _:
                assert_never(block)
    if texts or reasoning or calls or not message.content:
        more: Json = {"reasoning_content": reasoning} if reasoning else {}
        more |= {"tool_calls": calls} if calls else {}
        yield {"role": message.role, "content": "".join(texts) if texts or not calls else None, **more}


def _check_role(block: Any, role: str, where: str) -> None:
    of_user, of_assistant = isinstance(block, ToolResultBlock), isinstance(block, ToolUseBlock | ThinkingBlock)
    if (of_user and role != "user") or (of_assistant and role != "assistant"):
        kind = block.__struct_config__.tag
        text = f"{where}: {kind} belongs in a message of role {'user' if of_user else 'assistant'}, not {role}"
        raise Problem(400, text, "messages", "invalid_value")


def _result(block: ToolResultBlock) -> Json:
    """Chats have no flag for a failed call: the failure is named in its result."""
    text = joined_text(block.content or "")
    return tool_result(block.tool_use_id, f"Error: {text}" if block.is_error else text)


def _continues(messages: list[InputMessage]) -> bool:
    """A last message of the assistant is the beginning of the answer."""
    return bool(messages) and messages[-1].role == "assistant"
