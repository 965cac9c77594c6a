"""The frontend process: loads the codec, binds both links, and serves.

`ClientEndpoint` binds the client link: addresses, stale files, API keys.

    ipc, in the run's private directory    the HTTP server's: it names the clients that its requests are of
    ipc, of --zmq-endpoint                 guarded by file permissions: its clients are of the server's own user
    tcp, of --zmq-endpoint                 with API keys, clients are known by their names; `TcpGuard` bounds them

A tcp endpoint with API keys speaks ZeroMQ's PLAIN mechanism: the key is the password. The ZAP handler of pyzmq looks it
up; its answer, the user id, comes with every message of the connection.
"""

import contextlib
import hashlib
import logging
import os
import socket
import stat
from functools import partial
from pathlib import Path
from typing import Self

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from overlap_spec import features
from overlap_spec.client.link import MAX_MESSAGE_BYTES, PLAIN_USER, is_secured
from overlap_spec.config import MIB, LinkSettings, Settings
from overlap_spec.errors import ConfigError
from overlap_spec.features import absent_fields
from overlap_spec.frontend.client_messages import OPERATOR_ID, user_id
from overlap_spec.frontend.client_router import SEND_QUEUE, ClientRouter
from overlap_spec.frontend.codec import Codec, IdsOnly, load_codec
from overlap_spec.frontend.hooks import attached
from overlap_spec.frontend.open_requests import UIDS_OF_A_FRONTEND
from overlap_spec.frontend.request_checks import RequestChecks
from overlap_spec.frontend.service import FrontendService
from overlap_spec.frontend.tcp_guard import BACKLOG, TcpGuard, listen
from overlap_spec.messages import CLIENTS_OF_A_FRONTEND, FrontendFacts, NewFrontend, Terms, ToFrontend, ToScheduler
from overlap_spec.runtime.actor import ActorContext
from overlap_spec.runtime.transport import BatchOutlet, Inbox

ZAP_DOMAIN = "overlap-spec"
MOST_UNFINISHED = 80 * MIB  # of messages of all TCP peers; one of them may have 64 MiB
RELAY_FILE = "relay.sock"  # what comes from a TCP address, in the run's private directory
HEARTBEATS = 4  # in the time for which a client may be silent

log = logging.getLogger(__name__)


