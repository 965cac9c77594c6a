"""A link inside one event loop, for tests of actors."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from overlap_spec import features

T = TypeVar("T")


class MemoryLink(Generic[T]):
    """Inbox and outlet in one, inside one event loop. Messages still pass the codec, so types are checked."""

    def __init__(self, union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(features.link(union))
        self._ready: deque[T] = deque()
        self._arrived = asyncio.Event()

    def send(self, message: T) -> None:
        self._ready.append(self._decoder.decode(self._encoder.encode(message)))
        self._arrived.set()

    def send_all(self, messages: Sequence[T]) -> None:
        for message in messages:
            self.send(message)

    def drain(self) -> list[T]:
        messages = list(self._ready)
        self._ready.clear()
        return messages

    async def recv(self) -> T:
        while not self._ready:
            self._arrived.clear()
            await self._arrived.wait()
        return self._ready.popleft()

    def close(self) -> None:
        self._ready.clear()
