"""Calls that go to every replica, and how their answers become one.

/flush_cache, /reset_prefix_cache, /abort_request   the answer of the replica that is least content
/metrics                                            all samples, each with its replica as a label
"""

import re
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Message

from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.ray.calls import REPLICA_HEADER, Call, header_of

METRICS = "/metrics"
EVERYWHERE = (METRICS, "/abort_request", "/flush_cache", "/reset_prefix_cache")
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
