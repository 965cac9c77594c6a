"""HTTP requests made from `/openapi.json` by schemathesis, valid and invalid, and bytes that are hardly HTTP.

The schemas allow further fields, as the server does. Here they forbid them: cases are then made of the fields that the
server reads. Some have a good prompt beside, or junk in one field of a good body, which schemathesis seldom makes.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import schemathesis
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode

from support.junk_bodies import BODIES, bodies

QUIET = {"/health_generate"}  # one token each: a few are enough


@dataclass(frozen=True)
class HttpCase:
    """One request. `raw`: bytes for a socket of its own instead, after which the client stops sending."""

    method: str = "GET"
    path: str = "/health"
    query: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    raw: bytes = b""


def http_cases(document: dict[str, Any]) -> SearchStrategy[HttpCase]:
    """Of the OpenAPI document of a server."""
    schema = schemathesis.openapi.from_dict(closed(document))
    operations = [found.ok() for found in schema.get_all_operations()]
    with_body = [each for each in operations if each.body]
    made = [each.as_strategy(generation_mode=mode) for each in with_body for mode in GenerationMode]
    plain = [each.as_strategy() for each in operations if not each.body and each.path not in QUIET]
    generated = st.one_of(*made, *made, *plain)
    alone, with_prompt = generated.map(from_schemathesis), generated.map(with_good_prompt)
    return st.one_of(
        *(alone, alone, with_prompt, with_prompt, one_in(junk()), mangled(), raw_bytes()),
        *(large_bodies(), odd_requests(sorted({each.path for each in operations}))),
    )


def one_in(values: Sequence[Any]) -> SearchStrategy[Any]:
    """One of them. Hypothesis writes out what `sampled_from` is given, which is too long here."""
    return st.integers(0, len(values) - 1).map(lambda index: values[index])


def closed(document: dict[str, Any]) -> dict[str, Any]:
    """The document without room for fields that it does not name."""
    document = copy.deepcopy(document)
    for schema in document["components"]["schemas"].values():
        if schema.get("type") == "object" and "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return document


def from_schemathesis(case: "schemathesis.Case") -> HttpCase:
    """A case of schemathesis. Lone surrogates and NaN travel as JSON allows or Python's writer does."""
    headers = {name: value for name, value in (case.headers or {}).items() if is_header(name, value)}
    given = isinstance(case.body, dict | list | str | int | float | bool | None)
    body = json.dumps(case.body).encode() if given else b""
    if given:
        headers["content-type"] = "application/json"
    query = tuple((str(name), str(value)) for name, value in (case.query or {}).items())
    return HttpCase(case.method.upper(), case.formatted_path, query, tuple(headers.items()), body)


def with_good_prompt(case: "schemathesis.Case") -> HttpCase:
    """The same with a prompt that can be answered, and few tokens: then it is the other fields that matter."""
    if isinstance(case.body, dict) and case.path in BODIES:
        case.body = {**case.body, **BODIES[case.path][0], **few_tokens(case.path)}
    return from_schemathesis(case)


def few_tokens(path: str) -> dict[str, Any]:
    """The field that makes answers of this endpoint short."""
    if path == "/generate":
        return {"sampling_params": {"max_new_tokens": 3}}
    if path in ("/v1/messages/count_tokens", "/v1/responses"):
        return {"max_output_tokens": 16} if path == "/v1/responses" else {}
    return {"max_tokens": 3} if path.startswith("/v1") else {}


def is_header(name: str, value: Any) -> bool:
    """Whether a client can send it; the others are for `raw_bytes`."""
    text = f"{name}{value}"
    return text.isascii() and text.isprintable() and name.isidentifier() and str(value).strip() == value


def junk() -> list[HttpCase]:
    """Every field of every body with every kind of junk."""
    return [
        HttpCase("POST", path, headers=(("content-type", "application/json"),), body=json.dumps(body).encode())
        for path in BODIES
        for _, body in bodies(path, **few_tokens(path))
    ]


def mangled() -> SearchStrategy[HttpCase]:
    """Bodies that are no JSON: cut, or with a few bytes replaced; with content types that may not fit."""
    good = [(path, json.dumps(body).encode()) for path, (body, _) in BODIES.items()]
    types = one_in(["application/json", "text/plain", "", "multipart/form-data", "application/x-ndjson; a=b"])
    junk_bytes = st.binary(max_size=4)
    return st.builds(_mangle, one_in(good), st.integers(0, 60), st.integers(0, 9), junk_bytes, types)


def _mangle(good: tuple[str, bytes], at: int, dropped: int, added: bytes, content_type: str) -> HttpCase:
    path, body = good
    changed = body[:at] + added + body[at + dropped :] if dropped < 9 else body[:at]
    return HttpCase("POST", path, headers=(("content-type", content_type),) if content_type else (), body=changed)


LONG_DIGITS = [b"1" * 5000, b"-" + b"9" * 5000, b"1e" + b"9" * 400, b"0." + b"1" * 5000, b"1" * 19, b"-0", b"1e400"]


