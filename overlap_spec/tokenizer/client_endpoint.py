"""Binds the public endpoint: addresses, stale files, the API key.

An ipc endpoint is guarded by file permissions. A tcp endpoint with an API key speaks ZeroMQ's PLAIN
mechanism: the key is the password, and the ZAP handler of pyzmq compares it.
"""

import contextlib
import hmac
import logging
import os
import socket
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from overlap_spec.client.link import MAX_MESSAGE_BYTES, PLAIN_USER, is_secured
from overlap_spec.config import LinkSettings
from overlap_spec.errors import ConfigError
from overlap_spec.tokenizer.client_router import SEND_QUEUE, ClientRouter

ZAP_DOMAIN = "overlap-spec"
HEARTBEATS = 4  # in the time for which a client may be silent

log = logging.getLogger(__name__)


class ClientEndpoint:
    """The bound endpoint: clients connect to `address`, and `router` reads them. Needs a running loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], settings: LinkSettings, default: str) -> None:
        asked = settings.client_endpoint or default
        self._authenticator = _Authenticator(context, settings) if is_secured(asked, settings.api_key) else None
        try:
            router_socket = _bind(context, asked, self._authenticator is not None, settings.client_timeout_s)
        except BaseException:
            self._stop_authenticator()
            raise
        self.address = router_socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.router = ClientRouter(router_socket, settings, log.warning)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; the router sends what is queued before it closes."""
        self.router.close()
        self._stop_authenticator()
        if self.address.startswith("ipc://"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.removeprefix("ipc://"))

    def _stop_authenticator(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()


class _Authenticator(AsyncioAuthenticator):
    """Accepts any key as the password of one name. Its debug lines, which show passwords, are never written."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], settings: LinkSettings) -> None:
        logger = logging.getLogger(f"{__name__}.zap")
        logger.setLevel(logging.INFO)
        super().__init__(context, log=logger)
        self.start()
        self._keys = [key.encode() for key in (settings.api_key, *settings.further_keys, settings.admin_key) if key]
        self.configure_plain(ZAP_DOMAIN)

    def _authenticate_plain(self, domain: str, username: str, password: str) -> tuple[bool, bytes]:
        given = password.encode()
        known = username == PLAIN_USER and any([hmac.compare_digest(given, key) for key in self._keys])
        return known, b"" if known else b"Invalid password"


def _bind(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, secured: bool, timeout_s: float) -> zmq.Socket[bytes]:
    """Raises: ConfigError if the address cannot be bound."""
    if endpoint.startswith("ipc://"):
        remove_stale_file(Path(endpoint.removeprefix("ipc://")))
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, SEND_QUEUE)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    router.setsockopt(zmq.HEARTBEAT_IVL, max(1, round(timeout_s * 1e3 / HEARTBEATS)))
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(timeout_s * 1e3))
    if secured:
        router.setsockopt(zmq.PLAIN_SERVER, 1)
        router.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    if "[" in endpoint:
        router.setsockopt(zmq.IPV6, 1)
    old_mask = os.umask(0o177)  # the file is created private
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        router.close(0)
        raise ConfigError("zmq_endpoint", f"cannot bind {endpoint}: {error}") from error
    finally:
        os.umask(old_mask)
    return router


def remove_stale_file(path: Path) -> None:
    """Remove the socket file of an engine that is gone. ZeroMQ would remove any file, also one in use.

    Raises: ConfigError if it is something else, or a process listens there.
    """
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError("zmq_endpoint", f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
        else:
            raise ConfigError("zmq_endpoint", f"another process listens on {path}")
