"""A request on its way in: its prompt is read, what it asks for is settled, and its output is opened.

    prompt --> ids --> checks, length and seed --> hooks' `prepare` --> stops --> ReadRequest

A prompt that requests of a group share is read once, and its ids are kept once, for as long as the prompt itself is.

**Prompts** of three kinds become token ids, long ones in a thread. A text that cannot fit is
refused before it is encoded or waits. A long one is encoded in pieces, if its tokenizer allows that (`codec.py`),
several at once where there are threads for it: it takes little memory, and ends with its request. What a
conversation's turn before had of them is not encoded again.
"""

import asyncio
import weakref
from array import array
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

import msgspec

from overlap_spec.client.link import id_array, pack_ids
from overlap_spec.config import MIB
from overlap_spec.errors import RequestError
from overlap_spec.frontend.chat_template import Rendering, takes_long
from overlap_spec.frontend.codec import Codec, KnownPieces
from overlap_spec.frontend.encode_pool import LONG, MANY_BYTES, VERY_LONG, EncodeThreads, UncutTexts
from overlap_spec.frontend.hooks import Hooks, Preparing
from overlap_spec.frontend.open_requests import OpenRequest
from overlap_spec.frontend.overload import ByteBudget
from overlap_spec.frontend.request_checks import RequestChecks, check_ids, truncated, with_packed_ids
from overlap_spec.frontend.stop_strings import StopCompiler, Stops
from overlap_spec.messages import (
    ChatPrompt,
    Continued,
    EngineLimits,
    Generate,
    Prompt,
    Resumed,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from overlap_spec.runtime.heap import GivingBack
from overlap_spec.runtime.turns import Turns

T = TypeVar("T")

UNTRUSTED = (
    "chat_template: a template of the request's own is run only by an engine that was started with"
    " --trust-request-chat-template"
)
MOST_TEXT = 1 << 20  # characters of a text that need not fit: to count its tokens, or to keep its end
MOST_PER_TOKEN = 16  # the same, of each token of the context, if that is more
MOST_OF_OWNER = 32 * MIB  # characters of texts that wait or are encoded
MOST_IN_ALL = 128 * MIB
BYTES_OF_MESSAGE = 16  # that the rendering of an empty one costs
MOST_IDS = 1 << 18  # that are decoded together, or as many as the context has if that is more
GIVE_BACK = 1 << 18  # characters of a text whose memory is given back


class PromptReader:
    """Reads prompts with one codec. The event loop waits at most for a short one."""

    def __init__(self, codec: Codec, trusts_templates: bool) -> None:
        self.max_len = 0  # tokens of the context; 0: not known yet
        self._codec = codec
        self._trusts_templates = trusts_templates
        self._threads = EncodeThreads(ByteBudget(MOST_OF_OWNER, MOST_IN_ALL))
        self._cutting = Turns[str](1)
        self._uncut = UncutTexts(codec.directory)
        self._rendering = Rendering(codec.chat_template, codec.special_tokens)
        self._known = KnownPieces()
        self._giving_back = GivingBack()

    async def encode(
        self, prompt: Prompt, add_special_tokens: bool, must_fit: bool, client: int = 0, owner: str = ""
    ) -> "array[int]":
        """Token ids of a prompt. `must_fit`: into the context, as a whole. `owner`: whose turn it takes, if
        it is not the client's.

        Raises: RequestError; Overloaded if too much of this owner, or of all, waits to be encoded.
        Cancellation: what has not begun is dropped; else at most a piece is worked on.
        """
        if isinstance(prompt, TokenPrompt):
            return _unpack("prompt", prompt.ids)
        size = size_of(prompt)
        if isinstance(prompt, TextPrompt):
            self._check_size("prompt", prompt.text, must_fit)
        if size <= LONG:
            text, special = self._text_of(prompt, add_special_tokens, must_fit)
            return array("i", self._codec.encode(text, special))
        owner = owner or f"link {client}"
        with self._threads.holding(owner, size):
            read = partial(self._text_of, prompt, add_special_tokens, must_fit)
            if isinstance(prompt, TextPrompt):
                text, special = read()
            elif takes_long(prompt):
                text, special = await self._render(prompt, must_fit, owner), False
            else:
                text, special = await self._threads.run(owner, size, read)
            return await self._encode_long(prompt, text, special, owner)

    async def decode(self, packed: bytes, skip_special_tokens: bool, vocab_size: int, owner: str) -> str:
        """Text of packed ids. Raises: RequestError. Cancellation: as `encode`."""
        ids = _unpack("tokens", packed)
        most = max(MOST_IDS, self.max_len)
        if len(ids) > most:
            raise RequestError("tokens", f"tokens: at most {most} token ids are decoded together, got {len(ids)}")
        check_ids("tokens", ids, vocab_size)
        if len(ids) > LONG:
            return await self._threads.run(owner, len(ids), partial(self._codec.decode, ids, skip_special_tokens))
        return self._codec.decode(ids, skip_special_tokens)

    async def run_apart(self, owner: str, num_chars: int, work: Callable[[], T]) -> T:
        """Do other work on so many characters in a thread. Cancellation: as `EncodeThreads.run`."""
        return await self._threads.run(owner, num_chars, work)

    def close(self) -> None:
        """Drop what waits."""
        self._giving_back.close()
        self._threads.close()
        self._uncut.close()
        self._rendering.close()

    async def _encode_long(
        self, prompt: TextPrompt | ChatPrompt, text: str, add_special_tokens: bool, owner: str
    ) -> "array[int]":
        whole = _Whole("prompt" if isinstance(prompt, TextPrompt) else "messages", len(text), owner)
        pieces, ids = self._codec.pieces(text), array("i")
        try:
            while batch := await self._next_pieces(pieces, whole):
                for encoded in await self._encode_pieces([piece for piece in batch if piece], whole):
                    ids += encoded
        finally:
            if len(text) > GIVE_BACK:
                self._giving_back.soon()
        return self._codec.with_special_tokens(ids) if add_special_tokens else ids

    async def _next_pieces(self, pieces: Iterator[str], whole: "_Whole") -> list[str]:
        """A few pieces, in a turn: however many texts are cut, the loop searches one, and then does other work."""
        async with self._cutting.turn(whole.owner):
            batch = list(islice(pieces, self._threads.num_threads(whole.num_chars)))
            await asyncio.sleep(0)
        return batch

    async def _encode_pieces(self, pieces: list[str], whole: "_Whole") -> "list[array[int]]":
        """Ids of a few pieces of a text, those that are new encoded side by side."""
        known = [self._known.get(piece) for piece in pieces]
        new = [piece for piece, ids in zip(pieces, known, strict=True) if ids is None]
        encoded = iter(await asyncio.gather(*[self._encode_piece(each, whole) for each in new]))
        found = [next(encoded) if ids is None else ids for ids in known]
        for piece, ids in zip(pieces, found, strict=True):
            self._known.put(piece, ids)
        return found

    async def _encode_piece(self, piece: str, whole: "_Whole") -> "array[int]":
        if len(piece) > VERY_LONG and self._codec.directory:
            encoded = piece.encode(errors="surrogatepass")
            if len(encoded) > MANY_BYTES:
                return await self._uncut.encode(encoded, whole.field, whole.owner, self.max_len)
        return await self._threads.run(whole.owner, whole.num_chars, partial(self._encode, piece))

    def _encode(self, piece: str) -> "array[int]":
        return array("i", self._codec.encode(piece, False))

    def _text_of(self, prompt: TextPrompt | ChatPrompt, add_special_tokens: bool, must_fit: bool) -> tuple[str, bool]:
        """The text, and whether special tokens are to be added: a chat template writes its own."""
        if isinstance(prompt, TextPrompt):
            return prompt.text, add_special_tokens and prompt.add_special_tokens
        text = self._codec.render(prompt)
        self._check_size("messages", text, must_fit)
        return text, False

    async def _render(self, prompt: ChatPrompt, must_fit: bool, owner: str) -> str:
        """The text of a conversation that takes long, or has a template of its own."""
        if prompt.template and not self._trusts_templates:
            raise RequestError("chat_template", UNTRUSTED)
        if not (self._codec.chat_template or prompt.template):
            return self._codec.render(prompt)  # raises
        text = await self._rendering.render(prompt, owner)
        self._check_size("messages", text, must_fit)
        return text

    def _check_size(self, field: str, text: str, must_fit: bool) -> None:
        """Raises: RequestError if a text is too long, whatever its tokens are."""
        most = max(MOST_TEXT, MOST_PER_TOKEN * self.max_len)
        if must_fit and self.max_len and self._codec.longest_token:
            most = self.max_len * self._codec.longest_token
            if len(text) > most:
                why = f"more than the maximum context length of {self.max_len} tokens can hold"
                raise RequestError(field, f"{field}: the text has {len(text)} characters: {why}")
        elif len(text) > most:
            raise RequestError(field, f"{field}: the text has {len(text)} characters, at most {most} are taken")


class _Whole(NamedTuple):
    """What a piece is of: the text of a field, with so many characters."""

    field: str
    num_chars: int
    owner: str


def size_of(prompt: TextPrompt | ChatPrompt) -> int:
    """About how many characters a prompt has: what it takes to read, and to hold."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    try:
        size = len(msgspec.msgpack.encode((prompt.messages, prompt.tools, prompt.template_kwargs)))
    except (RecursionError, OverflowError, ValueError, TypeError):  # nested this deep, for one: a thread's work
        return VERY_LONG + 1
    size += BYTES_OF_MESSAGE * len(prompt.messages)
    return max(size, LONG + 1) if prompt.template else size


def is_long(prompt: Prompt) -> bool:
    """True if encoding would keep the event loop."""
    return not isinstance(prompt, TokenPrompt) and size_of(prompt) > LONG


def _unpack(field: str, packed: bytes) -> "array[int]":
    try:
        return id_array(packed)
    except ValueError as error:
        raise RequestError(field, f"{field}: {len(packed)} bytes are no whole number of int32 token ids") from error


Encode = Callable[[Prompt, bool], Awaitable["array[int]"]]  # a prompt, and whether it must fit into the context
REPLAYED_AT_ONCE = 64  # tokens of a request that another frontend has begun
LARGE = 8_000  # bytes of packed ids that are not unpacked for every request anew


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """The ids that a request begins with, and the same as messages carry them. The ids are not changed."""

    ids: "array[int]"
    packed: bytes


@dataclass(slots=True)
class _Reading:
    """A prompt that is read for some requests, with what cuts it. The references tell that both are still there."""

    prompt: "weakref.ref[Prompt]"
    sampling: "weakref.ref[SamplingParams]"
    task: "asyncio.Task[ReadPrompt]"
    num_waiting: int = 0


class PromptReads:
    """Reads prompts. Long ones are kept by the objects of their requests: a group's requests have the same."""

    def __init__(self) -> None:
        self._readings: dict[tuple[int, int], _Reading] = {}

    async def read(self, message: Generate, limits: EngineLimits, encode: Encode) -> ReadPrompt:
        """The ids that a request keeps. `encode`: of its prompt.

        Raises: as `encode`. Cancellation: as of `encode`, once no request waits for this prompt any more.
        """
        if not _is_large(message.prompt):
            return await _read(message, limits, encode)
        key = id(message.prompt), id(message.sampling)
        reading = self._readings.get(key)
        if reading is None:
            reading = self._readings[key] = self._begin(key, message, limits, encode)
        reading.num_waiting += 1
        try:
            return await asyncio.shield(reading.task)
        finally:
            self._leave(key, reading)
            del reading  # an error keeps this frame, and the reading keeps the error

    def _leave(self, key: tuple[int, int], reading: _Reading) -> None:
        """One request less waits. What no request waits for any more ends; nothing is kept of what has failed."""
        reading.num_waiting -= 1
        if not reading.num_waiting and not _has_ids(reading.task):
            self._readings.pop(key, None)
            reading.task.cancel()

    def _begin(self, key: tuple[int, int], message: Generate, limits: EngineLimits, encode: Encode) -> _Reading:
        def forget(_: object) -> None:
            self._readings.pop(key, None)

        task = asyncio.create_task(_read(message, limits, encode))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its requests may all be gone
        return _Reading(weakref.ref(message.prompt, forget), weakref.ref(message.sampling, forget), task)


def _has_ids(task: "asyncio.Task[ReadPrompt]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _is_large(prompt: Prompt) -> bool:
    return len(prompt.ids) > LARGE if isinstance(prompt, TokenPrompt) else is_long(prompt)


async def _read(message: Generate, limits: EngineLimits, encode: Encode) -> ReadPrompt:
    prompt, cuts = message.prompt, message.sampling.truncate_prompt_tokens is not None
    ids = truncated(await encode(prompt, not cuts), message.sampling, limits)
    return ReadPrompt(ids, prompt.ids if isinstance(prompt, TokenPrompt) and not cuts else pack_ids(ids))


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """All that a request is admitted with."""

    prompt: ReadPrompt
    sampling: SamplingParams
    stops: Stops


class RequestReader:
    """Reads the requests of one engine."""

    def __init__(self, codec: Codec, checks: RequestChecks, prompts: PromptReader) -> None:
        self.hooks = Hooks()
        self._codec = codec
        self._checks = checks
        self._prompts = prompts
        self._reads = PromptReads()
        self._stops = StopCompiler()

    def takes_long(self, asked: SamplingParams) -> bool:
        """Whether what is asked for takes long to settle, however short the prompt is."""
        return bool(asked.stop_regex) or self.hooks.take_long(asked)

    async def read(self, request: OpenRequest, message: Generate, limits: EngineLimits) -> ReadRequest:
        """Raises: RequestError, Refusal. Cancellation: of what no other request waits for."""
        encode = partial(self._encode, client=request.client, owner=request.owner)
        read = await self._reads.read(message, limits, encode)
        sampling = self._checks.settle(with_packed_ids(message.sampling), read.ids, limits, message.seed)
        sampling = await self.hooks.prepared(sampling, Preparing(request, message.prompt, read.ids, limits))
        stops = await self._stops.compiled(sampling.stop, sampling.stop_regex, request.owner)
        return ReadRequest(read, sampling, stops)

    async def _encode(self, prompt: Prompt, must_fit: bool, client: int, owner: str) -> "array[int]":
        return await self._prompts.encode(prompt, True, must_fit, client, owner)

    def open_output(self, request: OpenRequest, prompt: Prompt, read: ReadRequest) -> None:
        """Let the request's tokens become text."""
        ids, sampling = read.prompt.ids, read.sampling
        decoder = self._codec.detokenizer(
            sampling.skip_special_tokens,
            ids[-1:] if _continues(prompt) else (),
            sampling.shown_tokens,
            sampling.spaces_between_special_tokens,
        )
        request.open_output(sampling, len(ids), decoder, read.stops)


async def resumed(request: OpenRequest, continued: Continued, vocab_size: int) -> Resumed | None:
    """Bring a request's output, which is open, to where another frontend has left it. None if it has no tokens.

    Its tokens become text one by one, so no later than they did there; what its client lacks of that comes next.
    Raises: RequestError if no frontend can have given out that much. Cancellation: safe.
    """
    output, ids, texts = request.output, _unpack("continued", continued.output), [request.opening]
    assert output is not None
    check_ids("continued", ids, vocab_size)
    for count, token in enumerate(ids, 1):
        piece = output.push([token], None)
        if piece.finish is not None:
            raise RequestError("continued", "continued: the request had ended before")
        texts.append(piece.text)
        if count % REPLAYED_AT_ONCE == 0:
            await asyncio.sleep(0)
    text = "".join(texts)
    if len(text) < continued.num_chars:
        raise RequestError("continued", f"continued: the tokens have {len(text)} characters, not {continued.num_chars}")
    request.opening = text[continued.num_chars :]
    if not ids:
        return None
    cached = min(continued.cached_tokens, request.usage.prompt_tokens)
    request.count(cached, continued.verify_steps)
    return Resumed(continued.output, cached, continued.verify_steps)


def _continues(prompt: Prompt) -> bool:
    """A completion continues its prompt's text, an assistant's answer does not."""
    return not isinstance(prompt, ChatPrompt) or prompt.continue_final_message