def large_bodies() -> SearchStrategy[HttpCase]:
    """One field of a good body that is long, deep or has many digits."""
    counts = one_in([10, 300, 5000, 70_000])
    values = st.one_of(
        one_in(LONG_DIGITS),
        st.builds(lambda n: b"[" * n + b"]" * n, counts),
        st.builds(lambda n: b"[" * n, counts),
        st.builds(lambda n: b'{"a":' * n + b"1" + b"}" * n, counts),
        st.builds(lambda n, item: b"[" + b",".join([item] * n) + b"]", counts, one_in([b"1", b'"a"', b"{}", b"[]"])),
        st.builds(lambda n, text: b'"' + text * n + b'"', counts, one_in([b"a", b"b ", b"\\n", b"\\u00e9", b'\\"'])),
        st.builds(lambda n: b"{" + b",".join(b'"%d":1' % i for i in range(n)) + b"}", counts),
    )
    fields = [(path, name) for path, (_, shape) in BODIES.items() for name in shape.__struct_fields__]
    return st.builds(_large_body, one_in(fields), values)


def _large_body(field: tuple[str, str], value: bytes) -> HttpCase:
    path, name = field
    good = {**BODIES[path][0], **few_tokens(path)}
    good.pop(name, None)
    body = b'{%s"%s":%s}' % (b"".join(b"%s," % part for part in _members(good)), name.encode(), value)
    return HttpCase("POST", path, headers=(("content-type", "application/json"),), body=body)


def _members(values: dict[str, Any]) -> list[bytes]:
    return [f"{json.dumps(name)}:{json.dumps(value)}".encode() for name, value in values.items()]


HEADERS = (
    *("x-speculative-method", "x-speculative-num-steps", "x-request-id", "x-api-key", "authorization", "cookie"),
    *("content-type", "content-encoding", "accept", "accept-encoding", "if-none-match", "range", "traceparent"),
    *("x-forwarded-for", "x-http-method-override", "anthropic-version", "openai-organization", "last-event-id"),
)


def odd_requests(paths: Sequence[str]) -> SearchStrategy[HttpCase]:
    """Known paths with more or less of them, any method, and headers and queries that the server may read."""
    ends = one_in(
        ["", "/", "%0A", "%00", "%2f..", "/..", "?", "?timeout=9", "?steps=" + "1" * 5000, "%F0%9F%98%80", ";a"]
    )
    methods = one_in(["GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
    long = one_in(
        ["1" * 5000, "-1", "a" * 7000, "NONE", "EAGLE3", "application/json", "1e999", "gzip", "%0d%0a", "\u00ff"]
    )
    headers = st.dictionaries(one_in(HEADERS), long | st.text("ab1 ;,=/*", max_size=20).map(str.strip), max_size=3)
    queries = st.dictionaries(one_in(["timeout", "steps", "limit", "x"]), long | st.just(""), max_size=2)
    bodies_of = one_in([b"", b"{}", b"null", b"[]", b'{"prompt":"x","max_tokens":1}', b'{"rid":"a"}'])
    made = st.tuples(methods, one_in([*paths, "/no/such", ""]), ends, headers, queries, bodies_of)
    return made.map(_odd_request)


def _odd_request(made: tuple[str, str, str, dict[str, str], dict[str, str], bytes]) -> HttpCase:
    """As bytes: no client would send it so."""
    method, path, end, headers, queries, body = made
    query = "&".join(f"{name}={value}" for name, value in queries.items())
    target = f"{path}{end}{'&' if '?' in end else '?'}{query}" if query else path + end
    lines = [
        f"{method} {target.replace(' ', '%20') or '/'} HTTP/1.1",
        "host: 127.0.0.1",
        f"content-length: {len(body)}",
    ]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return HttpCase(raw="\r\n".join([*lines, "connection: close", "", ""]).encode("latin-1") + body)


def raw_bytes() -> SearchStrategy[HttpCase]:
    """What is written to a socket: broken request lines, headers, lengths and chunks, often cut short."""
    lines = one_in(
        [
            b"POST /generate HTTP/1.1\r\n",
            b"GET /health HTTP/1.1\r\n",
            b"GET / HTTP/9.9\r\n",
            b"POST /v1/completions HTTP/1.0\r\n",
            b"GET //health?%ff%zz#\r\n",
            b"OPTIONS * HTTP/1.1\r\n",
            b"CONNECT a:1 HTTP/1.1\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ]
    )
    headers = one_in(
        [
            b"host: a\r\n",
            b"content-length: 5\r\n",
            b"content-length: -1\r\n",
            b"content-length: 99999999999999999999\r\n",
            b"content-length: 3\r\ncontent-length: 4\r\n",
            b"transfer-encoding: chunked\r\n",
            b"expect: 100-continue\r\n",
            b"upgrade: websocket\r\nconnection: upgrade\r\n",
            b"connection: close\r\n",
            b"x: " + b"y" * 70_000 + b"\r\n",
            b"no colon\r\n",
            b" folded\r\n",
            b"authorization: Bearer \xff\xfe\r\n",
            b"x-request-id: " + b"\xe9" * 40 + b"\r\n",
        ]
    )
    ends = one_in(
        [b"", b"\r\n", b"\r\n{}", b'\r\n{"a"', b"\r\n5\r\nabcde\r\n0\r\n\r\n", b"\r\nffffffffff\r\nx", b"\r\nzz\r\n"]
    )
    parts = st.tuples(lines | st.binary(max_size=40), st.lists(headers | st.binary(max_size=20), max_size=4), ends)
    return parts.map(lambda made: HttpCase(raw=made[0] + b"".join(made[1]) + made[2]))
