"""The public link: what both ends share, and the client's end.

Every message is one frame of msgpack; messages that are sent together arrive together. An empty frame has no meaning:
sending it fails if the client is no longer connected.

Whether a client is connected, its socket's monitor tells. ZeroMQ's own threads keep a connection at both
ends, and answer heartbeats while an event loop is busy. So a connection is lost only if the other process has ended, is
stopped or cut off, or refuses this client; not because it is busy.
"""

import asyncio
import contextlib
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from overlap_spec.config import MIB
from overlap_spec.errors import RequestError
from overlap_spec.messages import Asked, ToClient, ToFrontendFromClient
from overlap_spec.runtime.transport import has_message

MAX_MESSAGE_BYTES = 32 * MIB
LINGER_MS = 300  # for the last messages of a closed link
HEARTBEAT_MS = 2_500  # between a client's, where it sends them
UNANSWERED_MS = 5_000  # after which a heartbeat without an answer ends the connection
CONNECTION_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
PLAIN_USER = "overlap-spec"  # ZeroMQ's PLAIN mechanism wants a name beside the password, which is the API key


def is_secured(endpoint: str, api_key: str | None) -> bool:
    """True if the link asks for the API key: files are guarded by their directory, TCP ports by nothing."""
    return api_key is not None and endpoint.startswith("tcp://")


