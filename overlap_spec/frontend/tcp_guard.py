"""Listens on the link's TCP address, and passes connections on to the router's file as long as they keep to bounds.

    peer ──tcp──► FrameCounter ──ipc──► ROUTER
         ◄──────────────────────────────

ZeroMQ gives its socket whole messages, and keeps what there is of an unfinished one: no socket option bounds that, nor
the frames of a message. So heads of frames are counted here, before ZeroMQ has them; a peer that exceeds a bound is cut
off, with a line in the log. ipc endpoints are reached by processes of this user alone, and have no such relay.

What is counted of a peer:

    greeting (64 bytes) | command: flags, length, body | .. | message: frames of flags, length, body; MORE but the last

ZMTP 3 (rfc.zeromq.org/spec/23). Only heads are read, and the bodies of commands before the first message, which have
the key. A peer whose handshake has not ended may send commands alone.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable

from overlap_spec.client.link import MAX_MESSAGE_BYTES
from overlap_spec.errors import ConfigError
from overlap_spec.runtime.transport import listening_socket

GREETING_BYTES = 64
MOST_COMMAND_BYTES = 4096  # a handshake with the longest key, or a heartbeat, is far shorter
MOST_COMMANDS = 8  # of a handshake
MOST_FRAMES = 4096  # of a message: 2,048 requests that are sent together, and what they share
FRAMES_OF_A_TURN = 1024  # a millisecond or two, if they are empty
MORE, LONG, COMMAND = 1, 2, 4  # bits of a frame's flags
READY = b"\x05READY"
HELLO = b"\x05HELLO"


class FrameError(Exception):
    """A peer has sent something else than ZMTP 3, or more than it may."""


class FrameCounter:
    """What one side of a connection has sent. `most_bytes`: of a message.

    `held`: bytes of a message that is not complete, as its heads promise them. `commands`: bodies of the handshake's.
    """

    def __init__(self, most_bytes: int) -> None:
        self.held = 0
        self.commands: list[bytes] = []
        self.num_commands = 0
        self.takes_messages = False  # set by the owner when the router has accepted the peer
        self._most_bytes = most_bytes
        self._greeting = b""
        self._head = b""  # the beginning of one
        self._flags = 0
        self._left = 0  # bytes of the frame's body
        self._frames = 0  # of the message
        self._body: bytearray | None = None  # of a command that is kept

    def feed(self, data: bytes, at: int = 0) -> int:
        """Read on from a position, up to FRAMES_OF_A_TURN. Returns where it ended. Raises: FrameError, for the log."""
        if len(self._greeting) < GREETING_BYTES:
            begin, at = at, at + GREETING_BYTES - len(self._greeting)
            self._greeting += data[begin:at]
            _check_greeting(self._greeting)
        frames = 0
        while at < len(data) and frames < FRAMES_OF_A_TURN:
            if self._left:
                at = self._skip(data, at)
            else:
                at = self._read_head(data, at)
                frames += 1
        return min(at, len(data))

    def _skip(self, data: bytes, at: int) -> int:
        end = min(at + self._left, len(data))
        if self._body is not None:
            self._body += data[at:end]
        self._left -= end - at
        if not self._left:
            self._frame_ends()
        return end

    def _read_head(self, data: bytes, at: int) -> int:
        """Flags and length, which may come in pieces. Most heads are two bytes, and here at once."""
        flags = self._head[0] if self._head else data[at]
        size = 9 if flags & LONG else 2
        missing = size - len(self._head)
        head = self._head + data[at : at + missing]
        if len(head) < size:
            self._head = head
        else:
            self._head = b""
            self._frame_begins(flags, head[1] if size == 2 else int.from_bytes(head[1:]))
        return at + missing if len(head) == size else len(data)

    def _frame_begins(self, flags: int, length: int) -> None:
        self._flags, self._left = flags, length
        if flags & COMMAND:
            self._command_begins(length)
        elif not self.takes_messages:
            raise FrameError("it sends a message before its key has been looked at")
        else:
            self._frames += 1
            self.held += length
            if self._frames > MOST_FRAMES:
                raise FrameError(f"a message has more than {MOST_FRAMES} frames")
            if length > MAX_MESSAGE_BYTES:
                raise FrameError(f"a frame has {length} bytes, at most {MAX_MESSAGE_BYTES} are taken")
            if self.held > self._most_bytes:
                raise FrameError(f"a message has more than {self._most_bytes} bytes")
        if flags & ~(MORE | LONG | COMMAND):
            raise FrameError(f"a frame has the flags {flags:#x}")
        if not length:
            self._frame_ends()

    def _command_begins(self, length: int) -> None:
        if length > MOST_COMMAND_BYTES:
            raise FrameError(f"a command has {length} bytes, at most {MOST_COMMAND_BYTES} are taken")
        self.num_commands += 1
        if not self.takes_messages:
            if len(self.commands) == MOST_COMMANDS:
                raise FrameError(f"its handshake has more than {MOST_COMMANDS} commands")
            self._body = bytearray()

    def _frame_ends(self) -> None:
        if self._body is not None:
            self.commands.append(bytes(self._body))
            self._body = None
        elif not self._flags & (MORE | COMMAND):
            self._frames = self.held = 0


def _check_greeting(greeting: bytes) -> None:
    """Signature and major version, as far as they have come. Raises: FrameError."""
    is_zmtp = greeting[:1] in (b"", b"\xff") and (len(greeting) < 10 or greeting[9] == 0x7F)
    if not is_zmtp or (len(greeting) > 10 and greeting[10] < 3):
        raise FrameError("it does not speak ZMTP 3")


def password_of(commands: list[bytes]) -> bytes:
    """The password in the PLAIN mechanism's first command; b"" without one."""
    hello = commands[0] if commands else b""
    if not hello.startswith(HELLO):
        return b""
    rest = hello[len(HELLO) :]
    user = rest[0] if rest else 0
    password = rest[1 + user :]
    return password[1 : 1 + password[0]] if password else b""


