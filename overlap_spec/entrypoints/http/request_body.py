"""From the bytes of a request body to a checked struct.

The rules are the same everywhere: unknown fields are accepted, a null field counts as left out, a known field
with a bad value is a 400 whose `param` names it.

A client that cannot change its bodies limits speculation by headers, and SDKs tell by one how long they wait for the
first byte; a field of the body goes before its header:

    X-Speculative-Method: NONE        X-Speculative-Num-Steps: 2        X-Stainless-Read-Timeout: 600
"""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from overlap_spec.entrypoints.http.errors import ClientGone, Problem
from overlap_spec.entrypoints.http.json_bodies import Json, num_brackets, parse_fields, without_strings
from overlap_spec.entrypoints.http.large_bodies import LargeBodies
from overlap_spec.entrypoints.http.lengths import check_lengths
from overlap_spec.messages import shown

T = TypeVar("T")

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
    Raises: Problem (400 no JSON object, 413 too large), ClientGone, and what `check` raises.
    """
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
        return {limit: float(headers[name]), **fields}
    except ValueError:
        text = f"{name} must be seconds, got {shown(headers[name])}"
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
