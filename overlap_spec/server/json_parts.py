"""JSON of answers that is too much to be written at once: made in parts, each in a turn of its own.

    parts = JsonParts(number of log-probs in the answer)
    text = encode({"logprobs": parts.later(pieces)})      what `later` returns marks the place of the pieces
    async for chunk in parts.written(text): ..

An answer of ordinary size has no such places, and is one chunk.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

AT_ONCE = 2000  # log-probs: what takes some milliseconds
CHUNK_BYTES = 16 << 10
TURN_S = 0.005  # of this thread's CPU time
MARK = b"\0"  # no JSON has this byte: a string has it escaped
JSON = "application/json"

_encode = msgspec.json.Encoder().encode


class JsonParts:
    """The parts of one answer, or of the events of one step."""

    def __init__(self, num_log_probs: int) -> None:
        self.is_large = num_log_probs > AT_ONCE
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
        held, until = bytearray(), time.thread_time() + TURN_S
        for piece in self.filled(text):
            held += piece
            if len(held) >= CHUNK_BYTES:
                yield bytes(held)
                held.clear()
            elif time.thread_time() < until:
                continue
            await asyncio.sleep(0)
            until = time.thread_time() + TURN_S
        yield bytes(held)

    def response(self, reply: Any) -> Response:
        """A whole answer. Its length is told unless it is made in parts."""
        text = _encode(reply)
        if not self._later:
            return Response(text, media_type=JSON)
        return StreamingResponse(self.written(text), media_type=JSON)


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
