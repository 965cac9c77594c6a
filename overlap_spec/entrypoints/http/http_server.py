"""Serves an app on a socket from inside a running event loop, by uvicorn.

The caller owns signals and decides when to stop. The socket is bound before anything is announced.
"""

import asyncio
import contextlib
import gc
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.middleware import Middleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from overlap_spec import entrypoints
from overlap_spec.config import HttpLimits
from overlap_spec.runtime.transport import listening_socket

PROTECTION = "protection"
KEEP_ALIVE_S = 75
BACKLOG = 2048
# Connections that one turn of the event loop accepts. uvloop accepts one for each listening socket, and with hundreds
# of streams a turn takes milliseconds.
ACCEPTS = 16
POLL_S = 0.01
NEW_OBJECTS = 50_000  # after which Python looks for cycles of garbage
LAST_MOMENTS_S = 1.0  # for answers that were cut off to end


class HttpServer:
    """One server. `start`, then `stop`, once each. Raises: OSError if the address is taken."""

    def __init__(self, app: ASGIApp, host: str, port: int, limits: HttpLimits | None = None) -> None:
        self._address = (host, port)
        self._config = uvicorn.Config(
            app,
            lifespan="off",
            # h11: httptools is faster, but drops the body after `Upgrade: h2c`, and takes heads of any size
            http=_protocol(limits or HttpLimits()),
            log_config=None,
            log_level="warning",
            access_log=False,
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = _Server(self._config)
        self._sockets: list[socket.socket] = []
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port in use; the one asked for, unless that was 0."""
        assert self._sockets, "not started"
        port: int = self._sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Bind, listen and return once connections are accepted."""
        bound = listening_socket(*self._address, BACKLOG)
        self._sockets = [bound, *(bound.dup() for _ in range(ACCEPTS - 1))]
        self._serving = asyncio.create_task(self._server.serve(self._sockets))
        while not self._server.started:
            if self._serving.done():
                for each in self._sockets:
                    each.close()
                self._serving.result()
            await asyncio.sleep(POLL_S)

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Accept nothing new, let open answers end for `timeout_s`, cut off the rest."""
        if self._serving is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait((self._serving,), timeout=timeout_s)
        if not done:
            self._server.disconnect()
            await asyncio.wait((self._serving,), timeout=LAST_MOMENTS_S)
            self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._serving = None


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the supervisor has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def disconnect(self) -> None:
        """Close every connection. An endpoint that answers on one sees a client that has gone away."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def freeze_heap() -> None:
    """Let later garbage collections skip what is loaded by now, and be rare: each of them stops all streams.

    A request has hundreds of objects for as long as it runs, so by default every few requests bring a collection on,
    which finds all of them alive.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])


def body_bounds(limits: HttpLimits) -> list[Middleware]:
    """What bounds the bodies of an app's requests, in time and in bytes; nothing without `protection`."""
    module = entrypoints.find(PROTECTION, "connections")
    return [] if module is None else [Middleware(module.BodyBounds, limits=limits)]


def _protocol(limits: HttpLimits) -> Any:
    """What reads a connection: uvicorn's own without `protection`."""
    protocol, connections = entrypoints.find(PROTECTION, "http_protocol"), entrypoints.find(PROTECTION, "connections")
    if protocol is None or connections is None:
        return H11Protocol
    return protocol.protocol_factory(limits, connections.raise_file_limit())
