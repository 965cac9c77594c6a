"""The links of the ring, frontend to scheduler to worker and back: Unix sockets without an I/O thread.

ZeroMQ passes a message through an I/O thread at either end: three wake-ups where a plain socket needs one, and none if
its reader is still polling. So requests, plans, results and tokens travel here; the supervisor's messages travel by
ZeroMQ, and `StepInbox` reads both.

The worker's reader binds an inbox before its first message is sent; an outlet connects with that message. No more plans
are unread than there are steps in flight, but of requests, grammars and tokens there may be more than a socket's buffer
holds. `QueuedOutlet`, for event loops, keeps what there is no room for. `StepOutlet`, for the worker's thread, waits
until there is room: its reader is the scheduler, which never waits to send.
What does not fit into one (the plan of a long prompt) lies in an anonymous file, and the packet holds its descriptor.
"""

import asyncio
import contextlib
import errno
import logging
import os
import select
import socket
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from overlap_spec.runtime.transport import ZmqInbox, has_message

T = TypeVar("T")

PACKET_BYTES = 1 << 14  # larger messages travel in a file; a socket's buffer holds 200 KiB by default
MANY = b"\x01"  # begins a packet of several messages; no single one begins so
IN_FILE = b"\0"  # the packet that carries a descriptor: an empty one would end the connection
ONE_DESCRIPTOR = socket.CMSG_SPACE(array("i", [0]).itemsize)
RETRY_S = 0.005  # between attempts to send what the reader has no room for, or before it has bound
TRY_AGAIN = (errno.EAGAIN, errno.ENOENT, errno.ECONNREFUSED, errno.ETOOMANYREFS, errno.ENOBUFS)
POLLS_BETWEEN = 32  # of the step link, for one of the others
OTHERS_S = 0.05  # at most between two polls of the others, where a step takes longer than many polls

log = logging.getLogger(__name__)


class SpinPolicy:
    """How long a reader polls before it sleeps. An answer in flight arrives sooner than a sleeping thread wakes up.

    `spin_s` 0: it sleeps at once, as it must where cores are few. After `spin_s` without a message it sleeps too.
    """

    def __init__(self, spin_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._spin_s = spin_s
        self._clock = clock
        self._until = 0.0

    def renew(self) -> None:
        """Note an event: the next one may follow soon."""
        if self._spin_s:
            self._until = self._clock() + self._spin_s

    @property
    def lasts(self) -> bool:
        """Whether to poll once more."""
        return self._spin_s > 0 and self._clock() < self._until


class StepOutlet(Generic[T]):
    """The sending end of a step link from a plain thread. Messages to a reader that is gone are lost: the supervisor
    ends the run.
    """

    def __init__(self, path: Path) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connected = self._has_lost = False

    def send(self, message: T) -> None:
        """Send a message. Waits while the socket's buffer is full of messages that are unread."""
        payload = self._encoder.encode(message)
        try:
            if not self._connected:
                self._socket.connect(self._path)
                self._connected = True
            send_packet(self._socket, payload)
        except (ConnectionError, FileNotFoundError) as error:
            if not self._has_lost:
                log.info("the reader of %s is gone (%s): messages to it are lost", self._path, error)
            self._has_lost = True

    def close(self) -> None:
        """Messages already sent still arrive."""
        self._socket.close()


class QueuedOutlet(Generic[T]):
    """The sending end of a step link from an event loop. What cannot leave yet waits in order, and is not lost.

    That is so while the reader has not bound its inbox, and if it reads nothing while a socket's buffer fills.
    Messages to a reader that is gone are lost.
    """

    def __init__(self, path: Path) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._connected = False
        self._unsent: deque[bytes] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def send(self, message: T) -> None:
        """Send a message, or keep it for later; never blocks."""
        self.send_payload(self._encoder.encode(message))

    def send_payload(self, payload: bytes) -> None:
        """The same with a message that is encoded already."""
        self._unsent.append(payload)
        self._flush()

    def send_all(self, messages: Sequence[T]) -> None:
        """The same with several messages, which the reader finds together."""
        self.send_payload(MANY + self._encoder.encode(messages))

    def close(self) -> None:
        """Messages already sent still arrive."""
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()

    def _flush(self) -> None:
        while self._unsent:
            if not self._sent(self._unsent[0]):
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._flush_again)
                return
            self._unsent.popleft()

    def _flush_again(self) -> None:
        self._timer = None
        self._flush()

    def _sent(self, payload: bytes) -> bool:
        """Whether this one needs no further attempt."""
        try:
            if not self._connected:
                self._socket.connect(self._path)
                self._connected = True
            send_packet(self._socket, payload)
        except OSError as error:
            if error.errno in TRY_AGAIN:
                return False
            if not isinstance(error, ConnectionError):
                raise
            log.debug("the reader of %s is gone (%s): a message to it is lost", self._path, error)
        return True


