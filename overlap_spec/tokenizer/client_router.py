"""The tokenizer's end of the public link: a ROUTER that no client can slow down.

A client is known by a number that is never used twice. It is gone when it closes its connection, is silent
for too long, or leaves more than `max_queued_bytes` unread; the service then receives `Gone`, once, and what
is sent to that client afterwards is dropped.

    send -> [ZeroMQ: SEND_QUEUE messages] -> [backlog: max_queued_bytes] -> Gone
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from overlap_spec.client.link import LINGER_MS, Arrival, Duplex, Gone, Malformed
from overlap_spec.errors import RequestError
from overlap_spec.messages import ToClient, ToTokenizerFromClient

SEND_QUEUE = 32  # messages per client inside ZeroMQ, beyond which our own queue counts bytes
RETRY_S = 0.02  # between attempts to send to a client that is behind


@dataclass
class ConnectedClient:
    """One client, as the router sees it."""

    number: int
    identity: bytes
    heard_at: float
    backlog: deque[bytes] = field(default_factory=deque)
    backlog_bytes: int = 0


class ClientRouter:
    """The tokenizer's end, over a bound ROUTER socket which it owns."""

    def __init__(self, socket: zmq.Socket[bytes], max_queued_bytes: int, timeout_s: float) -> None:
        self._max_queued_bytes = max_queued_bytes
        self._timeout_s = timeout_s
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToTokenizerFromClient] = msgspec.msgpack.Decoder(ToTokenizerFromClient)
        self._clients: dict[int, ConnectedClient] = {}
        self._by_identity: dict[bytes, ConnectedClient] = {}
        self._arrivals: deque[tuple[int, Arrival]] = deque()
        self._next_number = 1
        self._loop = asyncio.get_running_loop()
        self._monitor = Duplex(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        self._duplex = Duplex(socket)
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._watcher = asyncio.create_task(self._watch_connections(), name="client-connections")

    def send(self, client: int, message: ToClient) -> None:
        connected = self._clients.get(client)
        if connected is not None:
            self._push(connected, self._encoder.encode(message))
            self._duplex.touched()

    async def recv(self) -> tuple[int, Arrival]:
        while not self._arrivals:
            if not self._read():
                await self._duplex.readable()
        return self._arrivals.popleft()

    @property
    def has_more(self) -> bool:
        return bool(self._arrivals)

    def close(self) -> None:
        """Close the socket; messages that ZeroMQ has queued have LINGER_MS to leave."""
        self._watcher.cancel()
        for timer in self._timers.values():
            timer.cancel()
        self._duplex.socket.disable_monitor()
        self._monitor.close(0)
        self._duplex.close(LINGER_MS)

    def _heard(self, identity: bytes) -> ConnectedClient:
        client = self._by_identity.get(identity)
        if client is None:
            client = ConnectedClient(self._next_number, identity, 0.0)
            self._next_number += 1
            self._clients[client.number] = self._by_identity[identity] = client
            self._later(self._timeout_s / 2, self._drop_silent)
        client.heard_at = time.monotonic()
        return client

    def _read(self) -> bool:
        """Take what was sent together from the socket; False if there is nothing."""
        frames = self._duplex.read()
        if frames is None:
            return False
        number = self._heard(frames[0]).number
        self._arrivals.extend((number, self._decode(payload)) for payload in frames[1:])
        return True

    def _decode(self, payload: bytes) -> Arrival:
        try:
            return self._decoder.decode(payload)
        except Exception as error:  # untrusted bytes: also broken UTF-8, or nested too deep
            return _malformed(payload, error)

    def _push(self, client: ConnectedClient, payload: bytes) -> None:
        if not client.backlog and self._try_send(client, payload):
            return
        if client.number not in self._clients:
            return
        client.backlog.append(payload)
        client.backlog_bytes += len(payload)
        if client.backlog_bytes > self._max_queued_bytes:
            self._drop(client, f"left {client.backlog_bytes} bytes unread")
        else:
            self._later(RETRY_S, self._send_backlogs)

    def _try_send(self, client: ConnectedClient, payload: bytes) -> bool:
        try:
            self._duplex.socket.send_multipart((client.identity, payload), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(client, "closed its connection")
            return False
        return True

    def _send_backlogs(self) -> None:
        for client in [client for client in self._clients.values() if client.backlog]:
            while client.backlog and self._try_send(client, client.backlog[0]):
                client.backlog_bytes -= len(client.backlog.popleft())
        if any(client.backlog for client in self._clients.values()):
            self._later(RETRY_S, self._send_backlogs)
        self._duplex.touched()

    def _drop(self, client: ConnectedClient, why: str) -> None:
        del self._clients[client.number], self._by_identity[client.identity]
        client.backlog.clear()
        self._arrivals.append((client.number, Gone(why)))
        self._duplex.wake()

    def _drop_silent(self) -> None:
        """Runs twice per timeout while there are clients. Unread messages count as signs of life."""
        while self._read():
            pass
        oldest = time.monotonic() - self._timeout_s
        for client in [client for client in self._clients.values() if client.heard_at < oldest]:
            self._drop(client, f"was silent for {self._timeout_s:g} s")
        if self._clients:
            self._later(self._timeout_s / 2, self._drop_silent)
        self._duplex.wake()

    async def _watch_connections(self) -> None:
        """A ROUTER does not report whose connection broke, but it refuses to send there: try each client."""
        while True:
            await self._monitor.readable()
            while self._monitor.read() is not None:
                pass
            await asyncio.sleep(RETRY_S)  # the socket learns of it a little later than its monitor
            for client in [client for client in self._clients.values() if not client.backlog]:
                self._try_send(client, b"")
            self._duplex.touched()

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` once after a delay; a second call before that changes nothing."""
        if action not in self._timers:
            self._timers[action] = self._loop.call_later(delay_s, self._run_timer, action)

    def _run_timer(self, action: Callable[[], None]) -> None:
        del self._timers[action]
        action()


def _malformed(payload: bytes, error: Exception) -> Malformed:
    request_id = ""
    with contextlib.suppress(Exception):
        raw = msgspec.msgpack.decode(payload)[1]
        request_id = raw if isinstance(raw, str) else ""
    cause = error.__cause__
    if isinstance(cause, RequestError):
        return Malformed(request_id, cause.field, str(cause))
    return Malformed(request_id, _field_of(str(error)), str(error))


def _field_of(error: str) -> str:
    """The last name in a msgspec path: `... at `$[3].top_p`` is top_p."""
    _, found, path = error.rpartition(" - at `$")
    return path.rstrip("`").rpartition(".")[2].partition("[")[0] if found and "." in path else ""
