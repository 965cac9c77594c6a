"""Typed one-way links between actors, over ZeroMQ; sockets that listen for TCP clients.

A send never blocks, so the ring of actors cannot deadlock; what bounds it is the frontend's count of open requests. An
inbox is bound by its reader and lives as long as the actor; outlets connect. Never pickle.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec
import zmq

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

LAST_SEND_MS = 500  # how long a closed link may still send, so that an ActorFailed leaves
RECONNECT_MS = 20  # actors start in parallel: an outlet often connects before its reader has bound


class Inbox(Protocol[T]):
    """One actor's messages, of one union type. One reader: `recv` is not called twice at once."""

    def drain(self) -> list[T]:
        """Everything that has arrived; never waits."""

    async def recv(self) -> T:
        """The next message. Cancellation: loses nothing."""

    def close(self) -> None: ...


class Outlet(Protocol[T_contra]):
    """The sending end of a link."""

    def send(self, message: T_contra) -> None:
        """Queue a message; never blocks."""

    def close(self) -> None: ...


class BatchOutlet(Outlet[T_contra], Protocol[T_contra]):
    """One that can send several messages at once."""

    def send_all(self, messages: Sequence[T_contra]) -> None:
        """Queue messages, at least one: a reader that has read the first finds the others there."""


class ZmqInbox(Generic[T]):
    """A PULL socket that waits on its file descriptor: an idle actor burns no CPU."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        try:
            self.socket.bind(address)
        except zmq.ZMQError:
            self.socket.close()
            raise
        self._ready: deque[T] = deque()

    def drain(self) -> list[T]:
        self._read()
        messages = list(self._ready)
        self._ready.clear()
        return messages

    async def recv(self) -> T:
        while not self._ready:
            self._read()
            if not self._ready:
                await wait_readable(self.socket)
        return self._ready.popleft()

    def close(self) -> None:
        self.socket.close()

    def _read(self) -> None:
        while True:
            try:
                payload = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._ready.append(self._decoder.decode(payload))


class ZmqOutlet(Generic[T]):
    """A PUSH socket without a high-water mark."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LAST_SEND_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.connect(address)

    def send(self, message: T) -> None:
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


async def wait_readable(socket: zmq.Socket[bytes]) -> None:
    """Wait until a ZeroMQ socket has something to read.

    The socket's descriptor is edge-triggered and shared with the send side: it is only a hint, so the
    events are read again before and after arming it, and the caller reads until EAGAIN. Not for a socket that
    another task sends on: a send consumes the hint, and the waiter would sleep over a message.
    """
    loop = asyncio.get_running_loop()
    descriptor = socket.fileno()
    while not has_message(socket):
        woken: asyncio.Future[None] = loop.create_future()
        loop.add_reader(descriptor, _settle, woken)
        try:
            if not has_message(socket):
                await woken
        finally:
            loop.remove_reader(descriptor)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a ZeroMQ socket has something to read."""
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _settle(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


def listening_socket(host: str | None, port: int, backlog: int) -> socket.socket:
    """A socket that does not block. A name with several addresses is served on its IPv4 one, which every client tries.

    `host`: None or "": every address of this machine. `port` 0: a free one. Raises: OSError.
    """
    found = socket.getaddrinfo((host or "").strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(backlog)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound
