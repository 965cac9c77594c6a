"""From the bytes of a request body to a checked struct.

The rules are the same everywhere: unknown fields are accepted, a null field counts as left out, a known field
with a bad value is a 400 whose `param` names it.

A client that cannot change its bodies limits speculation by headers, and SDKs tell by one how long they wait for the
first byte; a field of the body goes before its header:

    X-Speculative-Method: NONE        X-Speculative-Num-Steps: 2        X-Stainless-Read-Timeout: 600

**Large bodies** are decoded in processes of their own, which end at their limits, and checked in a thread.

    body --> [a process: JSON, counted, token ids packed] --msgpack--> fields --> [the app's thread: check] --> endpoint

Decoding makes an object of every value, and keeps Python's lock until the last one: so long, all streams would wait.
What comes back has few values. Clients take turns.
"""

import asyncio
import re
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from msgspec.msgpack import Ext
from starlette.requests import ClientDisconnect, Request

from overlap_spec.entrypoints.http.body_fields import (
    Json,
    check_depth,
    check_lengths,
    num_brackets,
    parse,
    parse_fields,
    without_strings,
)
from overlap_spec.entrypoints.http.errors import ClientGone, Problem
from overlap_spec.messages import MOST_SECONDS, TOKEN_BYTES, shown
from overlap_spec.runtime.isolated import Isolated, TooLarge, TooLong, WorkFailed
from overlap_spec.runtime.turns import Turns

T = TypeVar("T")

MOST_MIB, MOST_S = 96, 4.0  # of memory and of CPU time, for one body
AT_ONCE = 2
MOST_FIELDS = 1024  # of the body itself
MOST_CONTAINERS = 1 << 15  # lists and objects
MOST_VALUES = 1 << 18  # a vocabulary's ids, for example
MOST_ENTRIES = 1 << 16  # of objects: each takes as long as several values of a list, for its key is looked up
MOST_IDS = 1 << 21  # token ids of prompts
ID_FIELDS = frozenset(("prompt", "input_ids", "tokens"))
IDS = 1  # the extension type of packed ids
BEGINS_WITH_IDS = re.compile(rb"\s*\[\s*([-0-9[])")
PIECE_BYTES = 1 << 20  # of a list of ids, decoded at once
FIELDS, PROBLEM = b"F", b"P"
MOST_LISTS = 2048  # of ids; those are prompts


class PackedIds(msgspec.Struct, frozen=True):
    """Token ids as they are sent on, int32 in little-endian order. They are known to be from 0 on."""

    data: bytes

    def __len__(self) -> int:
        return len(self.data) // TOKEN_BYTES


class LargeBodies:
    """Those of one app."""

    def __init__(self) -> None:
        self._process = Isolated("overlap_spec.entrypoints.http.request_body:decoder", most_bytes=MOST_MIB << 20)
        self._thread = ThreadPoolExecutor(1, "large-bodies")
        self._turns = Turns[str](AT_ONCE)
        self.close = weakref.finalize(self, self._process.close)  # at the latest when the app is gone

    def start(self) -> None:
        """Be ready for the first one: else it waits until the process has started."""
        self._process.start()

    async def read(self, body: bytes, client: str, check: Callable[[Json], T]) -> T:
        """Decode a body and check its fields. Raises: Problem, and what `check` raises."""
        async with self._turns.turn(client):
            try:
                answer = await self._process.run(body, MOST_S)
            except TooLarge:
                text = f"the body: its {len(body)} bytes take more than {MOST_MIB} MiB of memory when they are decoded"
                raise Problem(400, text, code="body_too_large") from None
            except TooLong:
                text = f"the body: its {len(body)} bytes take more than {MOST_S:g} s to decode"
                raise Problem(400, text, code="body_too_large") from None
            except WorkFailed as error:
                text = f"the body: its {len(body)} bytes cannot be decoded: {error}"
                raise Problem(400, text, code="invalid_json") from None
            return await self._in_thread(lambda: check(unpacked(answer)))

    async def check(self, fields: Json, client: str, check: Callable[[Json], T]) -> T:
        """Check the fields of a small body that has many. Raises: what `check` raises."""
        async with self._turns.turn(client):
            return await self._in_thread(lambda: check(fields))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def unpacked(answer: bytes) -> Json:
    """Raises: Problem."""
    if answer[:1] == PROBLEM:
        status, text, param, code = msgspec.msgpack.decode(memoryview(answer)[1:])
        raise Problem(status, text, param, code)
    fields: Json = msgspec.msgpack.decode(memoryview(answer)[1:], ext_hook=lambda _, data: PackedIds(bytes(data)))
    return fields


