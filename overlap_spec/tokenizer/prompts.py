"""Turns the three kinds of prompt into token ids, long ones in a thread."""

import asyncio
from typing import Any, assert_never

from overlap_spec.client.link import unpack_ids
from overlap_spec.errors import RequestError
from overlap_spec.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from overlap_spec.tokenizer.codec import Codec
from overlap_spec.tokenizer.request_checks import check_ids

UNTRUSTED = (
    "chat_template: a template of the request's own is run only by an engine that was started with"
    " --trust-request-chat-template"
)
LONG = 2_000  # characters or ids: about a millisecond of work


class PromptReader:
    """Reads prompts with one codec. The event loop waits at most for a short one."""

    def __init__(self, codec: Codec, trusts_templates: bool) -> None:
        self._codec = codec
        self._trusts_templates = trusts_templates

    async def encode(self, prompt: Prompt, add_special_tokens: bool, most_tokens: int | None) -> list[int]:
        """Token ids of a prompt. A text that cannot fit into `most_tokens` is refused before it is encoded.

        Raises: RequestError. Cancellation: the thread finishes, its answer is dropped.
        """
        if is_long(prompt):
            return await asyncio.to_thread(self._encode, prompt, add_special_tokens, most_tokens)
        return self._encode(prompt, add_special_tokens, most_tokens)

    async def decode(self, packed: bytes, skip_special_tokens: bool, vocab_size: int) -> str:
        """Text of packed ids. Raises: RequestError. Cancellation: as `encode`."""
        ids = _unpack("tokens", packed)
        check_ids("tokens", ids, vocab_size)
        if len(ids) > LONG:
            return await asyncio.to_thread(self._codec.decode, ids, skip_special_tokens)
        return self._codec.decode(ids, skip_special_tokens)

    def _encode(self, prompt: Prompt, add_special_tokens: bool, most_tokens: int | None) -> list[int]:
        match prompt:
            case TokenPrompt():
                return _unpack("prompt", prompt.ids)
            case TextPrompt():
                text = prompt.text
                add_special_tokens = add_special_tokens and prompt.add_special_tokens
            case ChatPrompt():
                if prompt.template and not self._trusts_templates:
                    raise RequestError("chat_template", UNTRUSTED)
                text, add_special_tokens = self._codec.render(prompt), False  # the template writes its own
            case _:
                assert_never(prompt)
        if most_tokens is not None:
            _check_size(text, most_tokens, self._codec.longest_token)
        return self._codec.encode(text, add_special_tokens)


def is_long(prompt: Prompt) -> bool:
    """True if encoding would keep the event loop."""
    match prompt:
        case TokenPrompt():
            return False
        case TextPrompt():
            return len(prompt.text) > LONG
        case ChatPrompt() if prompt.template:
            return True
        case ChatPrompt():
            try:
                return sum(map(_weight, prompt.messages)) + len(str(prompt.tools)) > LONG
            except RecursionError:  # nested this deep: encode it in the thread
                return True
        case _:
            assert_never(prompt)


def _weight(message: dict[str, Any]) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) else len(str(content))


def _unpack(field: str, packed: bytes) -> list[int]:
    try:
        return unpack_ids(packed)
    except ValueError as error:
        raise RequestError(field, f"{field}: {len(packed)} bytes are no whole number of int32 token ids") from error


def _check_size(text: str, most_tokens: int, longest_token: int) -> None:
    if longest_token and len(text) > most_tokens * longest_token:
        raise RequestError(
            "prompt",
            f"the prompt has {len(text)} characters: more than the maximum context length of {most_tokens} tokens"
            " can hold",
        )
