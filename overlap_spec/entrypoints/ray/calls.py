"""One HTTP request on its way from the ingress to a replica, or to all of them, whose answers become one.

/flush_cache, /reset_prefix_cache, /abort_request, /update_weights_from_disk
                                                    the answer of the replica that is least content
/metrics                                            all samples, each with its replica as a label
"""

import hashlib
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message

from overlap_spec.config import EngineConfig
from overlap_spec.entrypoints.http.errors import Problem

REPLICA_HEADER = "x-replica-id"  # of every answer: the replica that gave it
SENT = ("type", "http_version", "method", "scheme", "query_string", "headers", "client", "server")
# What of a body comes before the answer, in the order in which chat templates show it.
OF_MESSAGES = ("messages", "input")
PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt", "text", "input_ids")
SALTS = "cache_salt", "extra_key"  # two names of one: requests of different salts share no prefix
KEY_HEADERS = b"authorization", b"x-api-key"
NO_SALT = b"", b"null", b'""'
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


def may_isolate(config: EngineConfig) -> bool:
    """Whether replicas isolate clients, as far as flags tell: each reads the file of keys for itself."""
    return config.api_key_file is not None if config.isolate_clients is None else config.isolate_clients


def sender_of(scope: Mapping[str, Any]) -> bytes:
    """The keys of a request: another client has others, and a client may have several. b"": no key."""
    return b"\0".join(value for name, value in scope["headers"] if name in KEY_HEADERS)


def prompt_of(body: bytes, sender: bytes = b"") -> str:
    """What requests with the same prefix have alike at their beginning; "" of a body without a prompt.

    Of messages it is what they contain: that all short chats begin with the same syntax must not make them alike.
    `sender`: where clients are isolated. Which replica answers would tell one of them what another has sent.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""  # the app refuses it in its own words
    found = b"".join(_text_of(name, fields[name]) for name in PROMPT_FIELDS if name in fields)
    text = found[:MOST_TEXT].decode(errors="replace")
    return _digest(fields, sender) + text if text else ""


def _digest(fields: Mapping[str, msgspec.Raw], sender: bytes) -> str:
    """Of sender and salt, put before the prompt: texts of others differ from their beginning on. "": neither."""
    salt = next((given for name in SALTS if (given := bytes(fields.get(name, b""))) not in NO_SALT), b"")
    if not salt and not sender:
        return ""
    return hashlib.blake2b(salt, digest_size=8, key=hashlib.sha256(sender).digest()).hexdigest()


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


METRICS = "/metrics"
EVERYWHERE = (METRICS, "/abort_request", "/flush_cache", "/reset_prefix_cache", "/update_weights_from_disk")
TIMEOUT_S = 30.0
SAMPLE = re.compile(r"^([^\s{]+)(?:\{(.*)\})? (.*)$")  # name, labels, value


async def answer_everywhere(engines: Any, call: Call) -> Response:
    """Ask all replicas. Raises: Problem if there is none."""
    answers = await engines.broadcast("answer_whole", call).results_async(timeout_s=TIMEOUT_S)
    if not answers:
        raise Problem(503, "no engine is running", code="not_ready")
    worst = max(answers, key=lambda messages: int(messages[0]["status"]))
    if call.scope["path"] != METRICS or worst[0]["status"] != 200:
        return _response(worst, _body(worst))
    texts = {header_of(messages, REPLICA_HEADER): _body(messages).decode() for messages in answers}
    return _response(worst, merged_metrics(texts).encode())


def merged_metrics(texts: dict[str, str]) -> str:
    """Prometheus text of several replicas, by their ids, as one: a family's samples must be together."""
    families: dict[str, list[str]] = {}
    for replica, text in texts.items():
        head, in_head = "", False
        for line in text.splitlines():
            if line.startswith("#"):
                head = f"{head}\n{line}" if in_head else line
                in_head = True
            else:
                in_head = False
                families.setdefault(head, []).append(_labelled(line, replica))
    return "".join(f"{line}\n" for head, samples in families.items() for line in (head, *samples))


def _labelled(sample: str, replica: str) -> str:
    found = SAMPLE.match(sample)
    if found is None:
        return sample
    name, labels, value = found.groups()
    return f'{name}{{replica="{replica}"{"," + labels if labels else ""}}} {value}'


def _body(messages: Sequence[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages[1:])


def _response(messages: Sequence[Message], body: bytes) -> Response:
    response = Response(body, messages[0]["status"])
    kept = [(key, value) for key, value in messages[0]["headers"] if key != b"content-length"]
    response.raw_headers = [*kept, (b"content-length", str(len(body)).encode())]
    return response
