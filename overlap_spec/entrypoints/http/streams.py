"""Answers as server-sent events and as JSON in parts, and the end of work whose client is gone.

Framing: `data: <one line of JSON>`, a blank line; `data: [DONE]` last. No comments, no pings, no event names: clients
parse every line that is not empty. Anthropic's messages and OpenAI's responses have named events, and no `[DONE]`.

**JSON** that is too much to be written at once is made in parts, each in a turn of its own:

    parts = JsonParts(number of log-probs in the answer, runner.writing(group))
    text = encode({"logprobs": parts.later(pieces)})      what `later` returns marks the place of the pieces
    async for chunk in parts.written(text): ..

An answer of ordinary size has no such places, and is one chunk. Large ones take turns, as their clients do: in one turn
of the event loop a part of one of them is made.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response, StreamingResponse
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
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(scope, send))
        except ClientGone:
            if not self._has_begun:
                raise  # its line in the log has the status of those that leave

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            self._has_begun = True
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


AT_ONCE = 2000  # log-probs: what takes some milliseconds
CHUNK_BYTES = 16 << 10
TURN_S = 0.005  # of this thread's CPU time
MARK = b"\0"  # no JSON has this byte: a string has it escaped
JSON = "application/json"

Turn = Callable[[], AbstractAsyncContextManager[None]]  # waits for one, and holds it


class JsonParts:
    """The parts of one answer, or of the events of one step. `turn`: at which a part of a large one is made."""

    def __init__(self, num_log_probs: int, turn: Turn = nullcontext) -> None:
        self.is_large = num_log_probs > AT_ONCE
        self._turn = turn
        self._later: list[Iterator[bytes]] = []

    def later(self, pieces: Iterator[bytes]) -> msgspec.Raw:
        """A value that is encoded as these pieces; they are made when it is their turn."""
        self._later.append(pieces)
        return msgspec.Raw(MARK + str(len(self._later) - 1).encode() + MARK)

    def filled(self, text: bytes) -> Iterator[bytes]:
        """Encoded JSON with the pieces in their places."""
        for number, each in enumerate(text.split(MARK)):
            if number % 2:
                yield from self._later[int(each)]
            else:
                yield each

    async def written(self, text: bytes) -> AsyncGenerator[bytes, None]:
        """The same in chunks. Others have turns meanwhile. Cancellation: the rest is not made."""
        if not self._later:
            yield text
            return
        pieces, held, is_over = self.filled(text), bytearray(), False
        while not is_over:
            async with self._turn():
                is_over = _made(pieces, held)
                await asyncio.sleep(0)  # no other answer has a turn in this one of the loop
            if is_over or len(held) >= CHUNK_BYTES:
                yield bytes(held)
                held.clear()

    def response(self, reply: Any) -> Response:
        """A whole answer. Its length is told unless it is made in parts."""
        text = _encode(reply)
        if not self._later:
            return Response(text, media_type=JSON)
        return PartedAnswer(self.written(text), media_type=JSON)


class PartedAnswer(StreamingResponse):
    """Sends an answer in parts; a client that goes away ends it.

    Starlette's own way imports anyio's part for asyncio with the first answer, which takes the loop 20 to 30 ms of CPU
    time, and more where files are slow.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await unless_gone(receive, self.stream_response(send))


def _made(pieces: Iterator[bytes], held: bytearray) -> bool:
    """Make pieces for a turn, or for a chunk. Returns whether those were the last ones."""
    until = time.thread_time() + TURN_S
    for piece in pieces:
        held += piece
        if len(held) >= CHUNK_BYTES or time.thread_time() >= until:
            return False
    return True


def list_parts(blocks: Iterable[list[Any]]) -> Iterator[bytes]:
    """A list whose items come in blocks."""
    before = b"["
    for block in blocks:
        if block:
            yield before + _encode(block)[1:-1]
            before = b","
    yield b"[]" if before == b"[" else b"]"


def object_parts(fields: dict[str, Iterable[bytes]]) -> Iterator[bytes]:
    """An object of at least one field; the values come in parts."""
    before = b"{"
    for name, parts in fields.items():
        yield before + _encode(name) + b":"
        yield from parts
        before = b","
    yield b"}"
