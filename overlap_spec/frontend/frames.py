"""Counts what a ZeroMQ peer sends, before ZeroMQ keeps it: it would hold an unfinished message without any bound.

    greeting (64 bytes) | command: flags, length, body | .. | message: frames of flags, length, body; MORE but the last

ZMTP 3 (rfc.zeromq.org/spec/23). Only heads are read, and the bodies of commands before the first message, which have
the key. A peer whose handshake has not ended may send commands alone.
"""

from overlap_spec.client.link import MAX_MESSAGE_BYTES

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
