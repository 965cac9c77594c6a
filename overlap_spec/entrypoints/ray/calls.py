"""One HTTP request on its way from the ingress to a replica."""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

REPLICA_HEADER = "x-replica-id"  # of every answer: the replica that gave it
SENT = ("type", "http_version", "method", "scheme", "query_string", "headers", "client", "server")
# What of a body comes before the answer, in the order in which chat templates show it.
OF_MESSAGES = ("messages", "input")
PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt", "text", "input_ids")
MOST_TEXT = 65_536  # bytes of a prompt that decide who gets it: the router keeps them all, character by character


@dataclass(frozen=True)
class Call:
    """An ASGI scope, the whole body, and the text that the router compares ("": it compares none)."""

    scope: dict[str, Any]
    body: bytes
    prompt: str


def call_of(scope: MutableMapping[str, Any], body: bytes, prompt: str = "") -> Call:
    """The call of a request. Its path is the app's own: without the prefix under which Serve has put it."""
    root = scope.get("root_path", "")
    path = scope["path"].removeprefix(root) or "/"
    sent = {name: scope[name] for name in SENT if name in scope}
    return Call({**sent, "path": path, "raw_path": path.encode(), "root_path": ""}, body, prompt)


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"")


def prompt_of(body: bytes) -> str:
    """What requests with the same prefix have alike at their beginning; "" of a body without a prompt.

    Of messages it is what they contain: that all short chats begin with the same syntax must not make them alike.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""  # the app refuses it in its own words
    found = b"".join(_text_of(name, fields[name]) for name in PROMPT_FIELDS if name in fields)
    return found[:MOST_TEXT].decode(errors="replace")


def _text_of(name: str, value: msgspec.Raw) -> bytes:
    if name not in OF_MESSAGES:
        return bytes(value)
    try:
        return b"".join(bytes(message.content) for message in msgspec.json.decode(value, type=list[_Message]))
    except (msgspec.MsgspecError, RecursionError):
        return bytes(value)  # a text


def header_of(messages: Sequence[MutableMapping[str, Any]], name: str) -> str:
    """A header of the answer that these messages begin; "" without it."""
    headers = messages[0].get("headers", ()) if messages else ()
    return next((value.decode("latin-1") for key, value in headers if key.decode("latin-1") == name), "")