class ClientEndpoint:
    """The bound endpoint: clients connect to `address`, and `router` reads them. Needs a running loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], settings: LinkSettings, default: str) -> None:
        self.address = settings.client_endpoint or default
        is_tcp = self.address.startswith("tcp://")
        self._guard: TcpGuard | None = None
        self._authenticator = _Authenticator(context, settings) if is_secured(self.address, settings.api_key) else None
        router_socket = _router(context, settings.client_timeout_s)
        try:
            _bind(router_socket, default)
            if is_tcp:
                self._guard, self.address = self._listen(router_socket, default, settings)
            elif self.address != default:
                _bind(router_socket, self.address)
        except BaseException:
            router_socket.close(0)
            self._stop_authenticator()
            raise
        self.router = ClientRouter(router_socket, settings, log.warning)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; the router sends what is queued before it closes."""
        self.router.close()
        if self._guard is not None:
            self._guard.close()
        self._stop_authenticator()
        if self.address.startswith("ipc://"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.removeprefix("ipc://"))

    def _listen(self, router: zmq.Socket[bytes], default: str, settings: LinkSettings) -> tuple[TcpGuard, str]:
        """Listen on the TCP address, for a file beside the default one. Raises: ConfigError."""
        listener, address = listen(self.address)
        relay = str(Path(default.removeprefix("ipc://")).with_name(RELAY_FILE))
        authenticator = self._authenticator
        try:
            if authenticator is not None:
                router.setsockopt(zmq.PLAIN_SERVER, 1)
                router.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            _bind(router, f"ipc://{relay}")
        except BaseException:
            listener.close()
            raise
        bounds = settings.max_client_bytes, min(settings.max_bytes, MOST_UNFINISHED)
        return TcpGuard(listener, relay, bounds, authenticator.user if authenticator else lambda _: ""), address

    def _stop_authenticator(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()


class _Authenticator(AsyncioAuthenticator):
    """Accepts any key as the password of one name. Its debug lines, which show passwords, are never written.

    Keys are looked up by their digests: how long that takes depends on none of them.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], settings: LinkSettings) -> None:
        logger = logging.getLogger(f"{__name__}.zap")
        logger.setLevel(logging.INFO)
        super().__init__(context, log=logger)
        self.start()
        self._users = {_digest(settings.api_key or ""): user_id("default")}
        self._users |= {_digest(key): user_id(name) for key, name in settings.key_names.items()}
        if settings.admin_key is not None:
            self._users[_digest(settings.admin_key)] = OPERATOR_ID
        self._user = ""  # of the request that is being answered
        self.configure_plain(ZAP_DOMAIN)

    def _authenticate_plain(self, domain: str, username: str, password: str) -> tuple[bool, bytes]:
        self._user = self._users.get(_digest(password), "") if username == PLAIN_USER else ""
        return bool(self._user), b"" if self._user else b"Invalid password"

    def user(self, password: bytes) -> str:
        """The user id of a password; "" of a wrong one."""
        return self._users.get(hashlib.sha256(password).digest(), "")

    def _send_zap_reply(self, request_id: bytes, status_code: bytes, status_text: bytes, user_id: str = "") -> None:
        super()._send_zap_reply(request_id, status_code, status_text, self._user)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _router(context: zmq.Context[zmq.Socket[bytes]], timeout_s: float) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, SEND_QUEUE)
    router.setsockopt(zmq.BACKLOG, BACKLOG)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    router.setsockopt(zmq.HEARTBEAT_IVL, max(1, round(timeout_s * 1e3 / HEARTBEATS)))
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(timeout_s * 1e3))
    return router


def _bind(router: zmq.Socket[bytes], endpoint: str) -> None:
    """Raises: ConfigError if the address cannot be bound."""
    if endpoint.startswith("ipc://"):
        remove_stale_file(Path(endpoint.removeprefix("ipc://")))
    old_mask = os.umask(0o177)  # the file is created private
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError("zmq_endpoint", f"cannot bind {endpoint}: {error}") from error
    finally:
        os.umask(old_mask)


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


async def main(context: ActorContext) -> None:
    """Run until Shutdown. Cancellation: the endpoint is closed; open requests get no answer."""
    settings = context.settings
    inbox = context.step_inbox(features.link(ToFrontend, settings.features), spins=False)
    scheduler: BatchOutlet[ToScheduler] = context.queued_outlet("scheduler")
    if context.was_started_alone:
        scheduler.send(NewFrontend(context.generation))  # while the codec loads, steps end and slots become free
    codec = make_codec(settings)
    checks = make_checks(settings, codec)
    with ClientEndpoint(context.zmq, settings.link, context.endpoints.client()) as endpoint:
        endpoint.router.number_from(context.generation * CLIENTS_OF_A_FRONTEND)
        service = FrontendService(codec, checks, scheduler, endpoint.router, context.send_supervisor)
        service.number_from(context.generation * UIDS_OF_A_FRONTEND)
        if context.generation > 0:
            service.expect_returns()
        service.trace = service.rows.trace = context.trace
        service.report_alive = context.report_alive
        parts = service.parts(settings, context.generation)
        service.attach(attached(features.modules(features.FRONTEND, settings.features), parts, absent_fields()))
        service.renew = partial(_renewed, context)
        context.ready(FrontendFacts(codec.name, endpoint.address, codec.chat_template))
        try:
            await service.serve(inbox)
        finally:
            service.hooks.close()


def make_codec(settings: Settings) -> Codec:
    """The model's tokenizer, or none. Raises: CheckpointError."""
    directory = settings.model.files.tokenizer_dir
    if settings.skip_tokenizer_init or directory is None:
        return IdsOnly()
    return load_codec(Path(directory), settings.model.files.chat_template)


def _renewed(context: ActorContext, generation: int) -> tuple[Inbox[ToFrontend], BatchOutlet[ToScheduler]]:
    """Links to a new scheduler; messages of the old one are lost."""
    context.renew(generation)
    link = features.link(ToFrontend, context.settings.features)
    return context.step_inbox(link, spins=False), context.queued_outlet("scheduler")


def make_checks(settings: Settings, codec: Codec) -> RequestChecks:
    """Checks with the model's EOS ids, or its tokenizer's if the model names none."""
    eos_token_ids = settings.model.files.eos_token_ids or codec.eos_token_ids
    link = settings.link
    checks = RequestChecks(eos_token_ids, link.max_queued_requests, settings.scheduler.seed, link.trusts_templates)
    checks.flags = Terms(timeout_s=link.request_timeout_s, first_token_timeout_s=link.first_token_timeout_s)
    checks.admin_key = link.admin_key
    return checks
