"""From a client's bytes to a message for the service: bounded, decoded, whole.

    up to LARGE_BYTES    decoded at once: some milliseconds, whatever is in it
    more                 counted first, in turns of TURN_S each; decoded if it has no more than the bounds below

Decoding makes an object of every value and holds Python's lock until the last one, so its time is bounded by the number
of values, and for texts and data by their bytes. Both are known from the heads of values, which tell how many follow
(MessagePack, github.com/msgpack/msgpack/blob/master/spec.md).

**Parts** that requests of one client share travel once, are decoded once, and are kept once:

    Shared(prompts, samplings)    GenerateShared("a_0", 0, 0)    GenerateShared("a_1", 0, 0)  ..
              |                            |
              +---- kept by client --------+--> Generate("a_0", prompts[0], samplings[0])

A sampling that has come before, and that some request still has, is that object again, from any client.
"""

import functools
import hashlib
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec
import zmq
from msgspec.structs import replace

from overlap_spec.client.link import Malformed
from overlap_spec.errors import Overloaded, RequestError
from overlap_spec.frontend.request_checks import with_packed_ids
from overlap_spec.messages import (
    MAX_ALLOWED_IDS,
    MAX_WIRE_ID_CHARS,
    Cancel,
    Detokenize,
    Generate,
    GenerateShared,
    GetStats,
    Pong,
    Prompt,
    SamplingParams,
    Shared,
    TextDeltas,
    ToClient,
    ToFrontendFromClient,
    Tokenize,
)

Payload = bytes | memoryview

LARGE_BYTES = 64 << 10
# The HTTP server's messages have fewer, by the bounds of its bodies.
MOST_VALUES = MAX_ALLOWED_IDS + (1 << 15)  # the longest list that a request may carry, and all else
MOST_CONTAINERS = 1 << 16  # lists and objects, of these
MOST_ENTRIES = (1 << 16) + 1024  # of objects: each takes as long as several values of a list
MOST_TEXT_BYTES = 8 << 20
MOST_DATA_BYTES = 16 << 20  # binary, as token ids are: they are copied
TURN_S = 0.002  # of this thread's CPU time
LOOK = 1024  # values between two looks at the clock
HEAD_BYTES = 4096  # a kind and an id are far shorter
USER_ID = "User-Id"  # the property of a message that the ZAP handler has set
OPERATOR_ID, KEY_ID = "operator", "key "  # its values: of the operator's key, and before the name of another one


class Head(NamedTuple):
    """The beginning of a client's message. Most kinds have a request id there. "": it is not known."""

    kind: str = ""
    request_id: str = ""


def read_head(payload: Payload) -> Head:
    """As much of it as is there, in a time that does not depend on the rest."""
    begin = bytes(payload[:HEAD_BYTES])
    code = begin[0] if begin else 0
    if code >> 4 == 0x9:
        count, at = code & 15, 1
    elif code in ARRAYS:
        count, at = _integer(begin, 1, ARRAYS[code]), 1 + ARRAYS[code]
    else:
        return Head()
    kind, at = _text(begin, at) if count else (None, 0)
    request_id = _text(begin, at)[0] if kind is not None and count > 1 else None
    return Head(kind or "", request_id or "")


def _text(data: bytes, at: int) -> tuple[str | None, int]:
    """The text at this place, and where it ends; None if there is another value, or none that is whole."""
    code = data[at] if at < len(data) else 0
    if code >> 5 == 0b101:
        begin, size = at + 1, code & 31
    elif code in TEXTS:
        begin, size = at + 1 + TEXTS[code], _integer(data, at + 1, TEXTS[code])
    else:
        return None, at
    if begin + size > len(data):
        return None, at
    try:
        return data[begin : begin + size].decode(), begin + size
    except UnicodeDecodeError:
        return None, at


