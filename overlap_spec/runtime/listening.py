"""Sockets that listen for TCP clients."""

import socket


def listening_socket(host: str | None, port: int, backlog: int) -> socket.socket:
    """A socket that does not block. A name with several addresses is served on its IPv4 one, which every client tries.

    `host`: None or "": every address of this machine. `port` 0: a free one. Raises: OSError.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
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
