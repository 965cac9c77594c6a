"""Turns a body's prompt into the engine's prompt messages."""

import contextlib
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import msgspec

from overlap_spec.client.link import id_array
from overlap_spec.entrypoints.http.body_fields import MAX_PROMPTS, Json
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.entrypoints.http.errors import CONTEXT_WORDS, Problem
from overlap_spec.entrypoints.http.request_body import PackedIds
from overlap_spec.messages import TOKEN_BYTES, ChatPrompt, Prompt, TextPrompt, TokenPrompt

REASONING = "reasoning_content"  # the field of earlier reasoning
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


def read_text(text: str, field: str, info: ServerInfo, special: bool = True) -> TextPrompt:
    """`special`: the tokenizer adds its special tokens. Raises: Problem if this server has no tokenizer."""
    need_tokenizer(field, info)
    return TextPrompt(text, special)


def read_ids(ids: Any, field: str, info: ServerInfo, cut: bool = False) -> TokenPrompt:
    """Check and pack token ids. The engine knows the vocabulary; here an id needs to fit 31 bits.

    `cut`: the request keeps only the end of its prompt, which may be longer than the context.
    """
    if isinstance(ids, list | PackedIds) and len(ids) > info.max_model_len and not cut:
        text = f"{field}: the {CONTEXT_WORDS} is {info.max_model_len} tokens, the prompt has {len(ids)}"
        raise Problem(400, text, field, "context_length_exceeded")
    packed = ids.data if isinstance(ids, PackedIds) else _packed(ids, field)
    if not packed:
        raise Problem(400, f"{field}: a prompt must have at least one token", field, "invalid_value")
    return TokenPrompt(packed)


def read_prompts(
    value: Any, field: str, info: ServerInfo, special: bool = True, cut: bool = False
) -> tuple[list[Prompt], bool]:
    """Read text or token ids, one or many. Returns the prompts, and whether they came as a batch.

    `special`, `cut`: as of `read_text` and `read_ids`.
    """
    if isinstance(value, str):
        return [read_text(value, field, info, special)], False
    if isinstance(value, PackedIds):
        return [read_ids(value, field, info, cut)], False
    if not isinstance(value, list) or not value:
        raise _bad(field)
    check_batch(value, field)
    if all(isinstance(item, str) for item in value):
        return [read_text(item, field, info, special) for item in value], True
    if all(isinstance(item, list | PackedIds) for item in value):
        return [read_ids(item, field, info, cut) for item in value], True
    return [read_ids(value, field, info, cut)], False


class TemplateFields(Protocol):
    """The fields of a body that tell what to make of a conversation."""

    @property
    def chat_template(self) -> str: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool: ...


def chat_prompt(body: TemplateFields, messages: list[Json], tools: list[Json], template_kwargs: Json) -> ChatPrompt:
    """Raises: Problem if an answer is to be opened and the final message continued."""
    continues = body.continue_final_message
    if continues and body.add_generation_prompt:
        text = "continue_final_message and add_generation_prompt exclude one another: leave one of them out"
        raise Problem(400, text, "continue_final_message", "invalid_value")
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return ChatPrompt(messages, tools, template_kwargs, opens, continues, body.chat_template)


def check_chat(prompt: ChatPrompt, info: ServerInfo) -> ChatPrompt:
    """Check a conversation and put it into the form that templates read; the chat template checks the roles."""
    messages = prompt.messages
    need_tokenizer("messages", info)
    if not messages:
        raise Problem(400, "messages: at least one message is needed", "messages", "invalid_value")
    if len(messages) > info.max_model_len:
        text = f"messages: the {CONTEXT_WORDS} is {info.max_model_len} tokens, there are {len(messages)} messages"
        raise Problem(400, text, "messages", "context_length_exceeded")
    flat = [_read_message(message, index) for index, message in enumerate(messages)]
    if (known := info.reasoning_format) is not None and known.history != REASONING:
        flat = [_with_history(message, known.history) for message in flat]
    prompt = msgspec.structs.replace(prompt, messages=flat, tools=prompt.tools or None)
    try:
        msgspec.msgpack.encode(prompt)
    except (OverflowError, ValueError, RecursionError) as error:  # an integer beyond 64 bits, or nested too deep
        raise Problem(400, f"messages: {error}", "messages", "invalid_value") from None
    return prompt


