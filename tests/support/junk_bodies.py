"""Junk for every field of every endpoint's body."""

from typing import Any

import msgspec

from overlap_spec.entrypoints.anthropic import CountRequest, MessagesRequest
from overlap_spec.entrypoints.http.body_fields import UNSUPPORTED
from overlap_spec.entrypoints.http.operations import AbortRequest
from overlap_spec.entrypoints.http.tokens import DetokenizeRequest, TokenizeRequest
from overlap_spec.entrypoints.native.generate import GenerateRequest, NativeSampling
from overlap_spec.entrypoints.openai.requests import ChatRequest, CompletionRequest
from overlap_spec.entrypoints.responses import ResponsesRequest

JUNK: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 3, 10**30, 1.5, -0.5, float("nan"), float("inf"), "", "x", "{", "\u0000", "5"),
    *([], [None], [""], [5], [-1], ["x", 5], [[1], [2]], [{}], {}, {"a": 1}, {"type": "x"}, {"5": 1e9}, [[[]]]),
)
USER = {"role": "user", "content": "one two"}
BODIES: dict[str, tuple[dict[str, Any], type[msgspec.Struct]]] = {
    "/v1/chat/completions": ({"messages": [USER]}, ChatRequest),
    "/v1/completions": ({"prompt": "one two"}, CompletionRequest),
    "/v1/messages": ({"messages": [USER], "max_tokens": 4}, MessagesRequest),
    "/v1/messages/count_tokens": ({"messages": [USER]}, CountRequest),
    "/v1/responses": ({"input": "one two"}, ResponsesRequest),
    "/generate": ({"text": "one two"}, GenerateRequest),
    "/tokenize": ({"prompt": "one"}, TokenizeRequest),
    "/detokenize": ({"tokens": [1]}, DetokenizeRequest),
    "/abort_request": ({"rid": "r"}, AbortRequest),
}


def bodies(path: str, values: tuple[Any, ...] = JUNK, **more: Any) -> list[tuple[str, dict[str, Any]]]:
    """Every field with every value. `more`: what a good body has besides."""
    good, shape = BODIES[path]
    good = good | more
    fields = [*shape.__struct_fields__, *(UNSUPPORTED if "v1" in path or path == "/generate" else ())]
    found = [(name, {**good, name: junk}) for name in fields for junk in values]
    if path == "/generate":
        inner = [(name, {name: junk}) for name in NativeSampling.__struct_fields__ for junk in values]
        found += [(name, {**good, "sampling_params": given}) for name, given in inner]
    return found
