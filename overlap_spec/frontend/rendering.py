"""Renders conversations: ordinary ones here, what may take long in a process that is killed at its limits.

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

import msgspec

from overlap_spec.errors import RequestError
from overlap_spec.frontend.chat_template import ChatTemplate
from overlap_spec.messages import MAX_TEMPLATE_CHARS, ChatPrompt
from overlap_spec.runtime.isolated import Isolated, TooLarge, TooLong, WorkFailed
from overlap_spec.runtime.turns import Turns

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