# --- in the process ---------------------------------------------------------------------------------------


def decoder(_: str) -> Callable[[bytes], bytes]:
    """What a process does with a body."""
    return decode_apart


def decode_apart(body: bytes) -> bytes:
    """The body's fields, or what is wrong with them, as `unpacked` reads it."""
    try:
        return FIELDS + msgspec.msgpack.encode(_fields(body))
    except Problem as problem:
        return PROBLEM + msgspec.msgpack.encode((problem.status, str(problem), problem.param, problem.code))


def _fields(body: bytes) -> Json:
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return parse_fields(body)  # its error names what is wrong
    if len(raw) > MOST_FIELDS:
        raise Problem(400, f"the body: at most {MOST_FIELDS} fields are taken, got {len(raw)}", code="invalid_value")
    texts = {name: bytes(text) for name, text in raw.items()}
    packed = {name: ids for name, text in texts.items() if name in ID_FIELDS if (ids := _ids(text, name)) is not None}
    counts = {name: _counts(text) for name, text in texts.items() if name not in packed}
    _check_total(counts, 0, MOST_CONTAINERS, "lists and objects")
    _check_total(counts, 1, MOST_VALUES, "values")
    fields = {name: packed.get(name) or _value(text, name) for name, text in texts.items()}
    if sum(entries for _, _, entries in counts.values()) > MOST_ENTRIES:
        for each in (fields, fields.get("sampling_params")):
            if isinstance(each, dict):
                check_lengths(each)  # it tells which one is far too long
        _check_total(counts, 2, MOST_ENTRIES, "entries of objects")
    return fields


def _check_total(counts: dict[str, tuple[int, int, int]], kind: int, most: int, words: str) -> None:
    """Raises: Problem naming the field with the most."""
    total = sum(count[kind] for count in counts.values())
    if total > most:
        field = max(counts, key=lambda name: counts[name][kind])
        text = f"{field}: at most {most} {words} are taken in a body, there are {total}"
        raise Problem(400, text, field, "invalid_value")


def _counts(text: bytes) -> tuple[int, int, int]:
    """Lists and objects; values, where an entry of an object counts as one; entries of objects."""
    if num_brackets(text) > MOST_CONTAINERS // 16 or text.count(b",") + text.count(b":") > MOST_ENTRIES // 16:
        text = without_strings(text)
    return num_brackets(text), 1 + num_brackets(text) + text.count(b","), text.count(b":")


def _value(text: bytes, field: str) -> Any:
    value = parse(text)
    check_depth(value, field)
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        raise Problem(400, f"{field}: an integer needs more than 64 bits", field, "invalid_value") from None
    return value


def _ids(text: bytes, field: str) -> Ext | list[Ext] | None:
    """Packed token ids, of one prompt or of many; None if it is something else. Raises: Problem."""
    begin = BEGINS_WITH_IDS.match(text)
    if begin is None:
        return None
    if begin[1] != b"[":
        return Ext(IDS, _packed(text, field, MOST_IDS))
    if (count := text.count(b"[") - 1) > MOST_LISTS:
        raise Problem(400, f"{field}: at most {MOST_LISTS} prompts, got {count}", field, "invalid_value")
    packed, left = [], MOST_IDS
    for each in msgspec.json.decode(text, type=list[msgspec.Raw]):
        data = _packed(bytes(each), field, left)
        packed.append(Ext(IDS, data))
        left -= len(data) // TOKEN_BYTES
    return packed


