"""Answers as server-sent events, and the end of work whose client is gone.

Framing: `data: <one line of JSON>`, a blank line; `data: [DONE]` last. No comments, no pings, no event names: clients
parse every line that is not empty. Anthropic's messages and OpenAI's responses have named events, and no `[DONE]`.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from overlap_spec.entrypoints.http.access_log import note_reason
from overlap_spec.entrypoints.http.errors import ClientGone, Problem, as_problem
from overlap_spec.errors import OverlapSpecError

T = TypeVar("T")
log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
GOODBYE_S = 0.3  # after a failure, or a drain that took too long: error events leave, and /health answers 503
HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}

_encode = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    """One event."""
    return b"data: " + _encode(payload) + b"\n\n"


def named_event(name: str, payload: Any) -> bytes:
    """One event with a name."""
    return b"event: " + name.encode() + b"\n" + event(payload)


def failed(problem: Problem) -> bytes:
    """The last event of a stream that fails, in OpenAI's shape."""
    return b"data: " + problem.body() + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`, whose request body has been read, and cancel it when the client closes the connection.

    Raises: ClientGone.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends events as they come.

    The status is sent with the first event: an error before it has a status of its own, a later one is the last
    event, which `failed` writes. A client that goes away cancels the generator at once.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], failed: Callable[[Problem], bytes] = failed) -> None:
        super().__init__(events, headers=HEADERS)
        self._events = events
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(scope, send))
        except ClientGone:
            return

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await _send_body(send, first)
            try:
                async for chunk in events:
                    await _send_body(send, chunk)
            except Exception as error:
                if not isinstance(error, OverlapSpecError):
                    log.exception("a stream has failed")
                problem = as_problem(error)
                note_reason(scope, str(problem))
                await _send_body(send, self._failed(problem))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
