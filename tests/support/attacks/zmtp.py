"""A ZMTP client of its own (RFC 23, 24), which sends frames of a message that never ends."""

import socket
import struct
import time

from overlap_spec.client.link import PLAIN_USER

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00%s\x00" + bytes(31)
MORE, LONG, COMMAND = 1, 2, 4


def more_frames(host: str, port: int, key: str, number: int, num_bytes: int, silent_s: float) -> int:
    """Send frames that announce another one, `number` at most. Returns how many were taken before the end.

    `key`: "" for the mechanism without one. The connection is held for `silent_s` after the last frame, or until it is
    closed.
    """
    sent = 0
    with socket.create_connection((host, port), timeout=30) as connection:
        try:
            _shake_hands(connection, key)
            frame = struct.pack("!BQ", MORE | LONG, num_bytes) + bytes(num_bytes)
            while sent < number:
                connection.sendall(frame)
                sent += 1
        except OSError:
            return sent
        return sent if _stays_open(connection, silent_s) else sent - 1


def _shake_hands(connection: socket.socket, key: str) -> None:
    mechanism = b"PLAIN" if key else b"NULL"
    connection.sendall(GREETING % mechanism.ljust(20, b"\0"))
    _read(connection, 64)
    ready = b"\x0bSocket-Type" + struct.pack("!I", 6) + b"DEALER" + b"\x08Identity" + struct.pack("!I", 0)
    if key:
        hello = bytes([len(PLAIN_USER)]) + PLAIN_USER.encode() + bytes([len(key)]) + key.encode()
        _command(connection, b"HELLO", hello)
        _read_command(connection)
        _command(connection, b"INITIATE", ready)
    else:
        _command(connection, b"READY", ready)
    _read_command(connection)


def _command(connection: socket.socket, name: bytes, data: bytes) -> None:
    body = bytes([len(name)]) + name + data
    connection.sendall(struct.pack("!BB", COMMAND, len(body)) + body)


def _read_command(connection: socket.socket) -> bytes:
    kind, size = _read(connection, 2)
    if kind & LONG:
        size = struct.unpack("!Q", bytes([size]) + _read(connection, 7))[0]
    return _read(connection, size)


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        data = connection.recv(size - len(found))
        if not data:
            raise ConnectionError("closed")
        found += data
    return found


def _stays_open(connection: socket.socket, seconds: float) -> bool:
    """Whether the other end keeps it open for so long."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            if not connection.recv(1 << 16):
                return False
        except TimeoutError:
            return True
        except OSError:
            return False
    return True


def empty_frames(host: str, port: int, key: str, number: int, silent_s: float) -> int:
    """Send as many empty frames of one message that does not end. Returns as `more_frames`, about."""
    sent, some = 0, 10_000
    with socket.create_connection((host, port), timeout=30) as connection:
        try:
            _shake_hands(connection, key)
            while sent < number:
                connection.sendall(bytes([MORE, 0]) * some)
                sent += some
        except OSError:
            return sent
        return sent if _stays_open(connection, silent_s) else sent - 1