class Count:
    """Counts what a message has. `error`: what it has too much of, once that is known."""

    def __init__(self, payload: Payload) -> None:
        self.error = ""
        self._payload = payload
        self._at = 0
        self._left = 1  # values that are announced and not counted
        self._values = self._containers = self._entries = self._text_bytes = self._data_bytes = 0

    def advance(self) -> bool:
        """Count on for a turn. Returns whether all is counted, or too much is found."""
        until = time.thread_time() + TURN_S
        while not self._is_over:
            self._count(LOOK)
            if time.thread_time() >= until:
                break
        return self._is_over

    @property
    def _is_over(self) -> bool:
        return not self._left or bool(self.error) or self._at >= len(self._payload)

    def _count(self, most: int) -> None:
        """So many values at most. A message that is cut off, or is no MessagePack, ends somewhere: decoding tells."""
        payload, at, left, counted = self._payload, self._at, self._left, 0
        while left and at < len(payload) and counted < most:
            code = payload[at]
            left -= 1
            counted += 1
            if step := STEPS[code]:
                at += step
                continue
            if (more := SHORT_CONTAINERS.get(code)) is not None:
                self._containers += 1
                at, left = at + 1, left + more
                self._entries += more // 2 if code in SHORT_MAPS else 0
                continue
            width = WIDTHS[code]
            size = int.from_bytes(payload[at + 1 : at + 1 + width])
            at += 1 + width
            if code in TEXTS:
                self._text_bytes += size
                at += size
            elif code in BYTES_AFTER:
                self._data_bytes += size
                at += BYTES_AFTER[code] + size
            else:
                self._containers += 1
                left += 2 * size if code in MAPS else size
                self._entries += size if code in MAPS else 0
                if left > MOST_VALUES:
                    break
        self._at, self._left, self._values = at, left, self._values + counted
        self.error = self._too_much()

    def _too_much(self) -> str:
        """What has been counted, or is announced, beyond a bound."""
        for number, most, what in (
            (self._values + self._left, MOST_VALUES, "values"),
            (self._containers, MOST_CONTAINERS, "lists and objects"),
            (self._entries, MOST_ENTRIES, "entries of objects"),
            (self._text_bytes, MOST_TEXT_BYTES, "bytes of text"),
            (self._data_bytes, MOST_DATA_BYTES, "bytes of data"),
        ):
            if number > most:
                return f"the message: at most {most} {what} are taken, it has more"
        return ""


def _integer(data: Payload, at: int, width: int) -> int:
    """Unsigned, most significant byte first."""
    return int.from_bytes(data[at : at + width])


# By the first byte of a value: how many bytes its length has.
TEXTS = {0xD9: 1, 0xDA: 2, 0xDB: 4}
ARRAYS = {0xDC: 2, 0xDD: 4}
MAPS = {0xDE: 2, 0xDF: 4}
BINARIES = {0xC4: 1, 0xC5: 2, 0xC6: 4}
EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
SHORT_MAPS = {0x80 + n: 2 * n for n in range(16)}  # values in them, keys included
SHORT_CONTAINERS = SHORT_MAPS | {0x90 + n: n for n in range(16)}
BYTES_AFTER = dict.fromkeys(BINARIES, 0) | dict.fromkeys(EXTENSIONS, 1)  # beside as many as the length tells
WIDTHS = {**TEXTS, **BINARIES, **EXTENSIONS, **ARRAYS, **MAPS}
# Bytes of those whose first byte tells it all: numbers, true, false, none, short texts and extensions. 0: the others.
NUMBERS = {0xCA: 5, 0xCB: 9, **{first + n: 1 + (1 << n) for first in (0xCC, 0xD0) for n in range(4)}}
SHORT = {**{0xD4 + n: 2 + (1 << n) for n in range(5)}, **{0xA0 + n: 1 + n for n in range(32)}}
STEPS = [0 if code in WIDTHS | SHORT_CONTAINERS else (NUMBERS | SHORT).get(code, 1) for code in range(256)]


T = TypeVar("T")


