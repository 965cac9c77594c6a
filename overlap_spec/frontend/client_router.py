"""The frontend's end of the public link: a ROUTER that no client can slow down.

A client is known by a number that is never used twice. It is gone when it closes its connection, when its process
answers none of ZeroMQ's own heartbeats, which need no event loop at its end, or when it leaves far too much unread. The
service then receives `Gone`, once, and what is sent to that client afterwards is dropped.

    recv  <- [a queue for each client, read in turn]   beyond its bounds: Rejected, unread
              a large message: counted, in turns, before it is decoded (`client_messages.py`)
    send  -> [ZeroMQ: SEND_QUEUE messages] -> [backlog]   a request beyond its bound: Unread, and no more of it
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from overlap_spec.client.link import LINGER_MS, Arrival, Duplex, Gone, Malformed, Unread
from overlap_spec.config import LinkSettings
from overlap_spec.errors import Overloaded
from overlap_spec.frontend.client_messages import (
    KEY_ID,
    LARGE_BYTES,
    Count,
    Decoder,
    Payload,
    SharedParts,
    is_cancel,
    read_head,
    request_ids,
    user_of,
)
from overlap_spec.frontend.overload import Backlog, ByteBudget, FairQueue
from overlap_spec.frontend.tcp_guard import MOST_FRAMES
from overlap_spec.messages import (
    MAX_WIRE_ID_CHARS,
    Cancel,
    ErrorCode,
    GenerateShared,
    Pong,
    Rejected,
    Shared,
    TextDeltas,
    ToClient,
    ToFrontendFromClient,
)
from overlap_spec.runtime.heap import GivingBack

SEND_QUEUE = 32  # messages per client inside ZeroMQ, beyond which our own queue counts bytes
RETRY_S = 0.02  # between attempts to send to a client that is behind
READS = 16  # messages that are taken from the socket before each turn; ZeroMQ takes them from its peers in turn
READ_FRAMES = 1024  # of these messages, after which no other one is taken
REFUSALS = 128  # in a turn, of what is not read
LAST_RESORT = 2  # times the bound of a client's bytes, or of its messages, beyond which it is given up
SAID_EVERY_S = 10.0  # at most so often the log names a client that is beyond its bounds
REMAINS_S = 5.0  # after a connection has ended: messages that it has left are still in the socket
GIVE_BACK_BYTES = 1 << 20  # of a message whose memory is given back


@dataclass
class ConnectedClient:
    """One client, as the router sees it. `user`: its user id; "": no key was asked for."""

    number: int
    identity: bytes
    user: str = ""
    backlog: Backlog = field(default_factory=Backlog)
    num_refused: int = 0  # since the log said so
    said_at: float = float("-inf")

    @property
    def key(self) -> str | None:
        """The name of its API key; None: it may name others, as it has the operator's key, or needed none."""
        return self.user.removeprefix(KEY_ID) if self.user.startswith(KEY_ID) else None

    def __str__(self) -> str:
        return f"client {self.number}" + (f" ({self.user})" if self.user else "")