READ_BYTES = 64 << 10  # from either side, in a turn
MOST_CONNECTIONS = 1024
MOST_OF_AN_ADDRESS = 512
DESCRIPTORS = 3 * MOST_CONNECTIONS + 1024  # two here and one of ZeroMQ's for each
HANDSHAKE_S = 10.0  # from the connection to its first message, or to the end of its handshake
MESSAGE_S = 60.0  # from a message's first byte to its last
LOOK_S = 1.0  # between looks at the clock
BACKLOG = 256

log = logging.getLogger(__name__)


class Connection:
    """One peer. `name_of`: the name of the API key that is a password, for the log."""

    def __init__(self, peer: socket.socket, address: str, most_bytes: int, name_of: Callable[[bytes], str]) -> None:
        self.frames = FrameCounter(most_bytes)
        self.address = address
        self.back = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.begun = self.since = time.monotonic()  # of the connection, of the message
        self._peer = peer
        self._name_of = name_of
        self._from_router = FrameCounter(most_bytes)
        self._loop = asyncio.get_running_loop()

    def __str__(self) -> str:
        name = self._name_of(password_of(self.frames.commands))
        return f"the ZMQ peer {self.address}" + (f" ({name})" if name else "")

    @property
    def is_late(self) -> FrameError | None:
        """What it has taken too long for."""
        now = time.monotonic()
        is_known = self.frames.takes_messages and self.frames.num_commands > 0
        if not is_known and now - self.begun > HANDSHAKE_S:
            return FrameError(f"its handshake takes more than {HANDSHAKE_S:.0f} s")
        if self.frames.held and now - self.since > MESSAGE_S:
            return FrameError(f"a message is unfinished after {MESSAGE_S:.0f} s")
        return None

    async def forward(self, noted: Callable[["Connection"], None]) -> None:
        """Pass on what the peer sends, until it ends. `noted`: is called when what it holds has changed.

        Raises: FrameError, OSError.
        """
        buffer = bytearray(READ_BYTES)
        view = memoryview(buffer)
        while count := await self._loop.sock_recv_into(self._peer, buffer):
            data, end = bytes(view[:count]), 0
            while end < count:
                begin, before = end, self.frames.held
                end = self.frames.feed(data, begin)
                if self.frames.held != before:
                    self.since = time.monotonic() if not before else self.since
                    noted(self)
                await self._loop.sock_sendall(self.back, view[begin:end])
                if end < count or count == READ_BYTES:
                    await asyncio.sleep(0)  # there may be more, and others have their turn
        self.back.shutdown(socket.SHUT_WR)  # what has been passed on is still read

    async def answer(self) -> None:
        """Pass on what the router sends, until it ends. Raises: OSError."""
        buffer = bytearray(READ_BYTES)
        view = memoryview(buffer)
        while count := await self._loop.sock_recv_into(self.back, buffer):
            if not self.frames.takes_messages:
                self._see_ready(bytes(view[:count]))
            await self._loop.sock_sendall(self._peer, view[:count])
            if count == READ_BYTES:
                await asyncio.sleep(0)

    def close(self) -> None:
        """Close both ends."""
        self._peer.close()
        self.back.close()

    def _see_ready(self, data: bytes) -> None:
        """The router ends the handshake when it has accepted the peer's key."""
        self._from_router.feed(data)  # few frames: a turn is enough
        self.frames.takes_messages = any(command.startswith(READY) for command in self._from_router.commands)