def check_no_text(ids: Any, field: str) -> None:
    """Raises: Problem for text, where only token ids are taken."""
    if isinstance(ids, str) or (isinstance(ids, list) and ids and isinstance(ids[0], str)):
        text = f"{field}: expected a list of token ids, or a list of such lists, got text"
        raise Problem(400, text, field, "invalid_type")


def check_batch(items: list[Any], field: str) -> None:
    """Raises: Problem if this is a batch, and too large a one."""
    if len(items) > MAX_PROMPTS and not isinstance(items[0], int):
        raise Problem(400, f"{field}: at most {MAX_PROMPTS} prompts, got {len(items)}", field, "invalid_value")


def need_tokenizer(field: str, info: ServerInfo) -> None:
    """Refuse text where there is no tokenizer."""
    if info.skip_tokenizer_init:
        raise Problem(400, f"{field}: this server has no tokenizer (--skip-tokenizer-init)", field, "invalid_value")


def parse_ids(ids: Any, field: str) -> Sequence[int]:
    """Raises: Problem for what is no list of token ids."""
    if isinstance(ids, PackedIds):
        return id_array(ids.data)
    try:
        return msgspec.convert(ids, list[TokenId])
    except msgspec.ValidationError as error:
        raise Problem(400, f"{field}: not a list of token ids: {error}", field, "invalid_type") from None


def _packed(ids: Any, field: str) -> bytes:
    """Token ids as messages carry them. Packing them checks their range faster than `parse_ids` does.

    Raises: Problem for what is no list of token ids.
    """
    with contextlib.suppress(msgspec.ValidationError, struct.error):
        integers = msgspec.convert(ids, list[int])
        packed = struct.pack(f"<{len(integers)}i", *integers)
        # The sign is in a token's last byte.
        if packed[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():
            return packed
    parse_ids(ids, field)  # its error names what is wrong, and where
    raise AssertionError(f"{field}: these are token ids, but cannot be packed")


def _bad(field: str) -> Problem:
    text = f"{field}: expected text, a list of texts, a list of token ids or a list of lists of token ids, not empty"
    return Problem(400, text, field, "invalid_type")


def _read_message(message: Json, index: int) -> Json:
    """Content parts become one string: templates expect text."""
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise Problem(400, f"{where}.role: missing, or not a string", "messages", "invalid_value")
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        content = ""  # clients leave it out of a message that only calls tools
    if isinstance(content, list):
        content = "".join(_read_part(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    elif not isinstance(content, str):
        what = "missing" if content is None else "expected text or a list of parts"
        raise Problem(400, f"{where}.content: {what}", "messages", "invalid_type")
    calls = message.get("tool_calls")
    if calls is None:
        return {**{name: each for name, each in message.items() if name != "tool_calls"}, "content": content}
    return {**message, "content": content, "tool_calls": _read_calls(calls, f"{where}.tool_calls")}


def _with_history(message: Json, field: str) -> Json:
    """The message with its reasoning where the template looks for it; beside calls it takes content or reasoning."""
    takes_both = not (message["content"] and message.get("tool_calls"))
    if isinstance(message.get(REASONING), str) and field not in message and takes_both:
        return {**message, field: message[REASONING]}
    return message


def _read_calls(calls: Any, where: str) -> list[Json]:
    """Tool calls with their arguments as objects, which templates write as JSON themselves."""
    if not isinstance(calls, list):
        raise Problem(400, f"{where}: expected a list of calls", "messages", "invalid_type")
    return [_read_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _read_call(call: Any, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Problem(400, f"{where}.function: expected an object with a name", "messages", "invalid_type")
    arguments = read_arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def read_arguments(arguments: Any, where: str, field: str = "messages") -> Json:
    """Those of a call, which are JSON, an object, or left out. Raises: Problem of a field, at `where`."""
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise Problem(400, f"{where}: not valid JSON: {error}", field, "invalid_value") from None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise Problem(400, f"{where}: expected a JSON object", field, "invalid_type")
    return arguments


def _read_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise Problem(400, f"{where}: only parts of type text are supported", "messages", "unsupported_parameter")
    return text