def _packed(text: bytes, field: str, most: int) -> bytes:
    if (count := text.count(b",") + 1) > most:
        text_of = f"{field}: at most {MOST_IDS} token ids are taken in a body, got {MOST_IDS - most + count}"
        raise Problem(400, text_of, field, "invalid_value")
    packed = array("i")
    try:
        if text.lstrip()[:1] != b"[":
            raise msgspec.ValidationError("Expected `array`")
        for piece in _pieces(text):
            packed.extend(msgspec.json.decode(piece, type=list[int]))
        data = packed.tobytes()
        if data[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():  # the sign is in a token's last byte
            return data
        why = "Expected `int` >= 0"
    except OverflowError:
        why = "Expected `int` <= 2147483647"
    except msgspec.MsgspecError as error:
        why = str(error).partition(" - at")[0]
    raise Problem(400, f"{field}: not a list of token ids: {why}", field, "invalid_type")


def _pieces(text: bytes) -> Iterator[bytes]:
    """The same list in parts, so that few numbers are objects at once."""
    begin, end = text.find(b"[") + 1, text.rfind(b"]")
    while end - begin > PIECE_BYTES:
        cut = text.find(b",", begin + PIECE_BYTES, end)
        if cut < 0:
            break
        yield b"[%b]" % text[begin:cut]
        begin = cut + 1
    yield b"[%b]" % text[begin:end]


METHOD_HEADER = "x-speculative-method"
WAITS_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")  # of OpenAI's and Anthropic's SDKs, by language
STEPS_HEADER = "x-speculative-num-steps"
MOST_DIGITS = 18  # of a number in a header
LARGE_BODY_BYTES = 256 << 10
MANY_BRACKETS = 2048  # lists and objects, and as many quotes: what a body of fewer takes is milliseconds
MANY_OBJECTS = 256  # to check one may take as long as to draw sampling parameters from it: 50 us
EMPTY = re.compile(rb"\{\s*\}")
MISSING = re.compile(r"missing required field `(\w+)`")
PLACE = re.compile(r" - at `\$\.?(.*)`$")


async def read_body(request: Request, max_bytes: int, check: Callable[[Json], T]) -> T:
    """Read an object, whatever its content type, and the headers that complete it. An empty body is an empty object.

    `check` makes of it what the endpoint needs. A large body is parsed in a process and checked in a thread: other
    requests go on meanwhile.
    Raises: Problem (400 no JSON object, 413 too large, 415 compressed), ClientGone, and what `check` raises.
    """
    if (encoding := request.headers.get("content-encoding", "").lower()) not in ("", "identity"):
        raise Problem(415, f"the Content-Encoding {encoding[:32]!r} is not read: send plain JSON", code="encoded_body")
    body = await read_bytes(request, max_bytes)
    client = request.scope.get("state", {}).get("caller", "")

    def complete(fields: Json) -> T:
        fields = _with_headers(without_nulls(fields), request.headers)
        return check(_with_read_timeout(fields, request.headers))

    if _is_large(body):
        return await _large_bodies(request).read(body, client, complete)
    fields = parse_fields(body)
    if _has_many_objects(body):
        return await _large_bodies(request).check(fields, client, complete)
    return complete(fields)


def _large_bodies(request: Request) -> LargeBodies:
    found: LargeBodies = request.app.state.large_bodies
    return found


def _is_large(body: bytes) -> bool:
    """Whether it may take long to make its values. What is in strings does not count, unless it is long to find out."""
    if len(body) > LARGE_BODY_BYTES:
        return True
    if num_brackets(body) <= MANY_BRACKETS:
        return False
    return body.count(b'"') > MANY_BRACKETS or num_brackets(without_strings(body)) > MANY_BRACKETS


def _has_many_objects(body: bytes) -> bool:
    """Whether it may have so many: two quotes are a key, without which an object is empty. Text has braces, too."""
    if body.count(b"{") <= MANY_OBJECTS:
        return False
    return body.count(b'"') > 2 * MANY_OBJECTS or len(EMPTY.findall(body)) > MANY_OBJECTS


def without_nulls(fields: Json) -> Json:
    """Drop null fields: some client libraries send null for what was not set."""
    return {name: value for name, value in fields.items() if value is not None}


def convert(fields: Json, shape: type[T]) -> T:
    """Check `fields` against a struct, their lengths first. Raises: Problem naming the field."""
    check_lengths(fields)
    try:
        return msgspec.convert(fields, shape)
    except msgspec.ValidationError as error:
        raise _bad_field(str(error)) from None


def _with_headers(fields: Json, headers: Mapping[str, str]) -> Json:
    """The fields, with `speculative` completed. Raises: Problem naming a bad header."""
    given: Json = {}
    if METHOD_HEADER in headers:
        given["method"] = headers[METHOD_HEADER]
    if STEPS_HEADER in headers:
        text = headers[STEPS_HEADER]
        if not (text.isascii() and text.isdecimal()) or len(text) > MOST_DIGITS:
            text = f"{STEPS_HEADER} must be an integer >= 0 of at most {MOST_DIGITS} digits, got {shown(text)}"
            raise Problem(400, text, STEPS_HEADER, "invalid_value")
        given["num_steps"] = int(text)
    asked = fields.get("speculative", {})
    if not (given or asked) or not isinstance(asked, dict):
        return fields
    return {**fields, "speculative": {**given, **without_nulls(asked)}}


def _with_read_timeout(fields: Json, headers: Mapping[str, str]) -> Json:
    """The fields, with the time for which an SDK waits for the first byte as a limit, unless they have that limit.

    The first byte is a stream's first token, and comes at the end without a stream.
    Raises: Problem naming a bad header.
    """
    name = next((name for name in WAITS_HEADERS if name in headers), None)
    if name is None:
        return fields
    limit = "first_token_timeout" if fields.get("stream") else "timeout"
    try:
        seconds = float(headers[name])
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise Problem(400, f"{name} must be seconds above 0, got {shown(headers[name])}", name, "invalid_value")
    return {limit: min(seconds, MOST_SECONDS), **fields}


def _bad_field(text: str) -> Problem:
    """An error of msgspec is ``Expected `int`, got `str` - at `$.max_tokens` ``; the field is the path's first part."""
    found = PLACE.search(text)
    path = found[1] if found else ""
    what = PLACE.sub("", text)
    if missing := MISSING.search(what):
        param = re.split(r"[.\[]", path)[0] or missing[1]
        inside = f"{param}: " if param and param != missing[1] else ""
        return Problem(400, f"{inside}missing required field: {missing[1]}", param, "missing_required_parameter")
    return Problem(400, f"{path}: {what[:1].lower()}{what[1:]}", re.split(r"[.\[]", path)[0] or None, "invalid_type")


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """The whole body. The rest of one that is too large is thrown away by the HTTP server as it comes.

    Raises: Problem (413), ClientGone.
    """
    try:
        return await _read(request, max_bytes)
    except ClientDisconnect:
        raise ClientGone from None


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    first, more = b"", bytearray()  # most bodies come at once
    size = int(declared) if declared.isdecimal() else 0
    if size <= max_bytes:
        async for chunk in request.stream():
            if first:
                more += chunk
            else:
                first = chunk
            if (size := len(first) + len(more)) > max_bytes:
                break
    if size > max_bytes:
        text = f"the body may have {max_bytes} bytes, got {size if declared else 'more'}"
        raise Problem(413, text, code="body_too_large")
    return first + more
