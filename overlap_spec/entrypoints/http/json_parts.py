"""JSON of answers that is too much to be written at once: made in parts, each in a turn of its own.

    parts = JsonParts(number of log-probs in the answer, runner.writing(group))
    text = encode({"logprobs": parts.later(pieces)})      what `later` returns marks the place of the pieces
    async for chunk in parts.written(text): ..

An answer of ordinary size has no such places, and is one chunk. Large ones take turns, as their clients do: in one turn
of the event loop a part of one of them is made.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from overlap_spec.entrypoints.http.errors import ClientGone
from overlap_spec.entrypoints.http.streams import unless_gone

AT_ONCE = 2000  # log-probs: what takes some milliseconds
CHUNK_BYTES = 16 << 10
TURN_S = 0.005  # of this thread's CPU time
MARK = b"\0"  # no JSON has this byte: a string has it escaped
JSON = "application/json"

Turn = Callable[[], AbstractAsyncContextManager[None]]  # waits for one, and holds it

_encode = msgspec.json.Encoder().encode


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