def pack_ids(ids: Iterable[int], field: str = "prompt") -> bytes:
    """Token ids as messages carry them. Raises: RequestError naming `field` if one is no 32-bit integer."""
    try:
        values = array("i", ids)
    except (TypeError, OverflowError) as error:
        raise RequestError(field, f"{field} must hold token ids: {error}") from error
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def id_array(packed: bytes) -> "array[int]":
    """Packed token ids as 32-bit integers, with no object for each of them. Raises: ValueError if the length is odd."""
    values = array("i", packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def unpack_ids(packed: bytes) -> list[int]:
    """Inverse of `pack_ids`. Raises: ValueError if the length is odd."""
    return id_array(packed).tolist()


@dataclass(frozen=True)
class Gone:
    """A client is gone for good. `why` is for the log."""

    why: str


@dataclass(frozen=True)
class Malformed:
    """A client sent something else than a message. `request_id` and `field` are "" where they are not known."""

    request_id: str
    field: str
    error: str


@dataclass(frozen=True)
class Unread:
    """A client has left too much of a request's answer unread."""

    request_id: str
    num_bytes: int


Arrival = Asked | Gone | Malformed | Unread


class ClientLink(Protocol):
    """The clients, as the frontend's service uses them."""

    def send(self, client: int, message: ToClient) -> None:
        """Queue a message; never blocks. A client that is gone is ignored."""

    async def recv(self) -> tuple[int, Arrival]:
        """The next message or event of a client. Cancellation: loses nothing."""

    @property
    def more_bytes(self) -> int:
        """How much of what was sent together with the last message is still to be received."""


class Duplex:
    """A socket that one coroutine reads while others send.

    Its descriptor is edge-triggered and shared: a send may swallow the edge that announces a message, so call
    `touched` after every use of the socket.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.fileno()
        self._loop.add_reader(self._descriptor, self.touched)

    def touched(self) -> None:
        """Wake the reader if there is something to read."""
        if self.has_messages:
            self._arrived.set()

    @property
    def has_messages(self) -> bool:
        return has_message(self.socket)

    def wake(self) -> None:
        """Make `readable` return although nothing has arrived."""
        self._arrived.set()

    def read(self) -> list[bytes] | None:
        """The frames of the next message, or None."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    async def readable(self) -> None:
        """Wait until something has arrived. Cancellation: safe."""
        self._arrived.clear()
        self.touched()
        await self._arrived.wait()

    def close(self, linger_ms: int) -> None:
        self._loop.remove_reader(self._descriptor)
        self.socket.close(linger_ms)


class ClientDealer:
    """A client's end. Its messages are queued in the client's memory while the client does not read.

    `heartbeats`: lose the connection if the process at the other end is stopped, or cut off. `monitor`: what tells of
    the connection.
    """

    def __init__(self, endpoint: str, api_key: str | None, heartbeats: bool = True) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)
        self._address = endpoint, api_key, heartbeats
        self.monitor, self._duplex = self._connect(*self._address)

    def renew(self) -> None:
        """Connect anew. Nothing that the old connection holds, of either end, leaves or arrives any more."""
        before = self.monitor, self._duplex
        self._duplex.socket.disable_monitor()
        self.monitor, self._duplex = self._connect(*self._address)
        for duplex in before:
            duplex.close(0)
            duplex.wake()  # its reader reads the new one

    def _connect(self, endpoint: str, api_key: str | None, heartbeats: bool) -> tuple[Duplex, Duplex]:
        """The monitor of a new socket, and the socket."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's thread reads on while this loop is busy, and answers heartbeats
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if heartbeats:
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, UNANSWERED_MS)
        if api_key is not None and is_secured(endpoint, api_key):
            socket.setsockopt(zmq.PLAIN_USERNAME, PLAIN_USER.encode())
            socket.setsockopt(zmq.PLAIN_PASSWORD, api_key.encode())
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        monitor, duplex = Duplex(socket.get_monitor_socket(CONNECTION_EVENTS)), Duplex(socket)
        socket.connect(endpoint)
        return monitor, duplex

    def send(self, message: ToFrontendFromClient) -> None:
        """Queue a message; never blocks. Raises: RequestError if it is no message or one too large."""
        self.send_all((message,))

    def send_all(self, messages: Sequence[ToFrontendFromClient]) -> None:
        """Queue messages, at least one, which the other end gets together. Raises: as `send`; then none is sent."""
        payloads = [self._encoded(message) for message in messages]
        with contextlib.suppress(zmq.Again):  # the other end has refused this client: the connection stays lost
            self._duplex.socket.send_multipart(payloads, zmq.NOBLOCK)
        self._duplex.touched()

    def _encoded(self, message: ToFrontendFromClient) -> bytes:
        try:
            payload = self._encoder.encode(message)
        except (OverflowError, TypeError, ValueError, RecursionError) as error:  # a conversation may hold anything
            raise RequestError("prompt", f"prompt cannot be sent: {error}") from error
        if len(payload) > MAX_MESSAGE_BYTES:
            raise RequestError("prompt", f"the request has {len(payload)} bytes, at most {MAX_MESSAGE_BYTES} are taken")
        return payload

    async def recv(self) -> ToClient:
        """The next message. Cancellation: loses nothing."""
        while True:
            frames = self._duplex.read()
            if frames is None:
                await self._duplex.readable()
            elif frames[-1]:  # an empty frame only tests the connection
                return self._decoder.decode(frames[-1])

    async def close(self) -> None:
        """Close the socket; queued messages have LINGER_MS to leave. Cancellation: the socket is closed anyway."""
        self._duplex.socket.disable_monitor()
        self.monitor.close(0)
        self._duplex.close(LINGER_MS)
        await asyncio.to_thread(self._context.term)


class Connection:
    """One client's connection, which is not there at first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lost_at = clock()
        self._is_there = False
        self._was_made = asyncio.Event()

    @property
    def lost_s(self) -> float:
        """For how many seconds there has been no connection; 0 while there is one."""
        return 0.0 if self._is_there else self._clock() - self._lost_at

    def changed(self, is_there: bool) -> None:
        """Note that it is made, or is lost."""
        if self._is_there and not is_there:
            self._lost_at = self._clock()
        elif is_there and not self._is_there:
            self._was_made.set()
        self._is_there = is_there

    async def made(self, timeout_s: float) -> None:
        """Wait until it is made, again perhaps, but no longer than that. Cancellation: safe."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._was_made.wait()
        self._was_made.clear()

    async def follow(self, link: ClientDealer) -> None:
        """Read what the monitor of a link's socket tells, without end. Cancellation: safe."""
        while True:
            monitor = link.monitor
            while (frames := monitor.read()) is not None:
                event = parse_monitor_message(frames)["event"]
                self.changed(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
            await monitor.readable()