class TcpGuard:
    """Listens on a bound socket. Needs a running loop. `router`: the file that the router listens on."""

    def __init__(
        self, listener: socket.socket, router: str, bounds: tuple[int, int], name_of: Callable[[bytes], str]
    ) -> None:
        self._listener = listener
        self._router = router
        self._most_bytes, self._most_of_all = bounds  # held for one unfinished message, and for all
        self._name_of = name_of
        self._open: dict[asyncio.Task[None], Connection] = {}
        self._of_address: Counter[str] = Counter()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]
        _allow_files()

    def close(self) -> None:
        """Stop listening and cut all connections off."""
        for task in (*self._tasks, *self._open):
            task.cancel()
        self._listener.close()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, address = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptor is left
                log.warning("a ZMQ peer cannot be let in: %s", error)
                await asyncio.sleep(LOOK_S)
                continue
            host, port = address[:2]
            if len(self._open) >= MOST_CONNECTIONS or self._of_address[host] >= MOST_OF_AN_ADDRESS:
                log.warning(
                    "the ZMQ peer %s:%d is turned away: %d connections are open, %d of its address",
                    *(host, port, len(self._open), self._of_address[host]),
                )
                peer.close()
                continue
            peer.setblocking(False)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(peer, f"{host}:{port}", self._most_bytes, self._name_of)
            task = asyncio.create_task(self._serve(connection))
            self._open[task] = connection
            self._of_address[host] += 1
            task.add_done_callback(self._ended)
            await asyncio.sleep(0)

    def _ended(self, task: asyncio.Task[None]) -> None:
        connection = self._open.pop(task)
        connection.close()
        host = connection.address.rpartition(":")[0]
        self._of_address[host] -= 1
        self._of_address += Counter()  # without those of which none is left
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: its relay has failed", connection, exc_info=error)

    async def _serve(self, connection: Connection) -> None:
        """Pass on what comes from either side, until one ends or breaks a rule."""
        connection.back.setblocking(False)
        with contextlib.suppress(OSError):  # one of them has closed its end, or was reset
            connection.back.connect(self._router)
            ways = [asyncio.create_task(connection.forward(self._bound)), asyncio.create_task(connection.answer())]
            try:
                done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
                for way in done:
                    way.result()
            except FrameError as error:
                log.warning("%s is dropped: %s", connection, error)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    def _bound(self, changed: Connection) -> None:
        """Cut the one off that holds most, if all hold too much."""
        if changed.frames.held and sum(each.frames.held for each in self._open.values()) > self._most_of_all:
            task = max(self._open, key=lambda each: self._open[each].frames.held)
            error = FrameError(f"unfinished messages of all peers take more than {self._most_of_all} bytes")
            if self._open[task] is changed:
                raise error
            self._drop(task, error)

    def _drop(self, task: asyncio.Task[None], error: FrameError) -> None:
        log.warning("%s is dropped: %s", self._open[task], error)
        task.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for task, connection in list(self._open.items()):
                if (error := connection.is_late) is not None:
                    self._drop(task, error)


def listen(endpoint: str) -> tuple[socket.socket, str]:
    """A socket that listens on tcp://HOST:PORT, and its address with the port in use. Raises: ConfigError."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    try:
        number = 0 if port == "*" else int(port)
        bound = listening_socket(None if host == "*" else host, number, BACKLOG)
    except (OSError, ValueError) as error:
        raise ConfigError("zmq_endpoint", f"cannot bind {endpoint}: {error}") from error
    name, used = bound.getsockname()[:2]
    return bound, f"tcp://[{name}]:{used}" if ":" in name else f"tcp://{name}:{used}"


def _allow_files() -> None:
    """Let this process open as many files as connections need, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