class ClientRouter:
    """The frontend's end, over a bound ROUTER socket which it owns."""

    def __init__(self, socket: zmq.Socket[bytes], settings: LinkSettings, log: Callable[[str], None]) -> None:
        self._settings = settings
        self._log = log
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = Decoder()
        self._clients: dict[int, ConnectedClient] = {}
        self._by_identity: dict[bytes, ConnectedClient] = {}
        self._events: deque[tuple[int, Arrival]] = deque()  # what the service has to hear of at once
        budget: ByteBudget[int] = ByteBudget(settings.max_client_bytes, settings.max_bytes)
        self._waiting = FairQueue(budget, settings.max_client_messages)
        self._counting: OrderedDict[int, Count] = OrderedDict()  # clients whose next message is large; they are held
        self._counted: dict[int, Count] = {}  # those whose next message is large, and may be taken
        self._shared = SharedParts()
        self._asks_for_keys = settings.api_key is not None
        self._refused: deque[tuple[ConnectedClient, Payload, int]] = deque()  # messages that are not to be read
        self._unread = 0  # bytes in all backlogs
        self._next_number = 1
        self._disconnected_at = float("-inf")
        self._loop = asyncio.get_running_loop()
        self._monitor = Duplex(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        self._duplex = Duplex(socket)
        self._giving_back = GivingBack()
        self._retry: asyncio.TimerHandle | None = None  # sends backlogs
        self._watcher = asyncio.create_task(self._watch_connections(), name="client-connections")

    # --- to clients ---

    def number_from(self, number: int) -> None:
        """Give the next client the number after this one."""
        self._next_number = number + 1

    def send(self, client: int, message: ToClient) -> None:
        connected = self._clients.get(client)
        if connected is not None:
            self._push(connected, message)
            self._duplex.touched()

    def _push(self, client: ConnectedClient, message: ToClient) -> None:
        payload = self._encoder.encode(message)
        if self._send_backlog(client) and self._try_send(client, payload):
            return
        if client.number not in self._clients:
            return
        ids = request_ids(message)
        is_answer = not isinstance(message, TextDeltas | Rejected | Pong)
        if is_answer and client.backlog.num_bytes + len(payload) > self._settings.max_client_bytes:
            text = f"an answer of {len(payload)} bytes is dropped: {client.backlog.num_bytes} are unread already"
            payload = self._encoder.encode(Rejected(ids[0], ErrorCode.OVERLOADED, text))
        client.backlog.add(payload, ids)
        self._unread += len(payload)
        self._bound_unread(client, ids if isinstance(message, TextDeltas) else ())
        self._send_later()

    def _bound_unread(self, client: ConnectedClient, streams: Sequence[str]) -> None:
        """End the streams whose readers are too slow; as a last resort give up the client."""
        backlog, most = client.backlog, self._settings.max_client_bytes
        ended = [each for each in streams if backlog.of(each) > self._settings.max_queued_bytes]
        if streams and not ended and backlog.num_bytes > most:
            ended = [backlog.largest(streams)]
        self._events.extend((client.number, Unread(each, backlog.of(each))) for each in ended)
        if backlog.num_bytes > LAST_RESORT * most:
            self._give_up(client)
        elif self._unread > self._settings.max_bytes:
            self._give_up(max(self._clients.values(), key=lambda each: each.backlog.num_bytes))
        elif ended:
            self._duplex.wake()

    def _give_up(self, client: ConnectedClient) -> None:
        self._drop(client, f"left {client.backlog.num_bytes} bytes unread")

    def _try_send(self, client: ConnectedClient, payload: bytes) -> bool:
        try:
            self._duplex.socket.send_multipart((client.identity, payload), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(client, "closed its connection, or its process answers no more")
            return False
        return True

    def _send_backlog(self, client: ConnectedClient) -> bool:
        """Send what ZeroMQ has room for by now: the rest is unread. True if nothing is left."""
        while client.backlog:
            if not self._try_send(client, client.backlog.first):
                return False
            self._unread -= client.backlog.pop()
        return True

    def _send_backlogs(self) -> None:
        self._retry = None
        for client in list(self._clients.values()):
            self._send_backlog(client)
        if any(client.backlog for client in self._clients.values()):
            self._send_later()
        self._duplex.touched()

    def _send_later(self) -> None:
        if self._retry is None:
            self._retry = self._loop.call_later(RETRY_S, self._send_backlogs)

    # --- from clients ---

    async def recv(self) -> tuple[int, Arrival]:
        while True:
            self._refuse(REFUSALS)
            self._count()
            if self._waiting.turn_is_over:
                self._read(READS)
            if self._events:
                return self._events.popleft()
            if (self._refused or self._counting) and not self._waiting:
                await asyncio.sleep(0)
                continue
            if not self._waiting:
                await self._duplex.readable()
                continue
            if self._begins_count(*self._waiting.first):
                continue
            number, payload = self._waiting.take()
            arrival = self._arrived(number, self._read_payload(number, payload))
            if not self.more_bytes:
                self._shared.drop(number)
            if arrival is None:
                continue
            if len(payload) <= LARGE_BYTES:
                return number, arrival
            self._events.append((number, arrival))
            await asyncio.sleep(0)  # what is done with it has a turn of its own

    @property
    def more_bytes(self) -> int:
        return self._waiting.more_bytes

    def _read(self, most: int) -> None:
        """Take messages from the socket, unless some that were taken are still to be refused."""
        num_frames = 0
        for _ in range(most):
            read = None if self._refused or num_frames > READ_FRAMES else self._read_message()
            if read is None:
                return
            client, payloads = read
            num_frames += len(payloads)
            if len(payloads) > MOST_FRAMES:
                self._log(f"{client} is dropped: a message has {len(payloads)} frames, at most {MOST_FRAMES} are taken")
                self._drop(client, "sends messages of too many frames")
                continue
            is_known = client.number in self._clients  # it may have been found to be gone just now
            if not is_known or not self._waiting.put_together(client.number, payloads):
                self._put_some(client, payloads)
            if len(self._refused) <= READS:
                self._refuse(READS)

    def _begins_count(self, number: int, payload: Payload) -> bool:
        """Whether a message, the next one, is to be counted before it is taken. Its client is held."""
        if len(payload) <= LARGE_BYTES or number in self._counted:
            return False
        self._counting[number] = Count(payload)
        self._waiting.hold(number)
        return True

    def _count(self) -> None:
        """Count on in one of the messages that are counted. Clients take turns."""
        if self._counting:
            number, count = self._counting.popitem(last=False)
            if count.advance():
                self._counted[number] = count
                self._waiting.release(number)
            else:
                self._counting[number] = count

    def _read_payload(self, number: int, payload: Payload) -> ToFrontendFromClient | Malformed:
        """Decode a message that was taken, unless too much was counted in it."""
        if len(payload) > GIVE_BACK_BYTES:
            self._giving_back.soon()
        count = self._counted.pop(number, None)
        if count is not None and count.error:
            return Malformed(read_head(payload).request_id[:MAX_WIRE_ID_CHARS], "", count.error)
        return self._decoder.decode(payload, self._clients[number].key)

    def _put_some(self, client: ConnectedClient, payloads: Sequence[Payload]) -> None:
        """Queue what there is room for."""
        more = sum(map(len, payloads))
        for payload in payloads:
            more -= len(payload)
            is_known = client.number in self._clients
            if not is_known or not self._waiting.put(client.number, payload, more):
                self._refused.append((client, payload, more))

    def _refuse(self, most: int) -> None:
        """Refuse what is not read, so many messages of it at once."""
        while self._refused and most:
            self._not_queued(*self._refused.popleft())
            most -= 1

    def _read_message(self) -> tuple[ConnectedClient, list[Payload]] | None:
        """The next message, and whose it is. Large frames are not copied."""
        try:
            identity = self._duplex.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        payloads: list[Payload] = []
        frame = identity
        while frame.more:
            frame = self._duplex.socket.recv(copy=False)
            payloads.append(frame.bytes if len(frame) <= LARGE_BYTES else frame.buffer)
        return self._heard(identity.bytes, user_of(identity) if self._asks_for_keys else ""), payloads

    def _heard(self, identity: bytes, user: str = "") -> ConnectedClient:
        client = self._by_identity.get(identity)
        if client is not None and client.user != user:
            self._drop(client, "is gone: another key's client has taken its identity")
            client = None
        if client is None:
            client = ConnectedClient(self._next_number, identity, user)
            self._next_number += 1
            self._clients[client.number] = self._by_identity[identity] = client
            if time.monotonic() - self._disconnected_at < REMAINS_S:
                self._try_send(client, b"")  # what a client has left behind
        return client

    def _not_queued(self, client: ConnectedClient, payload: Payload, more: int) -> None:
        """Refuse a message that is not read. What only ends work is kept: it makes room."""
        head = read_head(payload)
        is_known, ends_work = client.number in self._clients, is_cancel(payload)
        if ends_work and is_known:
            self._waiting.put_anyway(client.number, payload, more)
        elif ends_work:
            self._keep_cancel(client, payload)
        if not is_known:
            return
        client.num_refused += 1
        self._say_refused(client)
        if self._waiting.of(client.number) > LAST_RESORT * self._settings.max_client_messages:
            self._drop(client, "sends far more than is read")
        elif head.request_id and head.kind != Cancel.__name__:
            text = (
                f"too much waits to be read: {self._waiting.of(client.number)} messages of this client,"
                f" {self._waiting.budget.of(client.number)} bytes of it and {self._waiting.budget.total} of all"
            )
            self._push(client, Rejected(head.request_id, ErrorCode.OVERLOADED, text))

    def _say_refused(self, client: ConnectedClient) -> None:
        now = time.monotonic()
        if now - client.said_at >= SAID_EVERY_S:
            self._log(f"{client} sends more than is read: {client.num_refused} messages of it refused")
            client.said_at, client.num_refused = now, 0

    def _arrived(self, client: int, message: ToFrontendFromClient | Malformed) -> Arrival | None:
        """What the service is to hear of a message; None: nothing."""
        try:
            match message:
                case Shared():
                    self._shared.put(client, message)
                    return None
                case GenerateShared():
                    return self._shared.request(client, message)
                case _:
                    return message
        except Overloaded as error:
            assert isinstance(message, GenerateShared)
            self.send(client, Rejected(message.request_id, ErrorCode.OVERLOADED, str(error)))
            return None

    # --- the end of a connection ---

    def close(self) -> None:
        """Close the socket; messages that ZeroMQ has queued have LINGER_MS to leave."""
        self._watcher.cancel()
        self._giving_back.close()
        if self._retry is not None:
            self._retry.cancel()
        self._duplex.socket.disable_monitor()
        self._monitor.close(0)
        self._duplex.close(LINGER_MS)

    def _drop(self, client: ConnectedClient, why: str) -> None:
        """Forget a client, and what it has asked for; what it has ended is ended."""
        del self._clients[client.number], self._by_identity[client.identity]
        self._unread -= client.backlog.num_bytes
        client.backlog.clear()
        kept = [payload for payload in self._waiting.drop(client.number) if is_cancel(payload)]
        self._counting.pop(client.number, None)
        self._counted.pop(client.number, None)
        for payload in kept:
            self._keep_cancel(client, payload)
        self._shared.drop(client.number)
        self._events.append((client.number, Gone(why)))
        self._duplex.wake()

    def _keep_cancel(self, client: ConnectedClient, payload: Payload) -> None:
        """What a client that is dropped has ended is ended."""
        if (arrival := self._arrived(client.number, self._decoder.decode(payload, client.key))) is not None:
            self._events.append((client.number, arrival))

    async def _watch_connections(self) -> None:
        """A ROUTER does not report whose connection broke, but it refuses to send there: try each client."""
        while True:
            await self._monitor.readable()
            while self._monitor.read() is not None:
                self._disconnected_at = time.monotonic()
            await asyncio.sleep(RETRY_S)  # the socket learns of it a little later than its monitor
            self._read(READS)
            for client in [client for client in self._clients.values() if not client.backlog]:
                self._try_send(client, b"")
            self._duplex.touched()
