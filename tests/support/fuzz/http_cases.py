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
    return st.one_of(alone, alone, with_prompt, with_prompt, one_in(junk()), mangled(), raw_bytes())


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