class SharedParts:
    """The last `Shared` of each client, by the client's number.

    A sampling is decoded when a request asks for it, and kept by its requests alone: decoded, all those of a message
    may take ten times its bytes.
    """

    def __init__(self) -> None:
        self._of_client: dict[int, tuple[list[Prompt], list[_Encoded]]] = {}
        self._known: WeakValueDictionary[bytes, SamplingParams] = WeakValueDictionary()
        self._decoder: msgspec.msgpack.Decoder[SamplingParams] = msgspec.msgpack.Decoder(SamplingParams)

    def put(self, client: int, message: Shared) -> None:
        """Keep it for the requests that follow."""
        self._of_client[client] = message.prompts, [_Encoded(raw) for raw in message.samplings]

    def request(self, client: int, message: GenerateShared) -> Generate | Malformed:
        """The request itself, or what is wrong with its sampling. Raises: Overloaded if a part is not there."""
        prompts, samplings = self._of_client.get(client, ([], []))
        prompt = message.prompt
        if isinstance(prompt, int):
            prompt = _at(prompts, prompt)
        encoded = _at(samplings, message.sampling)
        sampling = self._sampling(encoded)
        if sampling is None:
            return Malformed(message.request_id, encoded.wrong_field, encoded.error)
        return Generate(message.request_id, prompt, sampling, message.terms, message.seed, message.continued)

    def drop(self, client: int) -> None:
        """Nothing that refers to it comes any more."""
        self._of_client.pop(client, None)

    def _sampling(self, encoded: "_Encoded") -> SamplingParams | None:
        """None if it is not sound."""
        known = self._known.get(encoded.digest)
        if known is None and not encoded.error:
            try:
                known = with_packed_ids(self._decoder.decode(encoded.raw))
            except (msgspec.MsgspecError, UnicodeDecodeError, RequestError) as error:
                cause = error if isinstance(error, RequestError) else error.__cause__
                encoded.wrong_field = cause.field if isinstance(cause, RequestError) else "sampling"
                encoded.error = str(error)
            else:
                self._known[encoded.digest] = known
        return known


class _Encoded:
    """A sampling as it came. `error`: what is wrong with it, once a request has asked for it."""

    def __init__(self, raw: msgspec.Raw) -> None:
        self.raw = raw
        self.wrong_field = self.error = ""

    @functools.cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.raw, digest_size=16).digest()


def _at(parts: Sequence[T], index: int) -> T:
    if not 0 <= index < len(parts):
        raise Overloaded("what the request shares with others has not come, or there was no room for it")
    return parts[index]


def user_id(key_name: str) -> str:
    """Of a connection that has shown the key of this name."""
    return KEY_ID + key_name


def user_of(identity: zmq.Frame) -> str:
    """The user id of the connection that a message came through; "": no key was asked for."""
    try:
        return str(identity.get(USER_ID))
    except zmq.ZMQError:
        return ""


def owned(message: ToFrontendFromClient, key: str | None) -> ToFrontendFromClient:
    """The message as that of a key's client: what it tells of whose it is is overwritten. None: of a gateway."""
    if key is None:
        return message
    if isinstance(message, Generate | GenerateShared):
        return replace(message, terms=replace(message.terms, client=user_id(key), key=key))
    if isinstance(message, Tokenize | Detokenize):
        return replace(message, owner=user_id(key))
    return replace(message, of_key=key) if isinstance(message, Cancel | GetStats) else message


class Decoder:
    """Messages of clients, as those of their keys."""

    def __init__(self) -> None:
        self._decoder: msgspec.msgpack.Decoder[ToFrontendFromClient] = msgspec.msgpack.Decoder(ToFrontendFromClient)

    def decode(self, payload: Payload, key: str | None) -> ToFrontendFromClient | Malformed:
        """The message, or what is wrong with it. `key`: the name of its client's; None: it may name others."""
        try:
            message = self._decoder.decode(payload)
        except Exception as error:  # untrusted bytes: also broken UTF-8, or nested too deep
            return _malformed(payload, error)
        return owned(message, key)


def is_cancel(payload: Payload) -> bool:
    """A large one is none that a client sends."""
    return len(payload) <= LARGE_BYTES and read_head(payload).kind == Cancel.__name__


def _malformed(payload: Payload, error: Exception) -> Malformed:
    request_id = read_head(payload).request_id[:MAX_WIRE_ID_CHARS]
    cause = error.__cause__
    if isinstance(cause, RequestError):
        return Malformed(request_id, cause.field, str(cause))
    return Malformed(request_id, _field_of(str(error)), str(error))


def _field_of(error: str) -> str:
    """The last name in a msgspec path: `... at `$[3].top_p`` is top_p."""
    _, found, path = error.rpartition(" - at `$")
    return path.rstrip("`").rpartition(".")[2].partition("[")[0] if found and "." in path else ""


def request_ids(message: ToClient) -> Sequence[str]:
    """Whose answer it is."""
    match message:
        case TextDeltas():
            return message.request_ids
        case Pong():
            return ("",)
        case _:
            return (message.request_id,)