class SharedOutlet(Generic[T]):
    """The sending end of step links to several readers, which get the same bytes in the same order."""

    def __init__(self, outlets: Sequence[QueuedOutlet[T]]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._outlets = outlets

    def send(self, message: T) -> None:
        """Encode a message once, and send it to all; never blocks."""
        self._send_payload(self._encoder.encode(message))

    def send_all(self, messages: Sequence[T]) -> None:
        """The same with several messages, which each reader finds together."""
        self._send_payload(MANY + self._encoder.encode(messages))

    def close(self) -> None:
        """Messages already sent still arrive."""
        for outlet in self._outlets:
            outlet.close()

    def _send_payload(self, payload: bytes) -> None:
        for outlet in self._outlets:
            outlet.send_payload(payload)


class StepInbox(Generic[T]):
    """Reads step links and a ZeroMQ inbox as one. `recv` is for an event loop, `poll` and `wait` for a plain thread.

    Nothing follows on a message of type `unrelated`, so `recv` does not poll after it.
    """

    def __init__(
        self, others: ZmqInbox[T], path: Path, union: Any, spin: SpinPolicy, unrelated: type | tuple[()] = ()
    ) -> None:
        self._others = others
        self._spin = spin
        self._unrelated = unrelated
        self._may_follow = True  # a message soon, on what was received last
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._many: msgspec.msgpack.Decoder[list[T]] = msgspec.msgpack.Decoder(list[union])
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(str(path))
        except OSError:  # it is taken
            self._listener.close()
            raise
        self._listener.listen()
        self._listener.setblocking(False)
        self._senders: list[_Sender] = []
        self._ready: deque[T] = deque()
        self._polls = 0
        self._others_read_at = 0.0

    def drain(self) -> list[T]:
        """Everything that has arrived; never waits."""
        self._read_others()  # first, as it finds new connections
        self._read_steps()
        self._may_follow = self._may_follow or bool(self._ready)
        return self._take()

    def poll(self) -> list[T]:
        """What has arrived on step links and, now and then, elsewhere; never waits."""
        self._poll()
        return self._take()

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until something can be read, or for `timeout_s`; the next `poll` reads every source."""
        if not has_message(self._others.socket):  # its descriptor signals only messages that arrive after this check
            select.select(self._descriptors(), (), (), timeout_s)
        self._polls = 0

    async def recv(self) -> T:
        """The next message. Polls while spin lasts, then sleeps. Cancellation: loses nothing."""
        if self._may_follow:
            self._spin.renew()
        while not self._ready:
            self._poll()
            if not self._ready and not self._spin.lasts:
                await self._readable()
        message = self._ready.popleft()
        self._may_follow = not isinstance(message, self._unrelated)
        return message

    def close(self) -> None:
        """Close the step links; the owner of the ZeroMQ inbox closes that."""
        for sender in self._senders:
            sender.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _take(self) -> list[T]:
        messages = list(self._ready)
        self._ready.clear()
        return messages

    def _poll(self) -> None:
        if self._polls == 0 or time.monotonic() - self._others_read_at > OTHERS_S:
            self._read_others()
        self._read_steps()
        self._polls = (self._polls + 1) % POLLS_BETWEEN

    def _read_steps(self) -> None:
        for sender in self._senders:
            while not sender.gone and (payload := sender.receive()) is not None:
                if payload[0] == MANY[0]:
                    self._ready.extend(self._many.decode(payload[1:]))
                else:
                    self._ready.append(self._decoder.decode(payload))
        if any(sender.gone for sender in self._senders):
            self._senders = [sender for sender in self._senders if not sender.gone]

    def _read_others(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._senders.append(_Sender(self._listener.accept()[0]))
        self._ready.extend(self._others.drain())
        self._others_read_at = time.monotonic()

    def _descriptors(self) -> list[int]:
        return [self._others.socket.fileno(), self._listener.fileno(), *(sender.fileno() for sender in self._senders)]

    async def _readable(self) -> None:
        """Wait until something can be read; the next poll reads every source."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        descriptors = self._descriptors()
        for descriptor in descriptors:
            loop.add_reader(descriptor, woken.set)
        try:
            if not has_message(self._others.socket):  # as in `wait`
                await woken.wait()
        finally:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)
        self._polls = 0


class _Sender:
    """One connection to an inbox."""

    def __init__(self, connection: socket.socket) -> None:
        self.gone = False
        self._connection = connection
        self._packet = memoryview(bytearray(PACKET_BYTES))

    def receive(self) -> bytes | memoryview | None:
        """The next message, valid until the next call; None if there is none."""
        try:
            size, rights, _, _ = self._connection.recvmsg_into([self._packet], ONE_DESCRIPTOR, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            size, rights = 0, []
        if size == 0:
            self.gone = True
            self.close()
            return None
        return _file_content(array("i", rights[0][2])[0]) if rights else self._packet[:size]

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()


def send_packet(connection: socket.socket, payload: bytes) -> None:
    """Send a payload as one packet, a large one in a file. Raises: OSError."""
    if len(payload) <= PACKET_BYTES:
        connection.send(payload)
        return
    with open(os.memfd_create("step"), "wb") as file:
        file.write(payload)
        file.flush()
        socket.send_fds(connection, [IN_FILE], [file.fileno()])


def _file_content(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        file.seek(0)  # both ends share a position, which is where the sender stopped
        return file.read()
