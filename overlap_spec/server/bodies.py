"""From the bytes of a request body to a checked struct.

The rules are the same everywhere: unknown fields are accepted, a null field counts as left out, a known field
with a bad value is a 400 whose `param` names it.

A client that cannot change its bodies limits speculation by headers, and SDKs tell by one how long they wait for the
first byte; a field of the body goes before its header:

    X-Speculative-Method: NONE        X-Speculative-Num-Steps: 2        X-Stainless-Read-Timeout: 600
"""

import asyncio
import gc
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from overlap_spec.server.lengths import check_lengths
from overlap_spec.server.problems import ClientGone, Problem

T = TypeVar("T")
Json = dict[str, Any]

METHOD_HEADER = "x-speculative-method"
WAITS_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")  # of OpenAI's and Anthropic's SDKs, by language
STEPS_HEADER = "x-speculative-num-steps"
SMALL_BODY_BYTES = 64 << 10  # larger bodies get no second, slower parse of what msgspec refuses
LARGE_BODY_BYTES = 256 << 10
MOST_NESTED = 1 << 17  # lists and objects in a body; 2,048 prompts and the longest conversations have fewer
STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
MISSING = re.compile(r"missing required field `(\w+)`")
PLACE = re.compile(r" - at `\$\.?(.*)`$")


async def read_body(request: Request, max_bytes: int, check: Callable[[Json], T]) -> T:
    """Read an object, whatever its content type, and the headers that complete it. An empty body is an empty object.

    `check` makes of it what the endpoint needs. A large body is parsed and checked in the app's thread for them: other
    requests go on meanwhile.
    Raises: Problem (400 no JSON object, 413 too large), ClientGone, and what `check` raises.
    """
    body = await read_bytes(request, max_bytes)
    if len(body) <= LARGE_BODY_BYTES:
        return check(_fields(body, request.headers))
    work = partial(_checked_apart, body, request.headers, check)
    return await asyncio.get_running_loop().run_in_executor(request.app.state.large_bodies, work)


def _checked_apart(body: bytes, headers: Mapping[str, str], check: Callable[[Json], T]) -> T:
    """Parse and check a large body.

    Python's collector of cycles would look through every list that is made here, again and again, while all else waits.
    """
    _check_nesting(body)
    collects = gc.isenabled()
    gc.disable()
    try:
        fields = _fields(body, headers)
    finally:
        if collects:
            gc.enable()
    return check(fields)


def _fields(body: bytes, headers: Mapping[str, str]) -> Json:
    value = _parse(body) if body.strip() else {}
    if not isinstance(value, dict):
        raise Problem(400, "the body must be a JSON object", code="invalid_json")
    return _with_read_timeout(_with_headers(without_nulls(value), headers), headers)


def _check_nesting(body: bytes) -> None:
    """Refuse a large number of lists and objects before any is made. Raises: Problem naming the field with the most."""
    if _num_nested(body) <= MOST_NESTED:
        return
    bare = STRINGS.sub(b'""', body)
    if (count := _num_nested(bare)) <= MOST_NESTED:
        return
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        raise Problem(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    field = max(fields, key=lambda name: _num_nested(bytes(fields[name])))
    text = f"{field}: at most {MOST_NESTED} lists and objects are taken in a body, there are {count}"
    raise Problem(400, text, field, "invalid_value")


def _num_nested(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


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
        if not headers[STEPS_HEADER].isdecimal():
            text = f"{STEPS_HEADER} must be an integer >= 0, got {headers[STEPS_HEADER]!r}"
            raise Problem(400, text, STEPS_HEADER, "invalid_value")
        given["num_steps"] = int(headers[STEPS_HEADER])
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
        return {limit: float(headers[name]), **fields}
    except ValueError:
        text = f"{name} must be seconds, got {headers[name]!r}"
        raise Problem(400, text, name, "invalid_value") from None


def _bad_field(text: str) -> Problem:
    """An error of msgspec is ``Expected `int`, got `str` - at `$.max_tokens` ``; the field is the path's first part."""
    found = PLACE.search(text)
    path = found[1] if found else ""
    what = PLACE.sub("", text)
    if missing := MISSING.search(what):
        param = re.split(r"[.\[]", path)[0] or missing[1]
        return Problem(400, f"missing required field: {missing[1]}", param, "missing_required_parameter")
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
    chunks, size = [], int(declared) if declared.isdecimal() else 0
    if size <= max_bytes:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                break
            chunks.append(chunk)
    if size > max_bytes:
        raise Problem(413, f"the body has more than the {max_bytes} bytes that are accepted", code="body_too_large")
    return b"".join(chunks)


def _parse(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)
    if len(body) <= SMALL_BODY_BYTES:
        try:
            return _parse_leniently(body)
        except (ValueError, RecursionError) as error:  # these name the place, and what is wrong with a lone surrogate
            why = str(error)
    raise Problem(400, f"the body is not valid JSON: {why}", code="invalid_json")


def _parse_leniently(body: bytes) -> Any:
    """Accept the NaN, Infinity and 1e400 that Python's clients can send, so that the check of the field names it."""
    value = json.loads(body)
    json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is no text
    return value
